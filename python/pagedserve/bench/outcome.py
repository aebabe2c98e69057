"""Outcome of one request, as seen by its client.

Times are readings of ``time.perf_counter``; values derived from them are in seconds, and defined
only for completed requests.
"""

from dataclasses import dataclass, field
from itertools import pairwise

REFUSED = "refused"
CONNECTION = "connection"
TIMEOUT = "timeout"
BROKEN_STREAM = "broken_stream"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request was not completed.

    Attributes:
        kind: ``refused`` (status 429 or 503: retry later), ``status_`` and the number for any other
            status, ``connection`` (none was established, or it ended before a status arrived),
            ``timeout``, or ``broken_stream`` (a response that started and ended incorrectly).
        message: Description, in one line.
    """

    kind: str
    message: str


@dataclass(slots=True)
class Outcome:
    """One running or ended request.

    Attributes:
        due: Planned send time.
        started: Send time.
        num_input_tokens: Planned tokens of the prompt, replaced by the server's count.
        num_output_tokens: Output tokens as counted by the server; None if not reported.
        output_times: Arrival times of output chunks.
        texts: Texts of the chunks of the response; None does not keep them.
        ended: Arrival time of the last chunk of the response; None before the first.
        failure: Failure; None if it has not failed.
    """

    due: float
    started: float
    num_input_tokens: int
    num_output_tokens: int | None = None
    output_times: list[float] = field(default_factory=list)
    texts: list[str] | None = None
    ended: float | None = None
    failure: Failure | None = None

    def first_output(self) -> float:
        """Time of the first output; only for a request that has ended."""
        return self.output_times[0] if self.output_times else self.end()

    def end(self) -> float:
        """Time of the end; only for a request that has ended."""
        if self.ended is None:
            raise ValueError("the answer has not ended")
        return self.ended

    def output_tokens(self) -> int:
        """Output tokens; output chunks if the server does not count tokens."""
        counted = self.num_output_tokens
        return len(self.output_times) if counted is None else counted

    def ttft(self) -> float:
        """Time to first token: seconds from sending to the first output."""
        return self.first_output() - self.started

    def tpot(self) -> float | None:
        """Seconds per output token after the first; None if there is no second."""
        num_gaps = self.output_tokens() - 1
        return (self.end() - self.first_output()) / num_gaps if num_gaps > 0 else None

    def itls(self) -> list[float]:
        """Inter-token latencies: seconds between consecutive outputs."""
        return [later - earlier for earlier, later in pairwise(self.output_times)]

    def e2el(self) -> float:
        """End-to-end latency: seconds from sending to the end of the response."""
        return self.end() - self.started

    def client_queue_time(self) -> float:
        """Seconds between the planned and the actual send time."""
        return self.started - self.due
