"""What the sampler is told about the rows of a step: plain data, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pagedserve.sampling.grammar import GrammarState
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
        banned_token_ids: these must not come, allowed or not.
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
    banned_token_ids: tuple[int, ...] = ()
    processors: tuple[LogitsProcessor, ...] = ()


# Not frozen: rows with a grammar are made anew each step, which would cost three times that.
@dataclass(slots=True, kw_only=True)
class RowSampling:
    """How to sample one row; nobody changes it.

    Attributes:
        temperature: 0 is greedy.
        top_p: keep the most likely tokens up to this share; 1 keeps all.
        top_k: keep this many of the most likely; 0 or less keeps all, 1 is greedy.
        min_p: keep tokens at least this share as likely as the likeliest; 0 keeps all.
        uniforms: a random number in [0, 1) for each token to draw; several in the first step of
            parallel sampling.  Not read when greedy, which draws one token.
        second_uniform: a random number for a second draw, where the grammar refuses the first.
        edits: what is done to the logits first.
        grammar: where the text is in its grammar, which says what may come; None allows all.
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
    second_uniform: float = 0.0
    edits: LogitsEdits | None = None
    grammar: GrammarState | None = None
    num_logprobs: int | None = None
    num_candidates: int = 0
    pair_start: int | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the row takes the likeliest token: what the engine and the sampler go by."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def tried_grammar(self) -> GrammarState | None:
        """The grammar, where a token of the untouched logits is taken if it admits that one.

        So it may be with the largest logit.  And a token that is drawn from all, and again from
        those that may come if it may not, is as likely as one drawn from the latter at once: p by
        the first draw and (1 - A) p / A by the second make p / A, where A is the share of what may
        come.  But what top_p, top_k and min_p keep depends on what may come.
        """
        if self.grammar is None or self.edits is not None or self.num_draws != 1:
            return None
        is_filtered = self.top_p < 1 or self.top_k > 0 or self.min_p > 0
        return None if is_filtered and not self.is_greedy else self.grammar

    @property
    def is_edited(self) -> bool:
        """Whether tokens are chosen from a changed copy of the logits."""
        if self.grammar is None:
            return self.edits is not None
        return self.tried_grammar is None

    def again(self) -> "RowSampling":
        """The row for a second draw, in place of a token that its grammar refused."""
        return replace(self, uniforms=(self.second_uniform,))

    @property
    def is_drawn_as_is(self) -> bool:
        """Whether a token is drawn at random from the model's logits, which nobody changes."""
        return not (self.is_greedy or self.is_edited or self.num_candidates)

    @property
    def is_async_safe(self) -> bool:
        """Whether one token, known from the model's logits alone, is all that is wanted."""
        return (
            self.edits is None
            and self.grammar is None
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
