"""Patterns of module names in an adapter's config, matched in bounded time.

peft writes regular expressions there.  ``re`` backtracks: forty characters of an untrusted adapter
would block the process.  Here a pattern is matched by sets of positions.

Invariants:

1. A match visits each part of a pattern at most once per position of the name.
2. An accepted pattern matches the same names as in ``re``.

Costs: plain names, which peft usually writes, use ``re`` and cost a microsecond each; other
patterns about a microsecond per part and position.
"""

import importlib
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeAlias, TypeVar

T = TypeVar("T")

MAX_PATTERNS: Final = 10_000
MAX_CHARACTERS: Final = 1024
MAX_DEPTH: Final = 32
# Maximum matching steps for all of an adapter's modules: a few seconds.
MAX_STEPS: Final = 5_000_000

ACCEPTED: Final = (
    "a name, with ., [...], \\d, \\w, (...), |, *, +, ?, {m,n}, ^ and $, of at most "
    f"{MAX_CHARACTERS} characters"
)
# A module's name: dots match themselves and, as in peft, any other character.
_NAME: Final = re.compile(r"\^?(?:[\w.-]|\\\.)*\$?", re.ASCII)
_parser: Any = importlib.import_module("re._parser")
_MAX_REPEAT: Final = _parser.MAXREPEAT
_CATEGORIES: Final = {
    "CATEGORY_DIGIT": re.compile(r"\d"),
    "CATEGORY_NOT_DIGIT": re.compile(r"\D"),
    "CATEGORY_WORD": re.compile(r"\w"),
    "CATEGORY_NOT_WORD": re.compile(r"\W"),
    "CATEGORY_SPACE": re.compile(r"\s"),
    "CATEGORY_NOT_SPACE": re.compile(r"\S"),
}

# Maps a position of a name to all positions where a match of a part can end.
_Ends: TypeAlias = frozenset[int]
_Part: TypeAlias = tuple[Any, Any]


@dataclass(slots=True)
class NamePatterns(Generic[T]):
    """Values by patterns that match a module's whole name, or its end after a dot.

    Attributes:
        values: Values by pattern; the first pattern that matches is used.
    """

    values: Mapping[str, T]
    _plain: dict[str, re.Pattern[str]] = field(default_factory=dict)
    _parsed: dict[str, Any] = field(default_factory=dict)
    _found: dict[str, T | None] = field(default_factory=dict)
    _num_steps: int = 0

    def __post_init__(self) -> None:
        """Parse the patterns.

        Raises:
            ValueError: A pattern is not a regular expression, or uses unsupported syntax.
        """
        if len(self.values) > MAX_PATTERNS:
            raise ValueError(f"has {len(self.values)} patterns; accepted are {MAX_PATTERNS}")
        for source in self.values:
            if len(source) > MAX_CHARACTERS:
                shown = f"{source[:40]!r}..."
                raise ValueError(f"has {shown} of {len(source)} characters; accepted is {ACCEPTED}")
            if _NAME.fullmatch(source):
                self._plain[source] = re.compile(rf"(?:.*\.)?(?:{source})")
            else:
                self._parsed[source] = _parse(source)

    def find(self, name: str, default: T) -> T:
        """Return the value of the first pattern that a module's name matches.

        Raises:
            ValueError: The patterns take too many steps.
        """
        if name not in self._found:
            matching = (value for source, value in self.values.items() if self._is(source, name))
            self._found[name] = next(matching, None)
        found = self._found[name]
        return default if found is None else found

    def _is(self, source: str, name: str) -> bool:
        if source in self._plain:
            return self._plain[source].fullmatch(name) is not None
        match = _Match(name, MAX_STEPS - self._num_steps)
        starts = [0, *(index + 1 for index, character in enumerate(name) if character == ".")]
        is_match = any(len(name) in match.ends(self._parsed[source], at) for at in starts)
        self._num_steps += match.num_steps
        return is_match


def _parse(source: str) -> Any:
    """Parse a pattern with ``re``, and check that its syntax is supported.

    Raises:
        ValueError: The pattern is invalid.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about syntax that may change in the future
            parts = _parser.parse(source)
    except RecursionError:
        raise ValueError(f"has {source!r}, nested too deep; accepted is {ACCEPTED}") from None
    except (re.error, OverflowError) as error:
        raise ValueError(f"has {source!r}, which is no regular expression: {error}") from error
    found = "flags" if parts.state.flags & ~re.UNICODE else _unknown(parts, MAX_DEPTH)
    if found is not None:
        raise ValueError(f"has {source!r} with {found}; accepted is {ACCEPTED}")
    return parts


@dataclass(slots=True)
class _Match:
    """Matches of a pattern's parts in one name, each cached.

    Attributes:
        name: Name of the module.
        max_steps: Maximum number of steps.
        num_steps: Steps so far.
    """

    name: str
    max_steps: int
    num_steps: int = 0
    _found: dict[tuple[int, int], _Ends] = field(default_factory=dict)

    def ends(self, parts: Iterable[_Part], start: int) -> _Ends:
        """Positions where a sequence of parts that starts at ``start`` can end."""
        key = (id(parts), start)
        if key not in self._found:
            ends = frozenset((start,))
            for operator, argument in parts:
                kind = str(operator)
                ends = frozenset().union(*(self._part(kind, argument, at) for at in ends))
            self._found[key] = ends
        return self._found[key]

    def _part(self, kind: str, argument: Any, at: int) -> _Ends:
        self.num_steps += 1
        if self.num_steps > self.max_steps:
            raise ValueError(f"takes more than {MAX_STEPS} steps to match with the model's modules")
        if kind == "AT":
            where = len(self.name) if str(argument) == "AT_END" else 0
            return frozenset((at,)) if at == where else frozenset()
        if kind == "BRANCH":
            return frozenset().union(*(self.ends(branch, at) for branch in argument[1]))
        if kind == "SUBPATTERN":
            return self.ends(argument[3], at)
        if kind in _REPEATS:
            return self._repeated(argument, at)
        is_match = at < len(self.name) and _is_in(kind, argument, self.name[at])
        return frozenset((at + 1,)) if is_match else frozenset()

    def _repeated(self, argument: Any, at: int) -> _Ends:
        """Ends of ``least`` to ``most`` matches; stops when a round adds none."""
        least, most, parts = argument
        ends = frozenset((at,))
        for _ in range(least):
            following = self._ends_of_all(parts, ends)
            if following == ends:
                break
            ends = following
        reached, fresh, rounds = ends, ends, least
        while fresh and (most is _MAX_REPEAT or rounds < most):
            fresh = self._ends_of_all(parts, fresh) - reached
            reached, rounds = reached | fresh, rounds + 1
        return reached

    def _ends_of_all(self, parts: Any, starts: _Ends) -> _Ends:
        self.num_steps += len(starts)
        return frozenset().union(*(self.ends(parts, start) for start in starts))


_REPEATS: Final = ("MAX_REPEAT", "MIN_REPEAT")
_CHARACTERS: Final = ("LITERAL", "NOT_LITERAL", "ANY", "IN")


def _unknown(parts: Iterable[_Part], depth: int) -> str | None:
    """Unsupported syntax, if any: references, assertions, flags and the like."""
    if depth == 0:
        return f"more than {MAX_DEPTH} levels"
    for operator, argument in parts:
        kind = str(operator)
        inner: Iterable[Any] = ()
        if kind in _REPEATS:
            inner = argument[2:]
        elif kind == "BRANCH":
            inner = argument[1]
        elif kind == "SUBPATTERN" and not argument[1] and not argument[2]:
            inner = argument[3:]
        elif kind not in _CHARACTERS and str(argument) not in ("AT_BEGINNING", "AT_END"):
            return kind.lower()
        found = next(filter(None, (_unknown(part, depth - 1) for part in inner)), None)
        if found is not None:
            return found
    return None


def _is_in(operator: str, argument: Any, character: str) -> bool:
    """Whether a part that matches one character matches this one."""
    code = ord(character)
    if operator == "ANY":
        return character != "\n"
    if operator == "LITERAL":
        return bool(code == argument)
    if operator == "NOT_LITERAL":
        return bool(code != argument)
    if operator == "RANGE":
        return bool(argument[0] <= code <= argument[1])
    if operator == "CATEGORY":
        return _CATEGORIES[str(argument)].match(character) is not None
    is_negated = str(argument[0][0]) == "NEGATE"
    found = any(_is_in(str(kind), value, character) for kind, value in argument[is_negated:])
    return found != is_negated
