"""Splits the text of a response, as it arrives, into reasoning, content and tool calls.

The result does not depend on where the text was split: a possible prefix of a tag is held back
until it is decided, and so is whitespace that may precede one.

Calls that a grammar holds to their form are left to `pagedserve.server.tools.grammar_calls`.

Content is the text without reasoning and calls, and without whitespace next to these at its start
or end.  Text that looked like a call and is none is content, with its whitespace.

Costs: a search of held back and new text per token.
"""

import re
from collections.abc import Sequence
from typing import Literal

from pagedserve.config.reasoning import ReasoningFormat
from pagedserve.server.tools.ends import End, overlap
from pagedserve.server.tools.formats import ToolFormat
from pagedserve.server.tools.grammar_calls import GrammarCalls
from pagedserve.server.tools.readers import Call, Parts, Schemas


class TagStream:
    """Parser state of one response."""

    def __init__(
        self,
        tools: ToolFormat | None,
        schemas: Schemas,
        reasoning: ReasoningFormat | None = None,
        *,
        is_reasoning: bool = False,
        held_head: "re.Pattern[str] | None" = None,
        is_either: bool = False,
    ) -> None:
        """Start a text.

        Args:
            tools: Tool call format; None without tools.
            schemas: Schemas of the tools.
            reasoning: Reasoning format; None if reasoning is not separated.
            is_reasoning: Whether the text starts within reasoning.
            held_head: Text before arguments, if a grammar holds all text from the first start tag
                to the form of calls; else None.
            is_either: Whether a text that does not begin with a call has none.
        """
        self._tools = tools
        self._schemas = schemas
        self._reasoning = reasoning
        self._held = ""
        self._state: Literal["thoughts", "content", "calls", "held"] = "content"
        self._held_calls = None if held_head is None else GrammarCalls(held_head)
        if reasoning is not None and is_reasoning:
            self._state = "thoughts"
        self._is_either = is_either
        # Reasoning may start, or calls without a tag.
        self._is_at_start = True
        # A tag that starts reasoning may come; later ones are part of the reasoning.
        self._may_open = True
        # Whitespace between returned content and what follows.
        self._space = ""
        self._skips_space = False
        self._has_content = False
        self._is_behind_call = False
        self._opening = ""
        self._end: End | None = None
        # No later call is complete: determined at the end of the text.
        self._is_spoilt = False

    def feed(self, text: str, *, is_last: bool) -> Parts:
        """Parse the next chunk of the text."""
        self._held += text
        parts = Parts()
        step = {
            "thoughts": self._think,
            "content": self._read,
            "calls": self._call,
            "held": self._call_held,
        }
        while step[self._state](parts, is_last=is_last):
            pass
        return parts

    def _think(self, parts: Parts, *, is_last: bool) -> bool:
        """Parse reasoning; return whether another state continues."""
        assert self._reasoning is not None  # noqa: S101  # required in this state
        if self._is_at_start:  # a model may repeat a start tag of the prompt
            self._held = self._held.lstrip()
            start = self._reasoning.start
            if self._may_open:
                if start.startswith(self._held) and self._held != start and not is_last:
                    return False
                self._held = self._held.removeprefix(start).lstrip()
                self._may_open = False
            self._is_at_start = not (self._held or is_last)
            if self._is_at_start:
                return False
        before, end, after = self._held.partition(self._reasoning.end)
        if end:
            parts.reasoning += before.rstrip()
            self._held, self._state = after, "content"
            self._is_at_start = self._skips_space = True
            self._reasoning = None  # once
            return True
        parts.reasoning += self._take(() if is_last else (self._reasoning.end,), is_last=is_last)
        return False

    def _read(self, parts: Parts, *, is_last: bool) -> bool:
        """Parse content up to a tag; return whether another state continues."""
        if self._is_at_start and (begun := self._begin(is_last=is_last)) is not None:
            return begun
        starts = self._tools.starts if self._tools is not None else ()
        found = [(place, start) for start in starts if (place := self._held.find(start)) >= 0]
        if found:
            place, start = min(found)
            self._show(parts, self._held[:place])
            self._held = self._held[place + len(start) :]
            self._begin_call(start)
            return True
        self._show(parts, self._take(starts, is_last=is_last))
        if is_last and not self._is_behind_call:
            parts.content += self._space
        return False

    def _begin(self, *, is_last: bool) -> bool | None:
        """Start reasoning or calls without a tag, if the text does.

        Returns:
            Whether another state continues; None if it is neither.
        """
        text = self._held.lstrip()
        thoughts = None if self._reasoning is None else self._reasoning.start
        if thoughts is not None and text.startswith(thoughts):
            self._held, self._state = text, "thoughts"
            return True
        if not is_last and (not text or (thoughts is not None and thoughts.startswith(text))):
            return False
        bare = self._tools.bare_starts if self._tools is not None else ()
        if self._is_either and self._tools is not None:
            starts = (*self._tools.starts, *bare)
            if not is_last and any(start.startswith(text) for start in starts):
                return False
            if not text.startswith(starts):
                self._tools, bare = None, ()
        self._is_at_start = False
        if not bare or not text.startswith(bare):
            return None
        self._space = "" if self._skips_space else self._held[: len(self._held) - len(text)]
        self._held = text
        self._begin_call("")
        return True

    def _begin_call(self, opening: str) -> None:
        assert self._tools is not None  # noqa: S101  # required in this state
        self._opening, self._state = opening, "calls" if self._held_calls is None else "held"
        has_end = opening and self._tools.end is not None and not self._is_spoilt
        self._end = self._tools.begin_end(self._tools.end or "") if has_end else None

    def _call(self, parts: Parts, *, is_last: bool) -> bool:
        """Parse calls once they are complete; return whether another state continues."""
        assert self._tools is not None  # noqa: S101  # required in this state
        end = self._end.find(self._held) if self._end is not None else -1
        if end < 0 and not is_last:
            return False
        tag = (self._tools.end or "") if self._opening else ""
        first = self._held.find(tag) if tag else -1
        if end < 0:
            end = len(self._held) if first < 0 or not self._is_spoilt else first
            self._is_spoilt = True
        for place in dict.fromkeys((end, end if first < 0 else first)):
            if (calls := self._calls_of(self._held[:place])) is not None:
                parts.calls += calls
                self._end_call(place + len(tag))
                return True
        # Not a call after all: the text is returned as content.
        place = len(self._held) if first < 0 else first + len(tag)
        self._show(parts, self._opening + self._held[:place])
        self._held, self._state = self._held[place:], "content"
        return True

    def _call_held(self, parts: Parts, *, is_last: bool) -> bool:
        """Parse calls that a grammar holds; only calls follow them."""
        assert self._held_calls is not None  # noqa: S101  # required in this state
        found = self._held_calls.feed(self._held, is_last=is_last)
        self._held = ""
        parts.calls, parts.is_cut = found.calls, found.is_cut
        parts.more_arguments = found.more_arguments
        return False

    def _calls_of(self, text: str) -> list[Call] | None:
        """Parse the calls of a text; None if it has none."""
        assert self._tools is not None  # noqa: S101  # required in this state
        try:
            calls = self._tools.read(text, self._schemas)
        except (ValueError, RecursionError):
            return None
        # Without a tag any JSON would be a call, so it must name a tool.
        is_known = self._opening or all(call.name in self._schemas for call in calls)
        return calls if is_known else None

    def _end_call(self, place: int) -> None:
        self._held, self._state = self._held[place:], "content"
        self._is_behind_call = True
        if not self._has_content:
            self._skips_space, self._space = True, ""

    def _show(self, parts: Parts, text: str) -> None:
        """Add content; hold back whitespace at its end."""
        if self._skips_space:
            text = text.lstrip()
        shown = text.rstrip()
        if not shown:
            self._space += text
            return
        parts.content += self._space + shown
        self._space = text[len(shown) :]
        self._skips_space = self._is_behind_call = False
        self._has_content = True

    def _take(self, tags: Sequence[str], *, is_last: bool) -> str:
        """Take held text except a possible prefix of a tag, and whitespace at the end."""
        if is_last:
            taken, self._held = self._held, ""
            return taken
        kept = max((overlap(self._held, tag) for tag in tags), default=0)
        end = len(self._held[: len(self._held) - kept].rstrip())
        taken, self._held = self._held[:end], self._held[end:]
        return taken
