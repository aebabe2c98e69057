"""The sampler: from a step's logits to tokens and their log-probabilities, all rows at once.

The largest logit of every row is computed first: it is the token of plain greedy rows, and shows
whether the logits are usable.  Rows without edits are sampled (`SamplingOps.draw`) from the
original logits, and all of this is copied to the host in one transfer.  Rows that only have a
grammar are among them: it checks their tokens there, and those that it refuses are sampled again
from the allowed ones.  The other rows are copied, a chunk at a time, edited
(`pagedserve.sampling.edits`), and sampled or searched for candidates.  Log-probabilities of
sampled tokens are computed from the original logits afterwards, as logits minus their log-sum-exp.

Invariants:

1. A row's tokens depend on its logits and parameters, never on other rows.
2. A row that cannot be sampled becomes an entry of `SampledRows.errors`; others are unaffected.
3. Besides the logits, memory is limited to a few chunks (`in_chunks`).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagedserve.sampling.edits import edit_logits
from pagedserve.sampling.grammar import GrammarState, compute_masks
from pagedserve.sampling.on_host import HOST
from pagedserve.sampling.ops import Array, SamplingOps, in_chunks, select_rows
from pagedserve.sampling.results import Candidates, PositionLogprobs, SampledLogprobs, SampledRows
from pagedserve.sampling.rows import PromptTargets, RowSampling


class Sampler:
    """Samples tokens from logits."""

    def __init__(self, ops: SamplingOps = HOST) -> None:
        """Store the operations on the logits.

        Args:
            ops: by default for numpy arrays, which logits processors receive too;
                `pagedserve.sampling.tensors` has those for tensors.
        """
        self._ops = ops

    def sample(self, logits: Array, rows: Sequence[RowSampling]) -> SampledRows:
        """Sample the rows of a step, and wait for the results; see `launch`."""
        return self.launch(logits, rows).results()

    def launch(self, logits: Array, rows: Sequence[RowSampling]) -> "LaunchedSamples":
        """Start to sample the rows of a step.

        Args:
            logits: float32 ``[S, V]``; not modified.
            rows: parameters of the S rows.
        """
        with self._ops.inference():
            return LaunchedSamples(logits, rows, self._ops)


class LaunchedSamples:
    """Samples of a step, some of them still on the device."""

    def __init__(self, logits: Array, rows: Sequence[RowSampling], ops: SamplingOps) -> None:
        """Compute what does not depend on edits; see `Sampler.launch`."""
        peaks, self._greedy = ops.argmax(logits)
        self._logits, self._rows, self._ops = logits, rows, ops
        tried = ((i, row.tried_grammar) for i, row in enumerate(rows))
        self._tried = {i: grammar for i, grammar in tried if grammar is not None}
        self._edited = [i for i, row in enumerate(rows) if i not in self._tried and row.is_edited]
        random = [i for i, row in enumerate(rows) if row.is_drawn_as_is]
        self._random = np.array(random, np.int64)
        self._drawn = self._greedy[:0]
        if random:
            largest = select_rows(peaks, self._random, ops)
            self._drawn = ops.draw(logits, [rows[i] for i in random], self._random, largest)
        self._fetched = ops.fetch(self._greedy, peaks, self._drawn)

    @property
    def is_async_safe(self) -> bool:
        """Whether the step needs one token per row only, and all are computed."""
        return all(row.is_async_safe for row in self._rows)

    def tokens(self) -> Array:
        """Tokens of a step with one sample per row, int32 ``[S]``, where the logits are.

        They are ids below V, including undefined ones.
        """
        if not self._random.size:
            return self._greedy
        return self._ops.replaced(self._greedy, self._random, self._drawn)

    def results(self) -> SampledRows:
        """Wait for the copy, and do the remaining work; the logits must still be valid.

        Raises:
            IndexError: A token id of an edit is not below V.
        """
        with self._ops.inference():
            return self._results()

    def _results(self) -> SampledRows:
        logits, rows, ops = self._logits, self._rows, self._ops
        found, largest, drawn = self._fetched()
        vocab_size = logits.shape[1]
        step = _Collector(rows, found, vocab_size, ops)
        if self._random.size:
            step.put(self._random, drawn)
        step.errors.update(_unusable(largest, "the logits"))
        refused = step.refused(self._tried) if self._tried else []
        for index in in_chunks(refused, vocab_size, ops):
            step.sample_again(index, logits, [self._tried[i] for i in index])
        edited = [i for i in self._edited if i not in step.errors]
        for index in in_chunks(edited, vocab_size, ops):
            step.edit_and_sample(index, ops.copy_rows(logits, index))
        usable = [(i, row) for i, row in enumerate(rows) if i not in step.errors]
        searched = [i for i, row in usable if row.num_candidates and not row.is_edited]
        for index in in_chunks(searched, vocab_size, ops):
            step.search(index, select_rows(logits, index, ops))
        return step.finish(logits)


class _Collector:
    """Collects the results of one step."""

    def __init__(
        self,
        rows: Sequence[RowSampling],
        greedy: NDArray[np.int32],
        vocab_size: int,
        ops: SamplingOps,
    ) -> None:
        self._ops = ops
        num_draws = [row.num_draws for row in rows]
        self._rows = rows
        self._draw_start = np.cumsum([0, *num_draws], dtype=np.int64)
        self._row_of_draw = np.repeat(np.arange(len(rows)), num_draws)
        self._tokens = greedy[self._row_of_draw]
        self._candidates = empty_candidates(rows, vocab_size=vocab_size)
        self.errors: dict[int, str] = {}

    def edit_and_sample(self, index: NDArray[np.int64], logits: Array) -> None:
        """Edit and sample the rows `index`, whose logits are a copy, one chunk."""
        rows = [self._rows[i] for i in index]
        failed = edit_logits(logits, rows, self._ops)
        self.errors.update({int(index[n]): why for n, why in failed.items()})
        self._sample(index, logits, rows)

    def refused(self, tried: dict[int, GrammarState]) -> list[int]:
        """Rows whose grammars do not allow their tokens."""
        tokens = self._tokens[self._draw_start[list(tried)]].tolist()
        return [
            i
            for (i, grammar), token in zip(tried.items(), tokens, strict=True)
            if i not in self.errors and not grammar.admits(token)
        ]

    def sample_again(
        self, index: NDArray[np.int64], logits: Array, grammars: Sequence[GrammarState]
    ) -> None:
        """Sample the rows `index` of the logits, whose grammars refused a token, one chunk."""
        masks = compute_masks(grammars)
        faults = {i: state.fault for i, state in zip(index, grammars, strict=True)}
        self.errors.update({int(i): fault for i, fault in faults.items() if fault is not None})
        is_alive = np.array([state.fault is None for state in grammars])
        is_greedy = np.array([self._rows[i].is_greedy for i in index])
        if (greedy := is_alive & is_greedy).any():
            self._take_likeliest(index[greedy], logits, masks[greedy])
        if (random := is_alive & ~is_greedy).any():
            self._draw_allowed(index[random], logits, masks[random])

    def _take_likeliest(
        self, index: NDArray[np.int64], logits: Array, masks: NDArray[np.int32]
    ) -> None:
        """Take the most likely allowed token, for the rows `index`."""
        peaks, ids = self._ops.argmax(logits, self._ops.upload(masks), index)
        self._note_unusable(index, peaks)
        self.put(index, self._ops.download(ids))

    def _draw_allowed(
        self, index: NDArray[np.int64], logits: Array, masks: NDArray[np.int32]
    ) -> None:
        """Sample from the tokens of their masks, for the rows `index`."""
        packed = self._ops.upload(masks)
        peaks, _ = self._ops.argmax(logits, packed, index)
        self._note_unusable(index, peaks)
        rows = [self._rows[i].again() for i in index]
        tokens = self._ops.draw(logits, rows, index, peaks, packed)
        self.put(index, self._ops.download(tokens))

    def _note_unusable(self, index: NDArray[np.int64], peaks: Array) -> None:
        """Set errors of rows whose largest logits show that they cannot be sampled."""
        for n, why in _unusable(self._ops.download(peaks), "the edited logits").items():
            self.errors.setdefault(int(index[n]), why)

    def _sample(self, index: NDArray[np.int64], logits: Array, rows: Sequence[RowSampling]) -> None:
        """Sample the rows `index`, except those that failed."""
        ops = self._ops
        peaks, ids = ops.argmax(logits)
        self._note_unusable(index, peaks)
        usable = [(n, row) for n, row in enumerate(rows) if index[n] not in self.errors]
        searched = np.array([n for n, row in usable if row.num_candidates], dtype=np.int64)
        drawn = np.array([n for n, row in usable if row.num_draws], dtype=np.int64)
        is_greedy = np.array([rows[n].is_greedy for n in drawn], dtype=np.bool_)
        greedy, random = drawn[is_greedy], drawn[~is_greedy]
        if searched.size:
            self.search(index[searched], select_rows(logits, searched, ops))
        if greedy.size:
            self.put(index[greedy], ops.download(ops.copy_rows(ids, greedy)))
        if random.size:
            largest = select_rows(peaks, random, ops)
            tokens = ops.draw(logits, [rows[n] for n in random], random, largest)
            self.put(index[random], ops.download(tokens))

    def search(self, index: NDArray[np.int64], logits: Array) -> None:
        """Find the candidates of the rows `index` in their logits, one chunk."""
        if (found := self._candidates) is not None:
            ids, logprobs = self._ops.candidates(logits, found.token_ids.shape[1])
            found.token_ids[index], found.logprobs[index] = ids, logprobs

    def put(self, index: NDArray[np.int64], tokens: NDArray[np.integer]) -> None:
        """Set all samples of the rows, which are in ascending order."""
        is_one_each = len(tokens) == len(index)
        places = self._draw_start[index] if is_one_each else np.isin(self._row_of_draw, index)
        self._tokens[places] = tokens

    def finish(self, logits: Array) -> SampledRows:
        """Compute requested log-probabilities."""
        if self.errors:
            self._tokens[np.isin(self._row_of_draw, list(self.errors))] = 0
        logprobs = sampled_logprobs(
            logits,
            self._rows,
            tokens=self._tokens,
            row_of_draw=self._row_of_draw,
            ops=self._ops,
        )
        usable = [i for i in range(len(self._rows)) if i not in self.errors]
        labels = label_logprobs(logits, self._rows, usable, self._ops)
        return SampledRows(
            self._tokens, self._draw_start, logprobs, self._candidates, self.errors, labels
        )


def _unusable(largest: NDArray[np.float32], what: str) -> dict[int, str]:
    """Errors of rows that cannot be sampled, from their largest logits [N]."""
    errors = {}
    for row in np.flatnonzero(~np.isfinite(largest)).tolist():
        if np.isneginf(largest[row]):
            errors[row] = f"no token is left to sample: {what} are all -inf"
        else:
            errors[row] = f"{what} hold {'NaN' if np.isnan(largest[row]) else 'infinity'}"
    return errors


def sampled_logprobs(
    logits: Array,
    rows: Sequence[RowSampling],
    *,
    tokens: NDArray[np.int32],
    row_of_draw: NDArray[np.int64],
    ops: SamplingOps,
) -> SampledLogprobs | None:
    """Log-probabilities of sampled tokens.

    Args:
        logits: float32 ``[S, V]``, of the model.
        rows: parameters of the S rows.
        tokens: ``[D]``, the sampled tokens.
        row_of_draw: ``[D]``, their rows.
        ops: operations on the logits.

    Returns:
        None if no row requests them.
    """
    asked = np.array([-1 if row.num_logprobs is None else row.num_logprobs for row in rows])
    draws = (asked[row_of_draw] >= 0).nonzero()[0]
    if not draws.size:
        return None
    num_top = min(int(asked.max()), logits.shape[1])
    found = SampledLogprobs(
        np.full(len(tokens), np.nan, dtype=np.float32),
        np.zeros(len(tokens), dtype=np.int32),
        np.zeros((len(rows), num_top), dtype=np.int32),
        np.full((len(rows), num_top), np.nan, dtype=np.float32),
    )
    for chunk in in_chunks(draws, logits.shape[1], ops):
        index = row_of_draw[chunk]
        looked_up = ops.top_logprobs(logits, index, tokens[chunk], num_top)
        found.token_logprobs[chunk], found.token_ranks[chunk] = looked_up[:2]
        found.top_token_ids[index], found.top_logprobs[index] = looked_up[2:]
    return found


def label_logprobs(
    logits: Array, rows: Sequence[RowSampling], usable: Sequence[int], ops: SamplingOps
) -> dict[int, NDArray[np.float32]]:
    """Log-probabilities of the labels of rows that have some.

    Args:
        logits: float32 ``[S, V]``, of the model.
        rows: parameters of the S rows.
        usable: indices of rows that have not failed.
        ops: operations on the logits.
    """
    labelled = [i for i in usable if rows[i].label_token_ids]
    most = max((len(rows[i].label_token_ids) for i in labelled), default=0)
    found = {}
    for index in in_chunks(labelled, logits.shape[1], ops):
        labels = [rows[i].label_token_ids for i in index]
        # Rows with fewer labels repeat their first.
        padded = [ids + ids[:1] * (most - len(ids)) for ids in labels]
        logprobs = ops.token_logprobs(logits, index, np.array(padded, np.int64))
        for i, ids, values in zip(index.tolist(), labels, logprobs, strict=True):
            found[i] = values[: len(ids)]
    return found


def empty_candidates(rows: Sequence[RowSampling], *, vocab_size: int) -> Candidates | None:
    """Allocate the candidates; None if no row requests them."""
    most = min(max((row.num_candidates for row in rows), default=0), vocab_size)
    if most == 0:
        return None
    shape = (len(rows), most)
    return Candidates(np.zeros(shape, dtype=np.int32), np.full(shape, np.nan, dtype=np.float32))


def prompt_logprobs(
    targets: PromptTargets, logits: Array, ops: SamplingOps = HOST
) -> PositionLogprobs:
    """Log-probabilities of prompt tokens from the model's logits, float32 ``[P, V]``."""
    return top_logprobs(logits, targets.token_ids, targets.num_top, ops)


def top_logprobs(
    logits: Array, targets: NDArray[np.int64], num_top: int, ops: SamplingOps = HOST
) -> PositionLogprobs:
    """Log-probability and rank of one token per row, and the most likely tokens.

    Args:
        logits: float32 ``[N, V]``; not modified.
        targets: ``[N]``, token ids.
        num_top: number of most likely tokens; K is this, or V if that is less.
        ops: operations on the logits.

    Returns:
        Results of the N rows; a rank is 1 more than the number of strictly more likely tokens.
    """
    num_top = min(num_top, logits.shape[1])
    rows = np.arange(len(targets))
    chunks = list(in_chunks(rows, logits.shape[1], ops)) or [rows]
    parts = [ops.top_logprobs(logits, chunk, targets[chunk], num_top) for chunk in chunks]
    return PositionLogprobs(*map(np.concatenate, zip(*parts, strict=True)))
