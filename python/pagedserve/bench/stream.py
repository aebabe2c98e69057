"""Parser of a response's stream of server-sent events."""

from pagedserve.bench.api import Api, Chunk, read_chunk
from pagedserve.bench.outcome import BROKEN_STREAM, Failure, Outcome

DONE = b"[DONE]"
_CUT_SHORT = ("abort", "error")
_MESSAGE_LENGTH = 200


class EventReader:
    """Splits bytes into the data of events; comments and other fields are ignored."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of the events whose line ends in this chunk."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class AnswerReader:
    """Records the events of a response in an outcome."""

    def __init__(self, api: Api, outcome: Outcome) -> None:
        self._api = api
        self._outcome = outcome
        self._has_finished = False

    def take(self, data: bytes, moment: float) -> Failure | None:
        """Record an event.

        Args:
            data: Data of the event.
            moment: Time when it was read.

        Returns:
            The failure, if the event is an error.

        Raises:
            ValueError: It is not an event of the endpoint.
        """
        if data == DONE:
            self._has_finished = True
            return None
        chunk = read_chunk(self._api, data)
        if chunk.error is not None:
            return Failure(BROKEN_STREAM, chunk.error[:_MESSAGE_LENGTH])
        if chunk.finish_reason in _CUT_SHORT:
            return Failure(BROKEN_STREAM, f"finish_reason {chunk.finish_reason}")
        self._take_down(chunk, moment)
        return None

    def end(self) -> Failure | None:
        """The failure of a stream that ended too early; else None."""
        if not self._has_finished:
            return Failure(BROKEN_STREAM, "the stream ended before the answer did")
        if self._outcome.ended is None:
            return Failure(BROKEN_STREAM, "the stream held no answer")
        return None

    def _take_down(self, chunk: Chunk, moment: float) -> None:
        outcome = self._outcome
        if chunk.is_output:
            outcome.output_times.append(moment)
        if chunk.has_choice:
            outcome.ended = moment
            if outcome.texts is not None:
                outcome.texts.append(chunk.text)
        if chunk.finish_reason is not None:
            self._has_finished = True
        if chunk.num_prompt_tokens is not None:
            outcome.num_input_tokens = chunk.num_prompt_tokens
        if chunk.num_completion_tokens is not None:
            outcome.num_output_tokens = chunk.num_completion_tokens
