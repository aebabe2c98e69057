"""Events of a streamed message."""

from collections.abc import Iterator, Mapping
from typing import Any

from pagedserve.server.http.apis import typed_event
from pagedserve.server.messages.blocks import BlockReader, ContentBlock


class BlockEvents:
    """Events of the content blocks of a message, in their order."""

    def __init__(self) -> None:
        """Start a message."""
        self._reader = BlockReader()
        self._open: ContentBlock | None = None

    def of_delta(self, delta: Mapping[str, Any]) -> Iterator[str]:
        """Events of the next delta of a chat."""
        for block, text in self._reader.read(delta):
            if block is not self._open:
                yield from self.of_end()
                yield typed_event(
                    "content_block_start", index=block.index, content_block=block.opened()
                )
                if block.index == 0:
                    yield typed_event("ping")
                self._open = block
            if text:
                yield typed_event("content_block_delta", index=block.index, delta=block.delta(text))

    def of_end(self) -> Iterator[str]:
        """Events that end the open block, if there is one."""
        if self._open is not None:
            if (delta := self._open.closing()) is not None:
                yield typed_event("content_block_delta", index=self._open.index, delta=delta)
            yield typed_event("content_block_stop", index=self._open.index)
