"""Search for stop strings in text.

Text arrives in chunks of any length, and a chunk may contain the end of one stop string and the
start of another.  The result is the same as for text that arrives character by character.

Invariant: ``visible`` of a text without a match is a prefix of that of any longer text, and of that
text cut at its first match.
"""

from dataclasses import dataclass
from typing import NamedTuple


class StopMatch(NamedTuple):
    """``text[start:end]`` is ``string``."""

    string: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class StopStrings:
    """Stop strings of one request; without any, nothing matches and nothing is held back.

    Attributes:
        strings: Strings, not empty.
        include: Whether the output includes the string that ended it.
    """

    strings: tuple[str, ...]
    include: bool

    @property
    def max_length(self) -> int:
        """Length of the longest string, in characters."""
        return max(map(len, self.strings))

    def find(self, text: str, num_old: int) -> StopMatch | None:
        """Find the match that ends first; of several that end together the longest.

        Each string costs a search through the new characters and its length.

        Args:
            text: All text so far.
            num_old: Number of characters that were searched before: a match must end after them.
        """
        found = (_first_ending_behind(num_old, text, string) for string in self.strings)
        matches = (match for match in found if match is not None)
        return min(matches, key=lambda match: (match.end, match.start), default=None)

    def cut(self, text: str, match: StopMatch) -> str:
        """The output of a text that ends with ``match``."""
        return text[: match.end if self.include else match.start]

    def visible(self, text: str) -> str:
        """The final part of a text without a match, whatever follows."""
        return text[: len(text) - self.num_held(text)]

    def num_held(self, text: str) -> int:
        """Number of characters at the end of ``text`` that may be the start of a stop string.

        0 with ``include``: they stay in the output either way.
        """
        if self.include:
            return 0
        return max((_num_begun(text, string) for string in self.strings), default=0)


def _first_ending_behind(num_old: int, text: str, string: str) -> StopMatch | None:
    start = text.find(string, max(0, num_old + 1 - len(string)))
    return None if start < 0 else StopMatch(string, start, start + len(string))


def _num_begun(text: str, string: str) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of ``string``.

    Tries only the positions of its first character: most often there is none.
    """
    start = max(0, len(text) + 1 - len(string))
    while (start := text.find(string[0], start)) >= 0:
        if string.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
