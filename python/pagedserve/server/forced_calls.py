"""Parser of the tool calls of a response with a forced tool choice.

A call is returned once it is complete.  If the text ends within the arguments of a call, they are
returned incomplete, as OpenAI does: they are a prefix of JSON.

Costs: each character is examined once, however the text is split.
"""

import json
import re
from typing import Final

from pagedserve.server.tag_stream import Parts
from pagedserve.server.tool_ends import JSON_STRINGS
from pagedserve.server.tool_readers import Call

# Text before the arguments of a call, including the end of the previous call.
_HEAD: Final = re.compile(
    r'\s*\}?\s*[\[,]\s*\{\s*"name"\s*:\s*("(?:[^"\\]++|\\.)*+")\s*,\s*"parameters"\s*:\s*(?=\{)'
)
_TOKEN: Final = re.compile(r'["{}\[\]]')


class ForcedCalls:
    """Parser state of one response."""

    def __init__(self) -> None:
        """Start a text."""
        self._held = ""
        # Parser of the current call's arguments; None between calls.
        self._name: str | None = None
        self._place = 0
        self._depth = 0
        self._is_in_string = False

    def feed(self, text: str, *, is_last: bool) -> Parts:
        """Parse the next chunk of the text."""
        self._held += text
        parts = Parts()
        while self._name is not None or self._begin():
            if not self._is_whole():
                break
            parts.calls.append(self._end(self._place))
        if is_last and self._name is not None:
            parts.calls.append(self._end(len(self._held)))
            parts.is_cut = True
        return parts

    def _begin(self) -> bool:
        """Whether the arguments of a call start."""
        if (head := _HEAD.match(self._held)) is None:
            return False
        self._name = json.loads(head[1])
        self._held = self._held[head.end() :]
        self._place = self._depth = 0
        self._is_in_string = False
        return True

    def _is_whole(self) -> bool:
        """Whether the arguments are complete; examines only new text."""
        while True:
            if self._is_in_string:
                within = JSON_STRINGS.within['"'].match(self._held, self._place)
                self._place = self._place if within is None else within.end()
                if not self._held.startswith('"', self._place):
                    return False
                self._place += 1
                self._is_in_string = False
            token = _TOKEN.search(self._held, self._place)
            if token is None:
                self._place = len(self._held)
                return False
            self._place = token.end()
            self._is_in_string = token[0] == '"'
            self._depth += (token[0] in "{[") - (token[0] in "}]")
            if not self._depth:
                return True

    def _end(self, place: int) -> Call:
        call = Call(self._name or "", self._held[:place])
        self._held, self._name = self._held[place:], None
        return call
