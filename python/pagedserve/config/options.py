"""An option, written once: from a dataclass field to its check, command line and documentation.

A field made by ``option`` carries its check, its help and its concern.  ``check_options`` runs the
checks when the dataclass is made, ``add_arguments`` gives a parser one argument per field in one
group per concern, ``describe`` formats the fields for a docstring.
"""

import argparse
import dataclasses
import json
import math
import textwrap
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from types import NoneType, UnionType
from typing import Any, Final, Literal, TypeAlias, Union, get_args, get_origin

from pagedserve.checks import Check
from pagedserve.errors import ConfigError, RequestError

# What an option is about, in the order of help and documentation.
Concern: TypeAlias = Literal[
    "model",
    "precision and kernels",
    "memory and KV cache",
    "scheduling",
    "parallelism",
    "speculative decoding",
    "LoRA",
    "multimodal input",
    "length",
    "sampling",
    "penalties and allowed tokens",
    "parallel sampling",
    "beam search",
    "log-probabilities",
    "text",
    "server",
    "chat and tool calls",
    "limits",
    "TLS and CORS",
    "logging and tracing",
    "replicas",
]

_UNITS: Final = {"": 1} | {
    prefix + kind: base**power
    for kind, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("kmgt", start=1)
}

# Columns of a docstring.
_WIDTH: Final = 96


def parse_bytes(text: str) -> int:
    """Parse a number of bytes: "1073741824", "512MiB", "2G" or "1.5GiB".

    Raises:
        argparse.ArgumentTypeError: Another form.
    """
    number = text.lower().replace(" ", "").removesuffix("b")
    unit = number.lstrip("0123456789.")
    digits = number.removesuffix(unit)
    is_number = digits.replace(".", "", 1).isdecimal()
    num_bytes = float(digits) * _UNITS.get(unit, math.nan) if is_number else math.nan
    if not math.isfinite(num_bytes):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of bytes; give e.g. 512MiB or 2G (k, M, G, T, Ki, Mi, Gi, Ti)"
        )
    return int(num_bytes)


def parse_integer(text: str) -> int:
    """Parse an integer: "4096", "4k" (4000), "4K" (4096) or "25.6k".

    Raises:
        argparse.ArgumentTypeError: Another form.
    """
    number = text.rstrip("kmgtKMGT")
    unit = text[len(number) :]
    try:
        factor = _UNITS[f"{unit.lower()}i" if unit.isupper() else unit]
        return int(float(number) * factor) if unit else int(text)
    except (KeyError, OverflowError, ValueError):
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r}") from None


def parse_mapping(text: str) -> dict[str, Any]:
    """Parse a JSON object.

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
    """Properties of an option besides its field's type and default.

    Attributes:
        check: Returns the value to keep, or raises ``RequestError``.
        text: Help, in sentences of which the first stands alone.
        concern: Group of help and documentation that lists it.
        unset: Meaning of None, where None is the default.
        parse: Converts the text of a command line; None uses the field's type.
        converts: Type of further values that ``check`` converts to the field's type.
        part: Configuration of the core that takes it, "scheduler" or "cache".
        core_name: Its name there, where it differs.
    """

    check: Check[object]
    text: str
    concern: Concern
    unset: str | None = None
    parse: Callable[[str], object] | None = None
    converts: Any = None
    part: Literal["scheduler", "cache"] | None = None
    core_name: str | None = None


def option(
    default: object,
    check: Check[object],
    text: str,
    *,
    concern: Concern,
    is_secret: bool = False,
    **more: Any,
) -> Any:
    """A dataclass field that is an option.

    Args:
        default: Value of an option that is not given.
        check: Attribute of ``Option``, as ``text``, ``concern`` and ``more`` are.
        text: See ``Option``.
        concern: See ``Option``.
        is_secret: Whether the dataclass is printed without it.
        **more: Further attributes of ``Option``.
    """
    known = Option(check=check, text=text, concern=concern, **more)
    return field(default=default, repr=not is_secret, metadata={"option": known})


def options_of(arguments: type | Any) -> Iterator[tuple[dataclasses.Field[Any], Option]]:
    """The fields of a dataclass, or of one of its instances, with their options."""
    for argument in dataclasses.fields(arguments):
        yield argument, argument.metadata["option"]


def check_options(arguments: Any) -> None:
    """Check every field of a frozen dataclass and keep what its check returns.

    Raises:
        ConfigError: An invalid value; the message says what is accepted.
    """
    for argument, _ in options_of(arguments):
        value = checked(argument, getattr(arguments, argument.name))
        object.__setattr__(arguments, argument.name, value)


def checked(argument: dataclasses.Field[Any], value: object) -> object:
    """Return what the check of an option returns for a value; None is the option's default.

    Raises:
        ConfigError: An invalid value; the message says what is accepted.
    """
    if value is None and argument.default is not MISSING:
        value = argument.default
    try:
        return argument.metadata["option"].check(argument.name, value)
    except RequestError as error:  # what a check of a single value raises
        raise ConfigError(str(error)) from None


def by_concern(
    arguments: type,
) -> Iterator[tuple[Concern, list[tuple[dataclasses.Field[Any], Option]]]]:
    """The options of each concern that has any, concerns in their order."""
    for concern in get_args(Concern):
        found = [pair for pair in options_of(arguments) if pair[1].concern == concern]
        if found:
            yield concern, found


def add_arguments(
    parser: argparse.ArgumentParser,
    arguments: type,
    defaults: Mapping[str, object] | None = None,
    names: Container[str] | None = None,
) -> None:
    """Give a parser one argument for each field, in one group for each concern.

    Args:
        parser: Finds None for what is not given, which leaves a field at its default.
        arguments: A dataclass of options.
        defaults: Defaults that differ for this parser, by the names of fields.
        names: Names of the fields to add; None adds all.
    """
    own = defaults or {}
    for concern, options in by_concern(arguments):
        found = [pair for pair in options if names is None or pair[0].name in names]
        if not found:
            continue
        group = _group(parser, concern)
        for argument, known in found:
            shown = _with_label(own.get(argument.name, argument.default), known)
            group.add_argument(
                flag_of(argument.name),
                help=f"{known.text} ({shown})".replace("%", "%%"),
                **argument_of(argument.type, known),
            )
    parser.set_defaults(**own)


def _group(parser: argparse.ArgumentParser, title: str) -> argparse._ArgumentGroup:
    """The group of a parser with this title, made if it is the first with it."""
    for group in parser._action_groups:  # noqa: SLF001  # argparse has no other list of them
        if group.title == title:
            return group
    return parser.add_argument_group(title)


def flag_of(name: str) -> str:
    """The option of a command line for a field."""
    return f"--{name.replace('_', '-')}"


def argument_of(kind: Any, known: Option) -> dict[str, Any]:
    """How ``add_argument`` converts an option, by the type of its field."""
    members = [member for member in union_members(kind) if member is not NoneType]
    if list[str] in members:
        return {"action": "append"}
    (plain,) = members
    if plain is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(plain) is Literal:
        further = [word for member in union_members(known.converts) for word in get_args(member)]
        return {"choices": [*get_args(plain), *further]}
    if get_origin(plain) is tuple:
        return {"type": get_args(plain)[0], "nargs": "+", "action": "extend"}
    return {"type": known.parse or (parse_integer if plain is int else plain)}


def union_members(kind: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself."""
    return get_args(kind) if get_origin(kind) in {Union, UnionType} else (kind,)


def describe(arguments: type) -> str:
    """The "Attributes" of a docstring, from the fields."""
    lines = ["Attributes:"]
    for argument, known in options_of(arguments):
        text = f"{argument.name}: {known.text} {capital(_with_label(argument.default, known))}."
        lines += textwrap.wrap(
            text, _WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False
        )
    return "\n".join(lines)


def default_text(default: object, known: Option) -> str:
    """The default of an option, in words."""
    if default is MISSING:
        return "required"
    is_unset = default in (None, (), "")
    return known.unset if is_unset and known.unset else str(default)


def _with_label(default: object, known: Option) -> str:
    shown = default_text(default, known)
    return shown if default is MISSING else f"default: {shown}"


def capital(text: str) -> str:
    """A text with its first letter in upper case."""
    return text[:1].upper() + text[1:]
