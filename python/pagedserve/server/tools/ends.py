"""End of a tool call: the first end tag that is not part of an argument.

An argument may contain the end tag of its call.  In formats of JSON and Python, a tag in a string
is text; in formats of nested tags, one that does not close the last open tag.

Costs: each character is examined once, however the text is split.
"""

import re
from collections.abc import Callable
from typing import Final, Protocol

# Whether a call may end at a position, by the text before it.
Closes = Callable[[str, int], bool]

_MAX_NAME_CHARS: Final = 280
_FUNCTION: Final = re.compile(r"\s*<function=")


class End(Protocol):
    """Search for the end of one call, while its text grows."""

    def find(self, text: str) -> int:
        """Position of the end tag of a call; -1 if it has not arrived yet.

        Args:
            text: Text of the call so far; starts with that of the previous search.
        """


class EndOutsideStrings:
    """The first tag outside strings."""

    def __init__(self, tag: str, strings: "Strings") -> None:
        """Start a call."""
        tokens = (re.escape(token) for token in (tag, *strings.quotes))
        self._tag = tag
        self._strings = strings
        self._token = re.compile("|".join(tokens))
        self._place = 0
        self._quote = ""

    def find(self, text: str) -> int:
        """Position of the end tag, or -1; see ``End``."""
        while True:
            if self._quote:
                within = self._strings.within[self._quote].match(text, self._place)
                assert within is not None  # noqa: S101  # it may be empty
                self._place = within.end()
                if not text.startswith((self._quote, "\n"), self._place):
                    return -1
                self._place += len(self._quote) if text[self._place] != "\n" else 1
                self._quote = ""
            found = self._token.search(text, self._place)
            if found is None:
                self._place = max(self._place, len(text) + 1 - len(self._tag))
                return -1
            self._place = found.start()
            if found[0] == self._tag:
                return self._place
            if self._strings.is_open(text, found):
                return -1
            self._place, self._quote = found.end(), found[0]


class Strings:
    """String syntax of a language.

    Attributes:
        quotes: Quotes, longer ones first.
        within: Regular expression of the content before the closing quote, for each.
    """

    def __init__(self, within: dict[str, str]) -> None:
        """Store a regular expression for each kind of quote."""
        self.quotes = tuple(within)
        self.within = {
            quote: re.compile(f"(?:{part})*+", re.DOTALL) for quote, part in within.items()
        }

    def is_open(self, text: str, quote: "re.Match[str]") -> bool:
        """Whether a quote at the end of a text may be the start of a longer one."""
        longer = (known for known in self.quotes if len(known) > len(quote[0]))
        rest = text[quote.start() : quote.start() + len(self.quotes[0])]
        return any(known.startswith(rest) for known in longer)


# Line breaks are allowed in JSON strings: models write them.
JSON_STRINGS: Final = Strings({'"': r'[^"\\]++|\\.'})
PYTHON_STRINGS: Final = Strings(
    {
        "'''": r"[^'\\]++|\\.|'(?=[^'].|.[^'])",
        '"""': r'[^"\\]++|\\.|"(?=[^"].|.[^"])',
        "'": r"[^'\\\n]++|\\.",
        '"': r'[^"\\\n]++|\\.',
    }
)


class EndBehindTags:
    """The first tag where a call may end."""

    def __init__(self, tag: str, closes: Closes) -> None:
        """Start a call."""
        self._tag = tag
        self._closes = closes
        self._place = 0

    def find(self, text: str) -> int:
        """Position of the end tag, or -1; see ``End``."""
        while (found := text.find(self._tag, self._place)) >= 0:
            self._place = found
            if self._closes(text, found):
                return found
            self._place += len(self._tag)
        self._place = max(self._place, len(text) + 1 - len(self._tag))
        return -1


def closes_function(text: str, place: int) -> bool:
    """Whether functions and their parameters are closed, or there are none."""
    if _FUNCTION.match(text) is None:
        return True
    function = _before(text, place, "</function>")
    if function < 0:
        return False
    if _before(text, function, "</parameter>") >= 0:
        return True
    end = _without_space(text, function)
    start = text.rfind("<function=", max(0, end - _MAX_NAME_CHARS), end)
    if start < 0 or text.find(">", start) != end - 1:
        return False
    return _without_space(text, start) == 0 or _before(text, start, "</function>") >= 0


def closes_value(text: str, place: int) -> bool:
    """Whether the last value is closed, or there is none."""
    return text.find("<arg_key>", 0, place) < 0 or _before(text, place, "</arg_value>") >= 0


def _before(text: str, place: int, tag: str) -> int:
    """Start of a tag directly before a position, ignoring whitespace; -1 if there is none."""
    end = _without_space(text, place)
    return end - len(tag) if text.endswith(tag, 0, end) else -1


def _without_space(text: str, place: int) -> int:
    while place and text[place - 1].isspace():
        place -= 1
    return place


def overlap(text: str, tag: str) -> int:
    """Length of the longest proper prefix of a tag that ends a text."""
    lengths = range(min(len(text), len(tag) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(tag[:length])), 0)
