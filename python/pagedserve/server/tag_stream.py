"""Splits the text of an answer, as it comes, into thoughts, content and tool calls.

What comes out does not depend on where the text was split: what may be the beginning of a tag is
held back until that is known, and so is space that may stand before one.

Costs: a search of what is held back and of what is new, a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pagedserve.server.tool_formats import Call, ReasoningFormat, Schemas, ToolFormat


@dataclass(slots=True)
class Parts:
    """What a piece of text brought.

    Attributes:
        reasoning: Thoughts.
        content: What is for the reader.
        calls: Tool calls that are complete.
    """

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether it brought nothing."""
        return not (self.reasoning or self.content or self.calls)


class TagStream:
    """The text of one answer, so far."""

    def __init__(
        self,
        tools: ToolFormat | None,
        schemas: Schemas,
        reasoning: ReasoningFormat | None = None,
        *,
        is_reasoning: bool = False,
    ) -> None:
        """Begin a text.

        Args:
            tools: How calls are written; None where there are none.
            schemas: Of the tools.
            reasoning: How thoughts are written; None where they are not told from the rest.
            is_reasoning: Whether the text begins within thoughts.
        """
        self._tools = tools
        self._schemas = schemas
        self._reasoning = reasoning
        self._held = ""
        self._state: Literal["thoughts", "content", "calls"] = "content"
        if reasoning is not None and (is_reasoning or reasoning.begins):
            self._state = "thoughts"
        # Thoughts may begin, or calls without a tag.
        self._is_at_start = True
        self._skips_space = True
        self._opening = ""

    def feed(self, text: str, *, is_last: bool) -> Parts:
        """Take the next piece of the text."""
        self._held += text
        parts = Parts()
        step = {"thoughts": self._think, "content": self._read, "calls": self._call}
        while step[self._state](parts, is_last=is_last):
            pass
        return parts

    def _think(self, parts: Parts, *, is_last: bool) -> bool:
        """Take thoughts; whether another state goes on."""
        assert self._reasoning is not None  # noqa: S101  # else nothing leads here
        if self._is_at_start:  # a model may write the tag though the prompt has it
            self._held = self._held.lstrip()
            start = self._reasoning.start
            if start.startswith(self._held) and self._held != start and not is_last:
                return False
            self._held = self._held.removeprefix(start).lstrip()
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
        """Take content up to a tag; whether another state goes on."""
        if self._skips_space:
            if self._is_at_start and self._begins_thoughts(is_last=is_last):
                return self._state == "thoughts"
            self._held = self._held.lstrip()
            if not self._held:
                return False
            self._skips_space = False
            bare = self._tools.bare_starts if self._tools is not None else ()
            if self._is_at_start and bare and self._held.startswith(bare):
                self._opening, self._state = "", "calls"
                return True
            self._is_at_start = False
        starts = self._tools.starts if self._tools is not None else ()
        found = [(place, start) for start in starts if (place := self._held.find(start)) >= 0]
        if found:
            place, start = min(found)
            parts.content += self._held[:place].rstrip()
            self._held = self._held[place + len(start) :]
            self._opening, self._state = start, "calls"
            return True
        parts.content += self._take(starts, is_last=is_last)
        return False

    def _begins_thoughts(self, *, is_last: bool) -> bool:
        """Whether thoughts begin here, or may; the state says which."""
        if self._reasoning is None:
            return False
        stripped, start = self._held.lstrip(), self._reasoning.start
        if stripped.startswith(start):
            self._state = "thoughts"
            return True
        return start.startswith(stripped) and not is_last

    def _call(self, parts: Parts, *, is_last: bool) -> bool:
        """Take calls once they are complete; whether another state goes on."""
        assert self._tools is not None  # noqa: S101  # else nothing leads here
        end = self._tools.end if self._opening else None
        before, closing, after = self._held.partition(end) if end else (self._held, "", "")
        if not closing and not is_last:
            return False
        try:
            parts.calls += self._tools.read(before, self._schemas)
        except (ValueError, RecursionError):  # no call after all: the reader sees what was written
            parts.content += self._opening + before + closing
        self._held, self._state = after, "content"
        self._is_at_start, self._skips_space = False, True
        return True

    def _take(self, tags: Sequence[str], *, is_last: bool) -> str:
        """What is held but for what may begin a tag, and space at the end."""
        if is_last:
            taken, self._held = self._held, ""
            return taken
        kept = max((_overlap(self._held, tag) for tag in tags), default=0)
        end = len(self._held[: len(self._held) - kept].rstrip())
        taken, self._held = self._held[:end], self._held[end:]
        return taken


def _overlap(text: str, tag: str) -> int:
    """Characters at the end of a text that a tag begins with, but for the whole tag."""
    lengths = range(min(len(text), len(tag) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(tag[:length])), 0)
