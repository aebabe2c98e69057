"""What came of one request, as its client saw it.

Moments are readings of ``time.perf_counter``; what is derived from them is in seconds, and asked
for only of a request that was answered in full.
"""

from dataclasses import dataclass, field
from itertools import pairwise

REFUSED = "refused"
CONNECTION = "connection"
TIMEOUT = "timeout"
BROKEN_STREAM = "broken_stream"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request was not answered in full.

    Attributes:
        kind: ``refused`` (status 429 or 503: come back later), ``status_`` and the number for any
            other status, ``connection`` (none was made, or it ended before a status came),
            ``timeout``, or ``broken_stream`` (an answer that began and did not end as it should).
        message: What is known of it, in one line.
    """

    kind: str
    message: str


@dataclass(slots=True)
class Outcome:
    """One request on its way, and then its end.

    Attributes:
        due: When it should have been sent.
        started: When it was sent.
        num_input_tokens: Of the prompt: as planned, until the server says better.
        num_output_tokens: As the server says; None where it does not say.
        output_times: When each piece of output came.
        ended: When the last piece that belongs to the answer came; None before there was one.
        failure: Why it failed; None while it has not.
    """

    due: float
    started: float
    num_input_tokens: int
    num_output_tokens: int | None = None
    output_times: list[float] = field(default_factory=list)
    ended: float | None = None
    failure: Failure | None = None

    def first_output(self) -> float:
        """When the answer began; only for one that has ended."""
        return self.output_times[0] if self.output_times else self.end()

    def end(self) -> float:
        """When the answer ended; only for one that has."""
        if self.ended is None:
            raise ValueError("the answer has not ended")
        return self.ended

    def output_tokens(self) -> int:
        """Tokens of the answer; pieces of it where the server does not count for us."""
        counted = self.num_output_tokens
        return len(self.output_times) if counted is None else counted

    def ttft(self) -> float:
        """Seconds from sending to the first piece of output."""
        return self.first_output() - self.started

    def tpot(self) -> float | None:
        """Seconds an output token after the first; None where there is no second."""
        num_gaps = self.output_tokens() - 1
        return (self.end() - self.first_output()) / num_gaps if num_gaps > 0 else None

    def itls(self) -> list[float]:
        """Seconds between one piece of output and the next."""
        return [later - earlier for earlier, later in pairwise(self.output_times)]

    def e2el(self) -> float:
        """Seconds from sending to the end of the answer."""
        return self.end() - self.started

    def client_queue_time(self) -> float:
        """Seconds by which it was sent later than it should have been."""
        return self.started - self.due
