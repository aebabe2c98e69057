"""Bounds of a JSON body that hold before it is parsed.

Parsing holds the interpreter's lock, and it creates every value before a field can be refused.

Invariants:

1. For JSON the counts are exact.  Parsing stops at the first fault of any other body, and the
   counts up to there are exact too.

Costs: 2 ns per byte, and 10 to 20 ns per bracket, comma and quote, nearly all without the lock.
Memory: some 40 bytes per byte of a chunk.
"""

from collections.abc import Iterator
from math import inf
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from pagedserve.errors import RequestError
from pagedserve.server.http.bounds import (
    BYTES_PER_CHAR,
    CHARS_PER_TOKEN,
    MAX_DEPTH,
    MAX_FIELD_CHARS,
    MAX_STRINGS,
    MAX_VALUES,
)

_Characters: TypeAlias = npt.NDArray[np.uint8]

_QUOTE: Final = ord('"')
_BACKSLASH: Final = ord("\\")
_COMMA: Final = ord(",")
# Bytes that are examined at a time.
_CHUNK: Final = 1 << 17


def check_unparsed(content: bytes, num_tokens: int | None, *, has_images: bool) -> None:
    """Refuse a body that would take long to parse.

    Args:
        content: Bytes of the body.
        num_tokens: The model's length; None before the model is loaded.
        has_images: Whether strings may be images, which are longer than any text.

    Raises:
        RequestError: The first bound that is exceeded.
    """
    most_strings = max(MAX_STRINGS, 2 * (num_tokens or 0))
    most_values = max(MAX_VALUES, most_strings)
    most_bytes = inf
    if num_tokens is not None and not has_images:
        most_bytes = BYTES_PER_CHAR * max(MAX_FIELD_CHARS, CHARS_PER_TOKEN * num_tokens)
    num_strings = num_values = depth = num_bytes = 0
    for marks, is_open in marks_outside_strings(content):
        begins, ends = _is_any_of(marks, "[{"), _is_any_of(marks, "]}")
        num_lists = np.count_nonzero(begins)
        num_strings += int(num_lists + np.count_nonzero(marks == _QUOTE))
        num_values += int(num_lists + np.count_nonzero(marks == _COMMA))
        depths = depth + np.cumsum(np.subtract(begins, ends, dtype=np.int8))
        depth = depths[-1] if len(marks) else depth
        num_bytes = 0 if len(marks) or not is_open else num_bytes + _CHUNK  # within one string
        if depths.max(initial=0) > MAX_DEPTH:
            raise RequestError(f"the body is nested deeper than {MAX_DEPTH} lists and objects")
        if num_strings > most_strings:
            raise RequestError(f"the body has more than {most_strings} strings, lists and objects")
        if num_values > most_values:
            raise RequestError(f"the body has more than {most_values} values")
        if num_bytes > most_bytes:
            raise RequestError(f"the body has a string of more than {most_bytes} bytes")


def marks_outside_strings(content: bytes, size: int = _CHUNK) -> Iterator[tuple[_Characters, bool]]:
    """Yield the brackets and commas outside strings, and the closing quote of each string.

    Args:
        content: JSON.
        size: Bytes that are examined at a time.

    Yields:
        The marks of these bytes, and whether a string is open after them.
    """
    is_open, backslash = 0, b""
    for start in range(0, len(content), size):
        given = backslash + content[start : start + size]
        if b"\\" in given:
            given = given.replace(rb"\\", b"")
        chunk = given.rstrip(b"\\")
        backslash = given[len(chunk) :]
        characters = np.frombuffer(chunk, np.uint8)
        places = np.flatnonzero(_is_any_of(characters, '",[]{}'))
        marks = characters[places]
        is_quote = marks == _QUOTE
        # At the start of a chunk this is its last character, which is no backslash.
        is_escaped = is_quote & (characters[places - 1] == _BACKSLASH)
        # Odd where a string is open after the mark: quotes open and close one in turn.
        turns = is_open + np.cumsum(is_quote & ~is_escaped)
        # After an escaped quote one is open: outside strings, where JSON has no backslash, too.
        turns += np.maximum.accumulate(np.where(is_escaped, turns + 1, 0))
        is_open = turns[-1] & 1 if len(marks) else is_open
        yield marks[turns & 1 == 0], bool(is_open)


def _is_any_of(characters: _Characters, accepted: str) -> npt.NDArray[np.bool_]:
    found = np.zeros(len(characters), np.bool_)
    for character in accepted:
        found |= characters == ord(character)
    return found
