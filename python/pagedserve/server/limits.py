"""Admission: how much the server takes on, and when another try makes sense.

A place is reserved before anything is done for a request, and given back when its answer ends.
Sequences are counted until then, prompt tokens until a step has taken the prompt up.

Costs: without a bound on tokens none to speak of; with it a look at every request that waits.
"""

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from pagedserve.engine.client import EngineClient
from pagedserve.server.errors import ServerError

# The ends of this many requests tell how fast places become free.
_NUM_ENDS: Final = 64
_MAX_RETRY_AFTER: Final = 60
# Of usual texts, to know about how many tokens come before anything is tokenised.
_CHARS_PER_TOKEN: Final = 4


def guessed_num_tokens(text: str) -> int:
    """About how many tokens a text has, at least one."""
    return 1 + len(text) // _CHARS_PER_TOKEN


class Admission:
    """Counts the sequences of requests that have not been answered, and the tokens that wait.

    Attributes:
        max_num_seqs: Sequences that run at once; 0 before the model is loaded.
        num_seqs: Reserved places.
        num_refused: Requests that found none, by the limit that was in the way.
    """

    def __init__(
        self, client: EngineClient, max_num_queued: int | None, max_num_queued_tokens: int | None
    ) -> None:
        """Set the limits of the queue.

        Args:
            client: Knows which requests wait.
            max_num_queued: Sequences that may wait beside those that run; None is four times as
                many.
            max_num_queued_tokens: Prompt tokens that may wait; None bounds them by nothing else.
        """
        self.max_num_seqs = 0
        self.num_seqs = 0
        self.num_refused = {"max_num_queued_reqs": 0, "max_num_queued_tokens": 0}
        self._client = client
        self._max_num_queued = max_num_queued
        self._max_num_queued_tokens = max_num_queued_tokens
        self._queued_tokens: dict[str, int] = {}
        # When requests ended, and the sequences and prompt tokens of each.
        self._ends: deque[tuple[float, int, int]] = deque(maxlen=_NUM_ENDS)

    @property
    def most(self) -> int:
        """Sequences that may run or wait."""
        queued = self._max_num_queued
        return self.max_num_seqs + (4 * self.max_num_seqs if queued is None else queued)

    def num_queued_tokens(self) -> int:
        """Prompt tokens that no step has taken up."""
        begun = [name for name in self._queued_tokens if self._client.has_begun(name)]
        for name in begun:
            del self._queued_tokens[name]
        return sum(self._queued_tokens.values())

    @contextmanager
    def place_for(self, num_seqs: int, prompts: Mapping[str, int]) -> Iterator[None]:
        """Hold places for the sequences and prompts of a request.

        Args:
            num_seqs: Sequences of all its prompts.
            prompts: About how many tokens each has, by the engine's name of it.

        Raises:
            ServerError: 503, there is no room; 400, there never will be.
        """
        self._check_seqs(num_seqs)
        num_tokens = sum(prompts.values())
        if self._max_num_queued_tokens is not None:
            self._check_tokens(num_tokens, self._max_num_queued_tokens)
            self._queued_tokens.update(prompts)
        self.num_seqs += num_seqs
        try:
            yield
        finally:
            self.num_seqs -= num_seqs
            for name in prompts:
                self._queued_tokens.pop(name, None)
            self._ends.append((time.monotonic(), num_seqs, num_tokens))
            if not self.num_seqs:  # a pause says nothing about how fast places become free
                self._ends.clear()

    def _check_seqs(self, num_seqs: int) -> None:
        if num_seqs > self.most:
            raise ServerError(
                400, f"the request has {num_seqs} sequences; at most {self.most} are accepted"
            )
        if self.num_seqs + num_seqs > self.most:
            self.num_refused["max_num_queued_reqs"] += 1
            num_ended = sum(seqs for _, seqs, _ in self._ends)
            raise ServerError(
                503,
                f"{self.num_seqs} sequences run or wait; at most {self.most} are accepted",
                retry_after=self._seconds_for(self.num_seqs + num_seqs - self.most, num_ended),
            )

    def _check_tokens(self, num_tokens: int, most: int) -> None:
        queued = self.num_queued_tokens()
        # One that is too long for the queue waits in an empty one.
        if queued and queued + num_tokens > most:
            self.num_refused["max_num_queued_tokens"] += 1
            num_ended = sum(tokens for _, _, tokens in self._ends)
            raise ServerError(
                503,
                f"{queued} prompt tokens wait; at most {most} are accepted, and the request has "
                f"about {num_tokens}",
                retry_after=self._seconds_for(queued + num_tokens - most, num_ended),
            )

    def _seconds_for(self, num_missing: int, num_ended: int) -> int:
        """Seconds until so much more has ended, at the pace of the last requests.

        Args:
            num_missing: Sequences or tokens.
            num_ended: How many of them the last requests had together.
        """
        if not num_ended:
            return 1
        first_end, _, _ = self._ends[0]
        seconds = (time.monotonic() - first_end) / num_ended * num_missing
        return max(1, min(_MAX_RETRY_AFTER, math.ceil(seconds)))
