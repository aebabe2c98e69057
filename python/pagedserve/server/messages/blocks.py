"""Content blocks of a message, from the deltas of a chat."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from pagedserve.server.tools.cut_arguments import completed

# Signature of all reasoning: clients leave reasoning without one out of later requests.
_SIGNATURE: Final = "unsigned"


@dataclass(slots=True)
class ContentBlock:
    """A content block.

    Attributes:
        index: Index in the message.
        kind: Its type.
        call_id: Id of a tool call.
        name: Name of the tool.
    """

    index: int
    kind: Literal["text", "thinking", "tool_use"]
    call_id: str = ""
    name: str = ""

    def opened(self) -> dict[str, Any]:
        """The block at its start."""
        if self.kind == "text":
            return {"type": "text", "text": ""}
        if self.kind == "thinking":
            return {"type": "thinking", "thinking": "", "signature": ""}
        return {"type": "tool_use", "id": self.call_id, "name": self.name, "input": {}}

    def delta(self, text: str) -> dict[str, str]:
        """The next part of its text, or of the JSON of a call's input."""
        if self.kind == "text":
            return {"type": "text_delta", "text": text}
        if self.kind == "thinking":
            return {"type": "thinking_delta", "thinking": text}
        return {"type": "input_json_delta", "partial_json": text}

    def closing(self) -> dict[str, str] | None:
        """The delta after the last part of its text."""
        if self.kind != "thinking":
            return None
        return {"type": "signature_delta", "signature": _SIGNATURE}

    def whole(self, text: str) -> str:
        """JSON of the block with its whole text."""
        if self.kind == "thinking":
            return json.dumps(self.opened() | {"thinking": text, "signature": _SIGNATURE})
        if self.kind == "text":
            return json.dumps(self.opened() | {"text": text})
        opened = json.dumps(self.opened())
        return opened.removesuffix("{}}") + completed(text) + "}"


@dataclass(slots=True)
class BlockReader:
    """Splits the deltas of a chat's message into content blocks.

    A block ends where one of another kind, or the next call, begins.
    """

    _last: ContentBlock | None = None
    _num_calls: int = 0

    def read(self, delta: Mapping[str, Any]) -> Iterator[tuple[ContentBlock, str]]:
        """Yield the blocks that a delta begins or continues, each with the new part of its text."""
        if text := delta.get("reasoning"):
            yield self._block("thinking"), text
        if text := delta.get("content"):
            yield self._block("text"), text
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            if call["index"] >= self._num_calls:
                self._num_calls += 1
                self._begin("tool_use", call["id"], function["name"])
            if self._last is not None:
                yield self._last, function["arguments"]

    def _block(self, kind: Literal["text", "thinking"]) -> ContentBlock:
        if self._last is not None and self._last.kind == kind:
            return self._last
        return self._begin(kind)

    def _begin(
        self, kind: Literal["text", "thinking", "tool_use"], call_id: str = "", name: str = ""
    ) -> ContentBlock:
        index = 0 if self._last is None else self._last.index + 1
        self._last = ContentBlock(index, kind, call_id, name)
        return self._last
