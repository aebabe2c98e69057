"""Where a text ends because it came to hold a stop string.

Text comes in pieces of any length, and a piece may hold the end of one stop string and the start
of another.  Whatever the pieces, the answer is that of text that comes character by character.

Invariant: what ``visible`` shows of a text without a match is a prefix of what it shows of any
longer one, and of that text cut at its first match.
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
    """The stop strings of one request; without any, nothing matches and nothing is held.

    Attributes:
        strings: None of them empty.
        include: Whether the output keeps the string that ended it.
    """

    strings: tuple[str, ...]
    include: bool

    @property
    def max_length(self) -> int:
        """Characters of the longest string."""
        return max(map(len, self.strings))

    def find(self, text: str, num_old: int) -> StopMatch | None:
        """The match that ends first; of several that end together the longest.

        Each string costs a search through the new characters and its own length.

        Args:
            text: All text so far.
            num_old: How many of its characters are passed over: a match must end behind them.
        """
        found = (_first_ending_behind(num_old, text, string) for string in self.strings)
        matches = (match for match in found if match is not None)
        return min(matches, key=lambda match: (match.end, match.start), default=None)

    def cut(self, text: str, match: StopMatch) -> str:
        """The output of a text that ends with ``match``."""
        return text[: match.end if self.include else match.start]

    def visible(self, text: str) -> str:
        """What can be shown of a text without a match, whatever follows."""
        return text[: len(text) - self.num_held(text)]

    def num_held(self, text: str) -> int:
        """How many characters at the end of ``text`` may be the start of a stop string.

        None with ``include``: they stay in the output either way.
        """
        if self.include:
            return 0
        return max((_num_begun(text, string) for string in self.strings), default=0)


def _first_ending_behind(num_old: int, text: str, string: str) -> StopMatch | None:
    start = text.find(string, max(0, num_old + 1 - len(string)))
    return None if start < 0 else StopMatch(string, start, start + len(string))


def _num_begun(text: str, string: str) -> int:
    """The length of the longest end of ``text`` that begins ``string`` without completing it.

    Tries only the places where its first character stands: most often there is none.
    """
    start = max(0, len(text) + 1 - len(string))
    while (start := text.find(string[0], start)) >= 0:
        if string.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
