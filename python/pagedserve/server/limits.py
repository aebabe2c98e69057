"""Admission control: limits of the queue, and when clients should retry.

Capacity is reserved before any work for a request, and released when its response ends.  Sequences
are counted until then, prompt tokens until a step has started the prompt.

Costs: negligible without a limit on tokens; with it a check of every waiting request.
"""

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from pagedserve.engine.client import EngineClient
from pagedserve.inputs.chat import text_of_content
from pagedserve.server.http.errors import ServerError, UnavailableError

# Waiting sequences that are accepted by default even if few can run: evaluations and load tests
# send all requests at once, and do not retry.
_MIN_QUEUED: Final = 2048
# The last ends of this many requests estimate how fast capacity becomes free.
_NUM_ENDS: Final = 64
_MAX_RETRY_AFTER: Final = 60
# Characters per token of usual texts, to estimate the number of tokens before tokenization.
_CHARS_PER_TOKEN: Final = 4


def guessed_num_tokens(text: str) -> int:
    """Estimate the number of tokens of a text, at least one."""
    return 1 + len(text) // _CHARS_PER_TOKEN


def guessed_num_chat_tokens(messages: Iterable[Mapping[str, Any]]) -> int:
    """Estimate the number of tokens of a conversation.

    Raises:
        RequestError: A message has a part that is neither text nor an image.
    """
    return sum(guessed_num_tokens(text_of_content(message.get("content"))) for message in messages)


class Admission:
    """Counts the sequences of unfinished requests, and the waiting prompt tokens.

    Attributes:
        max_num_seqs: Maximum number of running sequences; 0 before the model is loaded.
        num_seqs: Reserved sequences.
        num_refused: Refused requests by the limit that was exceeded.
    """

    def __init__(
        self, client: EngineClient, max_num_queued: int | None, max_num_queued_tokens: int | None
    ) -> None:
        """Set the limits of the queue.

        Args:
            client: Knows which requests wait.
            max_num_queued: Maximum waiting sequences, besides running ones; None is four times
                ``max_num_seqs``, at least 2048.
            max_num_queued_tokens: Maximum waiting prompt tokens; None sets no limit.
        """
        self.max_num_seqs = 0
        self.num_seqs = 0
        self.num_refused = {"max_num_queued_reqs": 0, "max_num_queued_tokens": 0}
        self._client = client
        self._max_num_queued = max_num_queued
        self._max_num_queued_tokens = max_num_queued_tokens
        self._queued_tokens: dict[str, int] = {}
        # End times of requests, with the sequences and prompt tokens of each.
        self._ends: deque[tuple[float, int, int]] = deque(maxlen=_NUM_ENDS)

    @property
    def most(self) -> int:
        """Maximum number of running and waiting sequences."""
        queued = self._max_num_queued
        if queued is None:
            queued = max(4 * self.max_num_seqs, _MIN_QUEUED)
        return self.max_num_seqs + queued

    def num_queued_tokens(self) -> int:
        """Prompt tokens that no step has started."""
        begun = [name for name in self._queued_tokens if self._client.has_begun(name)]
        for name in begun:
            del self._queued_tokens[name]
        return sum(self._queued_tokens.values())

    @contextmanager
    def place_for(self, num_seqs: int, prompts: Mapping[str, int]) -> Iterator[None]:
        """Reserve capacity for the sequences and prompts of a request.

        Args:
            num_seqs: Sequences of all its prompts.
            prompts: Approximate number of tokens by the prompt's id in the engine.

        Raises:
            UnavailableError: The queue is full.
            ServerError: 400, the request exceeds the limit alone.
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
            if not self.num_seqs:  # idle time does not show how fast capacity becomes free
                self._ends.clear()

    def _check_seqs(self, num_seqs: int) -> None:
        if num_seqs > self.most:
            raise ServerError(
                400, f"the request has {num_seqs} sequences; at most {self.most} are accepted"
            )
        if self.num_seqs + num_seqs > self.most:
            self.num_refused["max_num_queued_reqs"] += 1
            num_ended = sum(seqs for _, seqs, _ in self._ends)
            raise UnavailableError(
                f"{self.num_seqs} sequences run or wait; at most {self.most} are accepted, and the "
                f"request has {num_seqs}",
                retry_after=self._seconds_for(self.num_seqs + num_seqs - self.most, num_ended),
            )

    def _check_tokens(self, num_tokens: int, most: int) -> None:
        queued = self.num_queued_tokens()
        # A request that exceeds the limit waits in an empty queue.
        if queued and queued + num_tokens > most:
            self.num_refused["max_num_queued_tokens"] += 1
            num_ended = sum(tokens for _, _, tokens in self._ends)
            raise UnavailableError(
                f"{queued} prompt tokens wait; at most {most} are accepted, and the request has "
                f"about {num_tokens}",
                retry_after=self._seconds_for(queued + num_tokens - most, num_ended),
            )

    def _seconds_for(self, num_missing: int, num_ended: int) -> int:
        """Seconds until this many more have ended, at the rate of the last requests.

        Args:
            num_missing: Missing sequences or tokens.
            num_ended: Sequences or tokens of the last requests together.
        """
        if not num_ended:
            return 1
        first_end, _, _ = self._ends[0]
        seconds = (time.monotonic() - first_end) / num_ended * num_missing
        return max(1, min(_MAX_RETRY_AFTER, math.ceil(seconds)))
