"""Checks of one value that a caller gave.

A check is called with the parameter's name and the value; it returns the value in Python's own
type or raises ``RequestError`` with the name, the value and what is accepted.  Most are made by a
function that takes the limits, so that a table of checks reads like the documentation.
"""

import difflib
import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, SupportsFloat, SupportsIndex, TypeAlias, TypeVar

from pagedserve.errors import ConfigError, RequestError, reason

T = TypeVar("T")
Check: TypeAlias = Callable[[str, Any], T]

_MAX_COUNT: Final = (1 << 63) - 1


def refuse(name: str, value: object, accepted: str) -> NoReturn:
    """Raise the ``RequestError`` of a value that is not accepted.

    Args:
        name: Name of a parameter, or of a part of one: ``stop[0]``, ``a key of logit_bias``,
            ``structured_outputs.json``.
        value: Value that was given.
        accepted: Description of accepted values.
    """
    param = name.partition("[")[0].rpartition(" ")[2].partition(".")[0]
    raise RequestError(f"{name} is {value!r}; it must be {accepted}", param=param)


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """The end of an error about a misspelt name: the most similar known one, or "" if none is.

    Args:
        name: Name that was given.
        known: Names that exist.
        cutoff: Least similarity, as of ``difflib.get_close_matches``.
    """
    nearest = difflib.get_close_matches(name, list(known), 1, cutoff)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def check_directory(output: Path) -> None:
    """Check that the directory of an output file exists.

    Raises:
        ConfigError: It does not, or cannot be read.
    """
    try:
        exists = output.parent.is_dir()
    except OSError as error:
        raise ConfigError(f"output: {str(output.parent)!r}: {reason(error)}") from error
    if not exists:
        raise ConfigError(f"output: {str(output.parent)!r} is no directory; create it first")


def check_replaceable(output: Path, source: Path) -> None:
    """Check that an output file can be written, also in the place of one, and is not the input.

    Raises:
        ConfigError: It cannot, or it is.
    """
    check_directory(output)
    if output.is_dir():
        raise ConfigError(f"output: {str(output)!r} is a directory; give a file")
    if not os.access(output if output.exists() else output.parent, os.W_OK):
        raise ConfigError(f"output: cannot write {str(output)!r}: permission denied")
    if output.exists() and output.samefile(source):
        raise ConfigError(f"output: {str(output)!r} is the input file; give another")


def real(
    accepted: str, *, low: float = -math.inf, high: float = math.inf, open_low: bool = False
) -> Check[float]:
    """A finite number from ``low`` (or above it) to ``high``."""

    def check(name: str, value: object) -> float:
        number = _float(value)
        if not (math.isfinite(number) and low <= number <= high) or (open_low and number == low):
            refuse(name, value, accepted)
        return number

    return check


def integer(accepted: str, *, low: int, high: float = math.inf) -> Check[int]:
    """An integer from ``low`` to ``high``; the error says "an integer, ``accepted``"."""

    def check(name: str, value: object) -> int:
        number = _int(value)
        if number is None or not low <= number <= high:
            refuse(name, value, f"an integer, {accepted}")
        return number

    return check


def count(low: int = 1) -> Check[int]:
    """An integer of at least ``low`` that the core can hold."""
    return integer(f"at least {low} and below 2**63", low=low, high=_MAX_COUNT)


def optional_count(low: int = 1) -> Check[int | None]:
    """As ``count``, or None."""
    return optional(integer(f"at least {low} and below 2**63, or None", low=low, high=_MAX_COUNT))


def optional(check: Check[T]) -> Check[T | None]:
    """None, or what ``check`` accepts; its text has to mention None."""
    return lambda name, value: None if value is None else check(name, value)


def flag(name: str, value: object) -> bool:
    """True or False; 1 and 0 are refused."""
    if not isinstance(value, bool):
        refuse(name, value, "True or False")
    return value


def text(name: str, value: object) -> str:
    """A non-empty string of valid Unicode."""
    if not isinstance(value, str) or not value or not _is_unicode(value):
        refuse(name, value, "a non-empty string of valid Unicode")
    return value


def url(name: str, value: object) -> str:
    """A URL of HTTP or HTTPS."""
    address = text(name, value)
    if not address.startswith(("http://", "https://")):
        refuse(name, value, "a URL that begins with http:// or https://")
    return address


def choice(accepted: Sequence[str | None]) -> Check[Any]:
    """One of several words, or None if it is among them."""
    shown = ", ".join(map(str, accepted))

    def check(name: str, value: object) -> object:
        if (value is not None and not isinstance(value, str)) or value not in accepted:
            refuse(name, value, f"one of {shown}")
        return value

    return check


def mapping(name: str, value: object) -> dict[str, Any]:
    """A mapping whose keys are names; returns a copy."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        refuse(name, value, "a mapping with names for keys")
    return dict(value)


def function(name: str, value: T) -> T:
    """A callable."""
    if not callable(value):
        refuse(name, value, "callable")
    return value


def each(check: Check[T], accepted: str) -> Check[tuple[T, ...]]:
    """A list, or another iterable, of what ``check`` accepts; None is the empty one."""

    def check_each(name: str, value: Any) -> tuple[T, ...]:
        if value is None:
            return ()
        # Iterating these would yield characters, bytes and keys.
        if isinstance(value, (str, bytes, Mapping)):
            refuse(name, value, accepted)
        try:
            items = tuple(value)
        except TypeError:
            refuse(name, value, accepted)
        return tuple(check(f"{name}[{index}]", item) for index, item in enumerate(items))

    return check_each


def _is_unicode(value: str) -> bool:
    """Whether a string has no lone surrogate."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _float(value: object) -> float:
    """The value as a float; NaN for anything but a real number that fits."""
    if type(value) is float:  # asking for a protocol takes microseconds
        return value
    if isinstance(value, bool) or not isinstance(value, SupportsFloat):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _int(value: object) -> int | None:
    """The value as an integer; None for anything else, True and False included."""
    if type(value) is int:  # as above
        return value
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:  # an array of several
        return None
