"""Turns of requests that begin, so that many at once do not delay the streams that run.

Each may keep the event loop for milliseconds until it first waits: 30 that arrive together kept
all tokens back for 0.1 s and more.
"""

import asyncio
from collections import deque


class Turns:
    """Gives one turn in each pass of the event loop, in the order of arrival.

    Costs: one callback a turn; the first turn of a pass is given at once.
    """

    __slots__ = ("_is_taken", "_waiting")

    def __init__(self) -> None:
        """Prepare, in any thread."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_taken = False  # in this pass

    async def take(self) -> None:
        """Wait for a turn."""
        loop = asyncio.get_running_loop()
        if self._is_taken:
            turn = loop.create_future()
            self._waiting.append(turn)
            await turn
        else:
            self._is_taken = True
            loop.call_soon(self._pass_on, loop)

    def _pass_on(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else its task was cancelled
                turn.set_result(None)
                loop.call_soon(self._pass_on, loop)
                return
        self._is_taken = False
