"""Sampler inputs for the new tokens of a request."""

from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from pagedserve.engine.thinking import Thinking
from pagedserve.inputs.speech import TokenRules
from pagedserve.sampling.bad_words import BadWords
from pagedserve.sampling.grammar import GrammarState, GrammarStates
from pagedserve.sampling.rows import LogitsEdits, RowSampling
from pagedserve.sampling_params import SamplingParams
from pagedserve.sampling_params.options import PARAMETERS

_DRAWN_AT_ONCE: Final = 64

# What a row takes from the sampling parameters of a request, by name.
_ROW_PARAMETERS: Final = [field.name for field in fields(RowSampling) if field.name in PARAMETERS]
# What the edits of a row take, and the values that edit nothing.
_UNEDITED: Final = {
    field.name: field.default for field in fields(LogitsEdits) if field.name in PARAMETERS
}


class DrawKey(NamedTuple):
    """Selects the random numbers of a request.

    Attributes:
        number: Number of the request, used if it has no seed; None is its number in the engine.
        choice: Index of its first completion, above 0 where one of several resumes.
    """

    number: int | None = None
    choice: int = 0

    def key(self, seed: int | None, engine_seed: int, number: int) -> tuple[int, ...]:
        """Key of the request's random numbers; each sequence adds its index.

        Args:
            seed: Seed of the request.
            engine_seed: Seed of the engine.
            number: Number of the request in the engine.
        """
        if seed is not None:
            return 0, seed  # the first number separates the two kinds of keys
        return 1, engine_seed, number if self.number is None else self.number


OWN_DRAWS: Final = DrawKey()


class UniformStream:
    """Random numbers of one sequence: number i belongs to its i-th new token.

    They depend on the key alone, not on the batch, on preemptions, or on failed steps that are
    repeated, so a few numbers before the newest are kept.
    """

    __slots__ = ("_block", "_generator", "_start")

    def __init__(self, *key: int) -> None:
        """Start the stream of ``key``, non-negative integers; different keys, different streams."""
        # As text: for integers SeedSequence takes (2**32, 0) and (0, 1) for the same.
        seed = np.random.SeedSequence(list(repr(key).encode()))
        self._generator = np.random.Generator(np.random.Philox(seed))
        self._start = 0
        self._block: list[float] = []

    def at(self, index: int) -> float:
        """Number ``index``, a float64 in [0, 1); never one 64 or more before the newest."""
        while index - self._start >= len(self._block):
            kept = self._block[-_DRAWN_AT_ONCE:]
            start = self._start + len(self._block) - len(kept)
            self._block = kept + self._generator.random(_DRAWN_AT_ONCE).tolist()
            self._start = start
        return self._block[index - self._start]


class RowSampler:
    """Builds the sampler rows of a request.

    Attributes:
        constant: Row of every token, if all are the same: greedy, without edits.
        grammar: Grammar states of its sequences; None without structured outputs.
    """

    __slots__ = (
        "_bad_words",
        "_banned",
        "_has_edits",
        "_make",
        "_make_edits",
        "_min_tokens",
        "_num_logprobs",
        "_plain",
        "_rules",
        "_seconds",
        "_thinking",
        "_uniforms",
        "constant",
        "grammar",
    )

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_token_ids: Sequence[int],
        bad_words: BadWords | None,
        banned_at_first: tuple[int, ...],
        num_candidates: int,
        key: Sequence[int],
        pair_start: int | None = None,
        rules: TokenRules | None = None,
        grammar: GrammarStates | None = None,
        thinking: Thinking | None = None,
        choice: int = 0,
    ) -> None:
        """Prepare the rows of a request.

        Args:
            params: Sampling parameters.
            prompt_token_ids: Tokens that the repetition penalty counts besides new ones.
            bad_words: Token sequences that must not be generated.
            banned_at_first: Tokens not to be sampled before ``params.min_tokens`` new ones.
            num_candidates: Candidates per beam; 0 without beam search.
            key: Key of its random numbers; each sequence adds its index.
            pair_start: Start of the second text in its prompt.
            rules: Token rules of the model; None if it has none.
            grammar: Grammar states of its sequences; None without structured outputs.
            thinking: Reasoning of its sequences; None without a budget and a grammar after it.
            choice: Index of its first sequence for the random numbers.
        """
        self.grammar = grammar
        self._thinking = thinking
        self._rules = rules
        self._min_tokens = params.min_tokens
        self._bad_words = bad_words
        self._banned = banned_at_first
        # Beams take theirs from the candidates.
        self._num_logprobs = (params.logprobs or 0) if params.keeps_logprobs else None
        self._make = partial(
            RowSampling,
            **{name: getattr(params, name) for name in _ROW_PARAMETERS},
            num_logprobs=self._num_logprobs,
            num_candidates=num_candidates,
            pair_start=pair_start,
        )
        edits = {name: getattr(params, name) for name in _UNEDITED}
        if grammar is not None and (allowed := params.allowed_token_ids) is not None:
            # A text that is complete ends, whatever tokens it may have.
            edits["allowed_token_ids"] = (*allowed, *grammar.eos_token_ids)
        is_free = grammar is None and params.allowed_token_ids is None
        if rules is not None and rules.times is not None and is_free:
            edits["logits_processors"] = (*params.logits_processors, rules.keep_times)
        self._make_edits = partial(LogitsEdits, **edits, prompt_token_ids=prompt_token_ids)
        self._has_edits = bad_words is not None or edits != _UNEDITED
        self._plain = self._make()
        # Beams are greedy.
        num_draws = 0 if self._plain.is_greedy else params.max_num_running_seqs
        draws = range(choice, choice + num_draws)
        self._uniforms = [UniformStream(*key, index) for index in draws]
        # A key that differs from those of all sequences.
        self._seconds = [UniformStream(*key, index, 1) for index in draws if grammar]
        is_constant = not (self._uniforms or self._has_edits or self._banned or grammar or thinking)
        self.constant = self._plain if is_constant and rules is None else None

    def row(self, token_ids: Sequence[int], index: int, *, num_unknown: int = 0) -> RowSampling:
        """Row for the token after ``token_ids``, the new tokens of sequence ``index``.

        The first row of a request samples a token for each of its sequences.  ``num_unknown``
        further tokens may follow ``token_ids`` if the row does not depend on them.
        """
        count = len(token_ids) + num_unknown
        rules, labels = self._rules, tuple[int, ...]()
        if rules is not None:
            if count == 0 and rules.no_speech is not None and self._num_logprobs is not None:
                labels = (rules.no_speech,)
            if count < len(rules.first):
                return RowSampling(
                    temperature=0,
                    edits=LogitsEdits(allowed_token_ids=rules.first[count]),
                    num_logprobs=self._num_logprobs,
                    label_token_ids=labels,
                )
        uniforms: tuple[float, ...] = (0.0,)
        if self._uniforms:
            streams = self._uniforms if count == 0 else [self._uniforms[index]]
            uniforms = tuple(stream.at(count) for stream in streams)
        grammar, is_edited = self.grammar, self._has_edits
        if self._thinking is not None:
            extent = self._thinking.extent(token_ids, index)
            if closing := self._thinking.closing(token_ids, extent):
                only = LogitsEdits(allowed_token_ids=closing[:1])
                return self._make(uniforms=uniforms, edits=only)
            # A row with edits is sampled before the next one is made, which may need its token.
            is_edited |= extent.is_open if grammar else self._thinking.may_close(count, extent)
            grammar = None if extent.is_open else grammar
        banned = self._banned if count < self._min_tokens else ()
        if rules is not None:
            banned += rules.banned(count)
        edits = self._edits(token_ids, banned) if is_edited or banned else None
        if grammar is not None:
            second = self._seconds[index].at(count) if self._seconds else 0.0
            return self._make(
                uniforms=uniforms,
                second_uniform=second,
                edits=edits,
                grammar=self._grammar_state(grammar, token_ids, index),
            )
        if edits is None and not self._uniforms:
            return self._plain
        return self._make(uniforms=uniforms, edits=edits, label_token_ids=labels)

    def forced(self, token_ids: Sequence[int], index: int) -> list[int]:
        """Tokens that most likely follow ``token_ids``, the tokens of sequence ``index``.

        They are the end tag of reasoning at its budget, or text that the grammar forces.
        """
        if self._thinking is not None:
            extent = self._thinking.extent(token_ids, index)
            if extent.is_open:
                return [*self._thinking.closing(token_ids, extent)]
        return [] if self.grammar is None else self.grammar.forced(self._held(token_ids, index))

    def possible(self, token_ids: Sequence[int], index: int, drafts: list[int]) -> list[int]:
        """Draft tokens after ``token_ids``, up to the first that the grammar rules out.

        Those of reasoning, which no grammar holds, are kept up to its end.
        """
        if self.grammar is None:
            return drafts
        if self._thinking is not None and self._thinking.extent(token_ids, index).is_open:
            end = self._thinking.extent([*token_ids, *drafts], index).end
            return drafts if end is None else drafts[: end - len(token_ids)]
        return drafts[: self.grammar.num_possible(self._held(token_ids, index), drafts)]

    def _grammar_state(
        self, grammar: GrammarStates, token_ids: Sequence[int], index: int
    ) -> GrammarState:
        """State of the grammar for the next token, which may start reasoning."""
        opening = None if self._thinking is None or len(token_ids) else self._thinking.opening
        if opening is not None:
            return grammar.opened_by(opening)
        return grammar.at(self._held(token_ids, index))

    def _held(self, token_ids: Sequence[int], index: int) -> Sequence[int]:
        """Tokens that the grammar holds, of tokens that do not end within reasoning."""
        if self._thinking is None:
            return token_ids
        return token_ids[self._thinking.extent(token_ids, index).end or 0 :]

    def _edits(self, token_ids: Sequence[int], banned: tuple[int, ...]) -> LogitsEdits:
        if self._bad_words is not None:
            banned = (*banned, *self._bad_words.banned_after(token_ids))
        return self._make_edits(output_token_ids=token_ids, banned_token_ids=banned)
