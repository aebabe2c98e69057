"""When a sequence ends: end-of-sequence and stop tokens, stop strings, and lengths."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from pagedserve.output.detokenizer import TextStream
from pagedserve.output.stop_strings import StopMatch, StopStrings
from pagedserve.outputs import FinishReason
from pagedserve.sampling_params import SamplingParams


class Finish(NamedTuple):
    """Why a sequence ended, in the terms of ``CompletionOutput``."""

    reason: FinishReason
    stop_reason: int | str | None = None


_LENGTH = Finish("length")


def is_by_token(finish: Finish | None) -> bool:
    """Whether an ending token ended a sequence, not a text or a length."""
    return (
        finish is not None and finish.reason == "stop" and not isinstance(finish.stop_reason, str)
    )


@dataclass(frozen=True, slots=True)
class StopRule:
    """The rule of one request; without stop strings one lookup and one comparison a token.

    Attributes:
        endings: What each ending token means.
        min_tokens: Ending tokens before this many new tokens are not to be sampled at all, and
            stop strings that end among them do not count.
        max_tokens: New tokens at most, the model's length counted in.
        strings: Texts that end a sequence; None for none.
        shows_ending: Whether the text holds the token that ended it; ``strings`` says the same of
            a string.
    """

    endings: dict[int, Finish]
    min_tokens: int
    max_tokens: int
    strings: StopStrings | None = None
    shows_ending: bool = False

    @classmethod
    def from_params(
        cls, params: SamplingParams, *, eos_token_ids: Iterable[int], max_new_tokens: int
    ) -> "StopRule":
        """Make the rule of a request.

        Args:
            params: Its sampling parameters.
            eos_token_ids: The model's end-of-sequence tokens.
            max_new_tokens: What ``max_model_len`` leaves after the prompt.
        """
        endings = {token: Finish("stop", token) for token in params.stop_token_ids}
        # What the text must be ends where it does.
        is_bound = params.structured_outputs is not None
        if is_bound or not params.ignore_eos:
            endings |= dict.fromkeys(eos_token_ids, Finish("stop"))
        strings = StopStrings(params.stop, params.include_stop_str_in_output)
        return cls(
            endings,
            0 if is_bound else params.min_tokens,
            min(params.max_tokens or max_new_tokens, max_new_tokens),
            strings if params.stop else None,
            params.include_stop_str_in_output,
        )

    @property
    def banned_at_first(self) -> tuple[int, ...]:
        """Tokens that must not be sampled while fewer than ``min_tokens`` are there."""
        return tuple(self.endings) if self.min_tokens else ()

    def check(self, token: int, num_tokens: int) -> Finish | None:
        """Whether ``token``, the ``num_tokens``-th new one, ends the sequence.

        A token that ends it is a "stop" even where the length is reached too.
        """
        if token in self.endings and num_tokens > self.min_tokens:
            return self.endings[token]
        return _LENGTH if num_tokens >= self.max_tokens else None


def find_stop(
    rule: StopRule, before: TextStream, text: TextStream, num_tokens: int
) -> StopMatch | None:
    """The stop string that a text of ``num_tokens`` came to hold with the last of them.

    Args:
        rule: Of the request.
        before: The text without the last token.
        text: The text with it.
        num_tokens: New tokens, the last one included.
    """
    if rule.strings is None or num_tokens <= rule.min_tokens:
        return None
    return rule.strings.find(text.text, len(before.text))
