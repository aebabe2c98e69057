"""Sampler inputs for the rows of a step: plain data, without torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pagedserve.sampling.grammar import GrammarState
from pagedserve.sampling_params import LogitsProcessor


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsEdits:
    """Edits of one row's logits; all token ids are below the vocabulary's size V.

    An attribute with the name of a sampling parameter has the value of the request; a request with
    another value than the default here has its logits edited.

    Attributes:
        prompt_token_ids: the prompt, a list or an int32 array; for `repetition_penalty`.
        output_token_ids: the tokens generated so far, likewise.
        presence_penalty: subtracted once from each token in the output.
        frequency_penalty: subtracted from each token once per occurrence in the output.
        repetition_penalty: above 0; divides positive and multiplies negative logits of the tokens
            in prompt or output (Keskar et al. 2019, "CTRL", section 4.1).
        logit_bias: pairs of a token and the value added to its logit.
        allowed_token_ids: the only tokens that may be sampled; None allows all.
        banned_token_ids: tokens that must not be sampled, allowed or not.
        top_n_sigma: above 0, keep tokens whose logit is at most this many standard deviations of
            the row's finite logits below the largest, after all other edits and the grammar (Tang
            et al. 2024, "Top-n-sigma: not all logits are you need").
        logits_processors: called in turn with the output's token ids and float32 logits ``[V]``,
            both copies that may be modified; each returns the logits ``[V]`` for the next.  The
            executor decides whether they are tensors or numpy arrays (`SamplingOps`).
    """

    prompt_token_ids: Sequence[int] | NDArray[np.int32] = ()
    output_token_ids: Sequence[int] | NDArray[np.int32] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    top_n_sigma: float = -1.0
    logits_processors: tuple[LogitsProcessor, ...] = ()


# Not frozen: rows with a grammar are created anew each step, which would cost three times that.
@dataclass(slots=True, kw_only=True)
class RowSampling:
    """Sampling parameters of one row; read-only.

    An attribute with the name of a sampling parameter has the value of the request.

    Attributes:
        temperature: 0 is greedy.
        top_p: keep the most likely tokens up to this cumulative probability; 1 keeps all.
        top_k: keep this many of the most likely; 0 or less keeps all, 1 is greedy.
        min_p: keep tokens with at least this fraction of the highest probability; 0 keeps all.
        uniforms: a random number in [0, 1) for each token to sample; several in the first step of
            parallel sampling.  Not read when greedy, which takes one token.
        second_uniform: a random number for a second sample, if the grammar refuses the first.
        edits: edits of the logits before sampling.
        grammar: grammar state that restricts the tokens; None allows all.
        num_logprobs: number of most likely tokens whose log-probabilities to return beside those of
            the sampled tokens; None returns none.  Not read with `num_candidates`.
        num_candidates: above 0, sample nothing and return this many of the most likely tokens (beam
            search).
        pair_start: start of the second text in a pooled prompt; None if there is none.
        label_token_ids: tokens whose log-probabilities to return, before edits.
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
    label_token_ids: tuple[int, ...] = ()

    @property
    def is_greedy(self) -> bool:
        """Whether the row takes the most likely token: checked by the engine and the sampler."""
        return self.temperature == 0 or self.top_k == 1

    def top_k_of(self, vocab_size: int) -> int:
        """Number of most likely tokens that are kept of a vocabulary."""
        return self.top_k if 0 < self.top_k < vocab_size else vocab_size

    @property
    def tried_grammar(self) -> GrammarState | None:
        """The grammar, if it may be checked after sampling from the unmasked logits.

        This is valid for the most likely token.  For a random token, a sample from all, repeated
        among the allowed ones if it is not allowed, has the distribution of a sample from the
        allowed ones: p by the first and (1 - A) p / A by the second make p / A, where A is the
        probability of the allowed ones.  But what top_p, top_k and min_p keep depends on what is
        allowed.
        """
        if self.grammar is None or self.edits is not None or self.num_draws != 1:
            return None
        is_filtered = self.top_p < 1 or self.top_k > 0 or self.min_p > 0
        return None if is_filtered and not self.is_greedy else self.grammar

    @property
    def is_edited(self) -> bool:
        """Whether the row needs an edited copy of the logits."""
        if self.grammar is None:
            return self.edits is not None
        return self.tried_grammar is None

    def again(self) -> "RowSampling":
        """The row for a second sample, after its grammar refused the first."""
        return replace(self, uniforms=(self.second_uniform,))

    @property
    def is_drawn_as_is(self) -> bool:
        """Whether a token is sampled at random from the model's unedited logits."""
        return not (self.is_greedy or self.is_edited or self.num_candidates)

    @property
    def is_async_safe(self) -> bool:
        """Whether the row needs only one token, computed from the model's logits alone."""
        return (
            self.edits is None
            and self.grammar is None
            and not self.num_candidates
            and self.num_logprobs is None
            and not self.label_token_ids
            and self.num_draws == 1
        )

    @property
    def num_draws(self) -> int:
        """Number of tokens to sample."""
        if self.num_candidates:
            return 0
        return 1 if self.is_greedy else len(self.uniforms)


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """Positions of a step whose next tokens are known, to compute their log-probabilities.

    Attributes:
        index: int32 ``[P]``, indices in the step's tokens.
        token_ids: int64 ``[P]``, the token that follows each.
        num_top: number of most likely tokens to return for each.
    """

    index: NDArray[np.int32]
    token_ids: NDArray[np.int64]
    num_top: int
