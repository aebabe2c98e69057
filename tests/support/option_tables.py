"""Tables of options in Markdown, from the dataclasses that define them."""

import dataclasses
from collections.abc import Iterable
from types import NoneType
from typing import Any, Final, Literal, get_args, get_origin

from pagedserve.config.options import (
    Option,
    by_concern,
    capital,
    default_text,
    flag_of,
    union_members,
)
from pagedserve.sampling_params.parameter import Parameter

# Marks around the generated tables of a page.
_BEGIN: Final = "<!-- made by `make options` from python/{} -->"
_END: Final = "<!-- end of the table -->"


def table(arguments: type) -> str:
    """The fields as Markdown tables, one per concern, with headings where there are several."""
    tables = list(by_concern(arguments))
    return "\n\n".join(
        _table(found) if len(tables) == 1 else f"### {capital(concern)}\n\n{_table(found)}"
        for concern, found in tables
    )


def _table(found: Iterable[tuple[dataclasses.Field[Any], Option]]) -> str:
    columns = ["option", "type", "default", "also as", "what it is"]
    rows = [
        [
            f"`{argument.name}`",
            _shown_type(argument.type),
            default_text(argument.default, known),
            _elsewhere(argument.name, known),
            known.text,
        ]
        for argument, known in found
    ]
    if not any(row[3] for row in rows):
        for row in (columns, *rows):
            del row[3]
    header, *lines = (f"| {' | '.join(row)} |" for row in (columns, *rows))
    return "\n".join([header, f"|{'---|' * len(columns)}", *lines])


def with_table(page: str, arguments: type) -> str:
    """A page in Markdown whose tables between the two marks are up to date."""
    begin = _BEGIN.format(f"{arguments.__module__.replace('.', '/')}.py")
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(_END)
    return f"{before}{begin}\n\n{table(arguments)}\n\n{_END}{after}"


def _shown_type(kind: Any) -> str:
    shown = []
    for member in union_members(kind):
        if get_origin(member) is Literal:
            shown += [f'`"{word}"`' for word in get_args(member)]
        elif get_origin(member) is tuple:
            shown.append(f"several `{get_args(member)[0].__name__}`")
        else:
            shown.append("`None`" if member is NoneType else f"`{_type_name(member)}`")
    return ", ".join(shown)


def _type_name(kind: Any) -> str:
    if get_origin(kind) not in {list, dict}:
        return str(kind.__name__)
    return f"{kind.__name__}[{', '.join(map(_type_name, get_args(kind)))}]"


def _elsewhere(name: str, known: Option) -> str:
    """Where else an option can be given: in a field of requests, on a command line."""
    if not isinstance(known, Parameter):
        return ""
    fields = [] if known.request == "none" else ["field"]
    flags = [] if known.flag is None else [f"`{flag_of(name)}`"]
    return ", ".join([*fields, *flags])
