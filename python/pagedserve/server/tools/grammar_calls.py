"""Parser of the tool calls of a response that a grammar holds to their form.

Arguments are returned as they arrive: nothing after them can show that there is no call.  If the
text ends within them, they are incomplete, as at OpenAI: a prefix of JSON.  An input that is
written as it is, without JSON, is the rest of the text: only its own grammar knows where it ends.

Costs: each character is examined once, however the text is split.
"""

import json
import re
from typing import Final

from pagedserve.server.tools.custom import INPUT_END, INPUT_START, input_part
from pagedserve.server.tools.ends import JSON_STRINGS, overlap
from pagedserve.server.tools.readers import Call, Parts

# End of a call in the generic format.
END: Final = "</tool_call>"
# Start of a call, up to its name.
JSON_NAME: Final = r'\{\s*"name"\s*:\s*("(?:[^"\\]++|\\.)*+")\s*'
# Text before the arguments of a call, including the end of the previous call.
FORCED_HEAD: Final = re.compile(rf'\s*\}}?\s*[\[,]\s*{JSON_NAME},\s*"parameters"\s*:\s*(?=\{{)')
_TOKEN: Final = re.compile(r'["{}\[\]]')


class GrammarCalls:
    """Parser state of one response."""

    def __init__(self, head: "re.Pattern[str]") -> None:
        """Start a text.

        Args:
            head: Text before the arguments of a call; its first group is the name, as JSON.  A
                group ``verbatim`` is found before an input that is written as it is.
        """
        self._head = head
        self._held = ""
        # Lists and objects of the current arguments that are open; 0 between calls.
        self._depth = 0
        self._is_in_string = False
        # The rest of the text is the input of the last call.
        self._is_verbatim = False

    def feed(self, text: str, *, is_last: bool) -> Parts:
        """Parse the next chunk of the text."""
        self._held += text
        parts = Parts()
        if self._is_verbatim:
            parts.more_arguments = self._take_input(is_last=is_last)
        elif self._depth:
            parts.more_arguments = self._take(is_last=is_last)
        while not self._is_open and (head := self._head.match(self._held)) is not None:
            self._held = self._held[head.end() :]
            self._is_verbatim = head.lastgroup == "verbatim"
            if self._is_verbatim:
                arguments = INPUT_START + self._take_input(is_last=is_last)
            else:
                arguments = self._take(is_last=is_last)
            parts.calls.append(Call(json.loads(head[1]), arguments))
        parts.is_cut = is_last and self._depth > 0
        return parts

    @property
    def _is_open(self) -> bool:
        """Whether the text continues the last call."""
        return self._is_verbatim or self._depth > 0

    def _take_input(self, *, is_last: bool) -> str:
        """Take the input that has arrived, as JSON, without an end of the call after it."""
        tag = f"\n{END}"
        if is_last:
            taken, self._held = self._held.removesuffix(tag), ""
            return input_part(taken) + INPUT_END
        kept = len(tag) if self._held.endswith(tag) else overlap(self._held, tag)
        place = len(self._held) - kept
        taken, self._held = self._held[:place], self._held[place:]
        return input_part(taken)

    def _take(self, *, is_last: bool) -> str:
        """Take the arguments that have arrived, up to their end."""
        place = 0
        while place < len(self._held):
            if self._is_in_string:
                within = JSON_STRINGS.within['"'].match(self._held, place)
                place = place if within is None else within.end()
                if not self._held.startswith('"', place):
                    break  # what is left is the start of an escape
                place += 1
                self._is_in_string = False
            token = _TOKEN.search(self._held, place)
            place = len(self._held) if token is None else token.end()
            if token is not None:
                self._is_in_string = token[0] == '"'
                self._depth += (token[0] in "{[") - (token[0] in "}]")
                if not self._depth:
                    break
        if is_last and self._depth:
            place = len(self._held)
        taken, self._held = self._held[:place], self._held[place:]
        return taken
