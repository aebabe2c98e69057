"""An option, written once: from a dataclass field to its check, command line and documentation.

A field made by ``option`` carries its check and its help.  ``checked`` runs the checks when the
dataclass is made, ``add_arguments`` gives a parser one argument a field, ``describe`` and ``table``
write the fields down for people.
"""

import argparse
import dataclasses
import json
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from types import NoneType, UnionType
from typing import Any, Final, Literal, get_args, get_origin

from pagedserve.checks import Check
from pagedserve.errors import ConfigError, RequestError

_UNITS: Final = {"": 1} | {
    prefix + kind: base**power
    for kind, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("kmgt", start=1)
}

# Columns of a docstring.
_WIDTH: Final = 96
# What a page says about itself, around the table that is made from the options.
_BEGIN: Final = "<!-- made by `make options` from python/{} -->"
_END: Final = "<!-- end of the table -->"


def parse_bytes(text: str) -> int:
    """Bytes from "1073741824", "512MiB", "2G" or "1.5GiB".

    Raises:
        argparse.ArgumentTypeError: Another form.
    """
    number = text.lower().replace(" ", "").removesuffix("b")
    unit = number.lstrip("0123456789.")
    digits = number.removesuffix(unit)
    is_number = digits.replace(".", "", 1).isdecimal() and math.isfinite(float(digits))
    if unit not in _UNITS or not is_number:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of bytes; give e.g. 512MiB or 2G (k, M, G, T, Ki, Mi, Gi, Ti)"
        )
    return int(float(digits) * _UNITS[unit])


def parse_mapping(text: str) -> dict[str, Any]:
    """What a JSON object says.

    Raises:
        argparse.ArgumentTypeError: Another form.
    """
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What a field knows about itself besides its type and default.

    Attributes:
        check: Returns the value to keep, or raises ``RequestError``.
        text: What it is, in sentences.
        unset: What None stands for, where it is the default.
        parse: What the command line makes of its text; None goes by the type.
        part: The configuration of the core that takes it, "scheduler" or "cache".
        core_name: Its name there, where it differs.
    """

    check: Check[object]
    text: str
    unset: str | None = None
    parse: Callable[[str], object] | None = None
    part: Literal["scheduler", "cache"] | None = None
    core_name: str | None = None


def option(
    default: object, check: Check[object], text: str, *, is_secret: bool = False, **more: Any
) -> Any:
    """A dataclass field that is an option.

    Args:
        default: Where nobody says.
        check: Of ``Option``, as ``text`` and ``more`` are.
        text: See there.
        is_secret: Whether it is left out where the dataclass is printed.
        **more: See there.
    """
    known = Option(check=check, text=text, **more)
    return field(default=default, repr=not is_secret, metadata={"option": known})


def options_of(arguments: type | Any) -> Iterator[tuple[dataclasses.Field[Any], Option]]:
    """The fields of a dataclass, or of one of its instances, with what they know."""
    for argument in dataclasses.fields(arguments):
        yield argument, argument.metadata["option"]


def check_options(arguments: Any) -> None:
    """Check every field of a frozen dataclass and keep what its check returns.

    None leaves any field at its default.

    Raises:
        ConfigError: A value that cannot be; the message says what is accepted.
    """
    for argument, known in options_of(arguments):
        value = getattr(arguments, argument.name)
        if value is None and argument.default is not MISSING:
            value = argument.default
        try:
            value = known.check(argument.name, value)
        except RequestError as error:  # what a check of a single value raises
            raise ConfigError(str(error)) from None
        object.__setattr__(arguments, argument.name, value)


def core_options(arguments: Any, part: Literal["scheduler", "cache"]) -> dict[str, Any]:
    """What one configuration of the core is told; options left out have their default there."""
    values = {
        known.core_name or argument.name: getattr(arguments, argument.name)
        for argument, known in options_of(arguments)
        if known.part == part
    }
    return {name: value for name, value in values.items() if value is not None}


def add_arguments(
    parser: argparse.ArgumentParser,
    arguments: type,
    group_name: str,
    defaults: Mapping[str, object] | None = None,
) -> argparse._ArgumentGroup:
    """Give a parser one argument for each field.

    Args:
        parser: Finds None for what is not given, which leaves a field at its default.
        arguments: A dataclass of options.
        group_name: What its options are called together.
        defaults: Those that are others for this parser, by the names of fields.

    Returns:
        The group.
    """
    group = parser.add_argument_group(group_name)
    own = defaults or {}
    for argument, known in options_of(arguments):
        shown = _default_text(own.get(argument.name, argument.default), known)
        group.add_argument(
            f"--{argument.name.replace('_', '-')}",
            help=f"{known.text} ({shown})".replace("%", "%%"),
            **_argument(argument.type, known),
        )
    parser.set_defaults(**own)
    return group


def _argument(kind: Any, known: Option) -> dict[str, Any]:
    (plain,) = [member for member in _members(kind) if member is not NoneType]
    if plain is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(plain) is Literal:
        return {"choices": get_args(plain)}
    if get_origin(plain) is tuple:
        return {"type": get_args(plain)[0], "nargs": "+", "action": "extend"}
    return {"type": known.parse or plain}


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if isinstance(kind, UnionType) or NoneType in get_args(kind) else (kind,)


def describe(arguments: type) -> str:
    """The "Attributes" of a docstring, from the fields."""
    lines = ["Attributes:"]
    for argument, known in options_of(arguments):
        text = f"{argument.name}: {known.text} {_capital(_default_text(argument.default, known))}."
        lines += textwrap.wrap(
            text, _WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False
        )
    return "\n".join(lines)


def table(arguments: type) -> str:
    """The fields as a table in Markdown."""
    rows = [
        f"| `{argument.name}` | {_shown_type(argument.type)} "
        f"| {_default_text(argument.default, known, short=True)} | {known.text} |"
        for argument, known in options_of(arguments)
    ]
    return "\n".join(["| option | type | default | what it is |", "|---|---|---|---|", *rows])


def with_table(page: str, arguments: type) -> str:
    """A page in Markdown with the table between its two marks brought up to date."""
    begin = _BEGIN.format(f"{arguments.__module__.replace('.', '/')}.py")
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(_END)
    return f"{before}{begin}\n\n{table(arguments)}\n\n{_END}{after}"


def _shown_type(kind: Any) -> str:
    shown = []
    for member in _members(kind):
        if get_origin(member) is Literal:
            shown += [f'`"{word}"`' for word in get_args(member)]
        elif get_origin(member) is tuple:
            shown.append(f"several `{get_args(member)[0].__name__}`")
        else:
            shown.append("`None`" if member is NoneType else f"`{member.__name__}`")
    return ", ".join(shown)


def _default_text(default: object, known: Option, *, short: bool = False) -> str:
    if default is MISSING:
        return "required"
    is_unset = default in (None, (), "")
    shown = known.unset if is_unset and known.unset else str(default)
    return shown if short else f"default: {shown}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
