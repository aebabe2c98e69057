"""What the sampler is told about the rows of a step: plain data, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedserve.sampling_params import LogitsProcessor


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsEdits:
    """Edits of one row's logits; all token ids are below the vocabulary's size V.

    Attributes:
        prompt_token_ids: the prompt, a list or an int32 array; read for `repetition_penalty`.
        output_token_ids: the tokens generated so far, alike.
        presence_penalty: subtracted once from each token in the output.
        frequency_penalty: subtracted from each token as often as it is in the output.
        repetition_penalty: above 0; divides positive and multiplies negative logits of the tokens
            in prompt or output (Keskar et al. 2019, "CTRL", section 4.1).
        bias: pairs of token and what is added to its logit.
        allowed_token_ids: only these may come; None allows all.
        allowed_mask: int32 ``[ceil(V / 32)]``, token ``t`` is bit ``t % 32`` of entry ``t // 32``:
            only tokens with a 1 may come; None allows all.
        banned_token_ids: these must not come, allowed or not.
        fault: why no token can be chosen, where none can.
        processors: called in turn with the output's token ids and float32 logits ``[V]``, both
            copies to do with as they like; each gives the logits ``[V]`` that the next one gets.
    """

    prompt_token_ids: Sequence[int] | NDArray[np.int32] = ()
    output_token_ids: Sequence[int] | NDArray[np.int32] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    allowed_mask: NDArray[np.int32] | None = None
    banned_token_ids: tuple[int, ...] = ()
    fault: str | None = None
    processors: tuple[LogitsProcessor, ...] = ()

    @property
    def is_mask_alone(self) -> bool:
        """Whether nothing but ``allowed_mask`` is asked for."""
        return self.allowed_mask is not None and not (
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1
            or self.bias
            or self.allowed_token_ids is not None
            or self.banned_token_ids
            or self.fault is not None
            or self.processors
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """How to sample one row.

    Attributes:
        temperature: 0 is greedy.
        top_p: keep the most likely tokens up to this share; 1 keeps all.
        top_k: keep this many of the most likely; 0 or less keeps all, 1 is greedy.
        min_p: keep tokens at least this share as likely as the likeliest; 0 keeps all.
        uniforms: a random number in [0, 1) for each token to draw; several in the first step of
            parallel sampling.  Not read when greedy, which draws one token.
        edits: what is done to the logits first.
        num_logprobs: report log-probabilities of the drawn tokens and of this many of the
            likeliest; None reports none.  Not read with `num_candidates`, which draws nothing.
        num_candidates: above 0, draw nothing and give this many of the likeliest tokens (beam
            search).
        pair_start: where a second text begins in a prompt that is pooled; None where there is none.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    uniforms: tuple[float, ...] = (0.0,)
    edits: LogitsEdits | None = None
    num_logprobs: int | None = None
    num_candidates: int = 0
    pair_start: int | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the row takes the likeliest token: what the engine and the sampler go by."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def sole_mask(self) -> NDArray[np.int32] | None:
        """The mask of which a token is taken or drawn; None where more is asked for."""
        is_filtered = not self.is_greedy and (self.top_p < 1 or self.top_k > 0)
        if self.edits is None or self.num_candidates or is_filtered:
            return None
        return self.edits.allowed_mask if self.edits.is_mask_alone else None

    @property
    def is_drawn_as_is(self) -> bool:
        """Whether a token is drawn at random from the model's logits, which nobody changes."""
        return not self.is_greedy and self.edits is None and not self.num_candidates

    @property
    def is_async_safe(self) -> bool:
        """Whether one token, known from the model's logits alone, is all that is wanted."""
        return (
            self.edits is None
            and not self.num_candidates
            and self.num_logprobs is None
            and self.num_draws == 1
        )

    @property
    def num_draws(self) -> int:
        """Number of tokens to draw."""
        if self.num_candidates:
            return 0
        return 1 if self.is_greedy else len(self.uniforms)


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """Positions of a step whose next tokens are known, to be asked how likely those are.

    Attributes:
        index: int32 ``[P]``, places in the step's tokens.
        token_ids: int64 ``[P]``, the token that follows each.
        num_top: Likeliest tokens wanted of each.
    """

    index: NDArray[np.int32]
    token_ids: NDArray[np.int64]
    num_top: int
