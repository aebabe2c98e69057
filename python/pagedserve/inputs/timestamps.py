"""Times of a transcript: the tokens that name them, their rules, and the segments between them.

A speech model writes a transcript as ``<|0.00|> text<|2.40|><|2.40|> more text<|5.12|>``: each
segment between the tokens of its start and its end.  The rules are those of Radford et al. 2022,
"Robust Speech Recognition via Large-Scale Weak Supervision", and one more: a segment that has begun
has an end.  Whisper may stop within a segment that its input cuts, and begins there again; inputs
here are cut in pauses, so that what follows a stop would be lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Part of a transcript.

    Attributes:
        start: Seconds from the start of the audio.
        end: Likewise, at least ``start``.
        token_ids: Tokens of its text.
    """

    start: float
    end: float
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeTokens:
    """Tokens of times: token ``first + i`` is i steps from the start of a prompt's audio.

    Attributes:
        first: Token of time 0; no token from here on is text.
        step: Seconds between two times.
        disabled: Token of a transcript without times.
        no_speech: Token of audio without speech, likely after the start token there.
        end: Token that ends a transcript; those below it are text.
        latest_start: Highest number of steps of the first time; None if all are allowed.
    """

    first: int
    step: float
    disabled: int
    no_speech: int
    end: int
    latest_start: int | None = None

    def keep_rules(self, token_ids: Sequence[int], logits: "Tensor") -> "Tensor":
        """Exclude tokens that break the rules.

        A transcript begins with a time, and ends with that of the end of a segment, or without any.
        Times are in pairs, but for the first and the last, and do not decrease; a segment is not
        empty.  If all times together are more likely than any other token, the next token is a
        time.

        Args:
            token_ids: The transcript so far.
            logits: float32 ``[V]``, with the tokens excluded that are never sampled; edited in
                place.
        """
        first = self.first
        logits[self.disabled] = -float("inf")
        if not token_ids:
            logits[:first] = -float("inf")
            if self.latest_start is not None:
                logits[first + self.latest_start + 1 :] = -float("inf")
            return logits
        latest = next((token for token in reversed(token_ids) if token >= first), first - 1)
        ends_with_time = token_ids[-1] >= first
        if ends_with_time and len(token_ids) > 1 and token_ids[-2] < first:
            lowest = latest
            logits[: self.end] = -float("inf")
        else:
            lowest = latest + 1
            if ends_with_time:
                logits[first:] = -float("inf")
            if len(token_ids) > 1 and lowest < len(logits):
                logits[self.end] = -float("inf")
        logits[first:lowest] = -float("inf")
        if logits[first:].logsumexp(0) > logits[:first].max():
            logits[:first] = -float("inf")
        return logits

    def segments(self, token_ids: Sequence[int], *, begin: float, seconds: float) -> list[Segment]:
        """Segments of a transcript.

        One whose start or end is missing, as in a transcript that was cut, has that of the prompt.

        Args:
            token_ids: The transcript; special tokens are passed over.
            begin: Seconds of audio before the prompt's.
            seconds: Duration of the prompt's audio.
        """
        found: list[Segment] = []
        end = begin + seconds
        start, text = begin, list[int]()
        for token in [*token_ids, None]:
            if token is not None and token < self.first:
                text += [token] * (token < self.end)
                continue
            time = end if token is None else min(begin + (token - self.first) * self.step, end)
            if text:
                found.append(Segment(start=start, end=max(start, time), token_ids=tuple(text)))
            start, text = time, []
        return found
