"""``EngineOptions``, made from the table of ``EngineArgs``: ``make options`` writes its module."""

import re
from pathlib import Path
from types import NoneType
from typing import Any, Final, ForwardRef, Literal, get_args, get_origin

from pagedserve.config import EngineArgs
from pagedserve.config.options import options_of

MODULE: Final = Path(__file__).parents[2] / "python" / "pagedserve" / "config" / "engine_options.py"

_HEAD: Final = '''\
"""``EngineOptions``: the options of ``EngineArgs`` as keyword arguments, for type checkers.

``make options`` writes this file from the table of ``EngineArgs``.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from pagedserve.config.reasoning import ReasoningFormat
from pagedserve.config.speculative import SpeculativeConfig

if TYPE_CHECKING:
    import torch


class EngineOptions(TypedDict, total=False):
    """Options of ``EngineArgs`` besides the model; None leaves one at its default.

    ``help(pagedserve.EngineArgs)`` and docs/options.md describe each.
    """

'''


def module() -> str:
    """The module as its table is now, unformatted."""
    return _HEAD + "".join(
        f"    {argument.name}: {_annotation(argument.type, known.converts)}\n"
        for argument, known in options_of(EngineArgs)
        if argument.name != "model"
    )


def _annotation(kind: Any, further: Any) -> str:
    """The union of two types and None; a string if one of them is imported for type checkers."""
    members = [member for member in get_args(kind | further | None) if member is not NoneType]
    literals = [member for member in members if get_origin(member) is Literal]
    words = [word for literal in literals for word in get_args(literal)]
    names = [_name(member) for member in members if member not in literals]
    text = " | ".join([f"Literal{words}"] * bool(words) + names + ["None"])
    return f'"{text}"' if any(isinstance(member, ForwardRef) for member in members) else text


def _name(kind: Any) -> str:
    if isinstance(kind, ForwardRef):
        return kind.__forward_arg__
    return re.sub(r"\b[a-z.]+\.", "", str(kind)) if get_args(kind) else str(kind.__name__)


if __name__ == "__main__":
    MODULE.write_text(module(), encoding="utf-8")
