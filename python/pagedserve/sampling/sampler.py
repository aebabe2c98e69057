"""Turns a step's logits into tokens, all rows at once, each as its request wants it.

The largest logit of every row is found first: it is the token of plain greedy rows, and tells
whether the logits are usable.  Rows with edits are copied, a chunk at a time, and edited
(`pagedserve.sampling.edits`).  Then rows are drawn from (`pagedserve.sampling.draw`) or searched
for candidates.  What is reported about drawn tokens is looked up in the untouched logits.

Invariants:

1. A row's tokens depend on its logits and parameters, never on other rows.
2. A row that cannot be sampled becomes an entry of `SampledRows.errors`; the others do not notice.
3. Beyond the logits no more than a few chunks of memory are used (`rows_per_chunk`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedserve.sampling.batch import RandomRows, RowSampling
from pagedserve.sampling.draw import draw
from pagedserve.sampling.edits import edit_logits
from pagedserve.sampling.likeliest import likeliest
from pagedserve.sampling.logprobs import Candidates, SampledLogprobs, rows_per_chunk


@dataclass(frozen=True, slots=True)
class SampledRows:
    """What a step's S rows gave; D is the number of tokens drawn.

    Attributes:
        tokens: int32 ``[D]``, row by row; rows with candidates draw none.
        draw_start: int64 ``[S + 1]``; row i drew ``tokens[draw_start[i]:draw_start[i + 1]]``.
        logprobs: of the drawn tokens; None if no row asked.
        candidates: None if no row asked.
        errors: why rows could not be sampled, in one line.  Their tokens are 0 and mean nothing.
    """

    tokens: NDArray[np.int32]
    draw_start: NDArray[np.int64]
    logprobs: SampledLogprobs | None
    candidates: Candidates | None
    errors: dict[int, str]

    @classmethod
    def none(cls) -> "SampledRows":
        """Of a step that samples nothing."""
        return cls(np.zeros(0, np.int32), np.zeros(1, np.int64), None, None, {})


class Sampler:
    """Logits to tokens."""

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[RowSampling]) -> SampledRows:
        """Sample the rows of a step.

        Args:
            logits: float32 ``[S, V]``; not changed.
            rows: S parameters.

        Raises:
            IndexError: An edit names a token id that is not below V.
        """
        peaks, ids = likeliest(logits, 1)
        step = _Step(rows, ids[:, 0], logits.shape[1])
        step.errors.update(_unusable(peaks[:, 0], "the logits"))
        busy = [i for i, row in enumerate(rows) if not row.is_plain and i not in step.errors]
        edited = np.array([i for i in busy if rows[i].edits is not None], dtype=np.int64)
        others = np.array([i for i in busy if rows[i].edits is None], dtype=np.int64)
        size = rows_per_chunk(logits)
        for start in range(0, len(edited), size):
            index = edited[start : start + size]
            step.edit_and_sample(index, _copy(logits, index))
        for start in range(0, len(others), size):
            index = others[start : start + size]
            step.sample(index, _rows(logits, index))
        return step.finish(logits)


class _Step:
    """The results of one step while they are collected."""

    def __init__(self, rows: Sequence[RowSampling], greedy: Tensor, vocab_size: int) -> None:
        num_draws = [row.num_draws for row in rows]
        self._rows = rows
        self._draw_start = np.cumsum([0, *num_draws], dtype=np.int64)
        self._row_of_draw = np.repeat(np.arange(len(rows)), num_draws)
        self._tokens = greedy.int().cpu().numpy()[self._row_of_draw]
        self._candidates = Candidates.of(rows, vocab_size=vocab_size)
        self.errors: dict[int, str] = {}

    def edit_and_sample(self, index: NDArray[np.int64], logits: Tensor) -> None:
        """Edit and sample the rows `index`, whose logits are a copy, one chunk."""
        failed = edit_logits(logits, [self._rows[i].edits for i in index])
        peaks, ids = likeliest(logits, 1)
        failed = _unusable(peaks[:, 0], "the edited logits") | failed
        self.errors.update({int(index[n]): why for n, why in failed.items()})
        usable = np.array([n for n in range(len(index)) if n not in failed], dtype=np.int64)
        is_greedy = np.array([self._is_greedy(index[n]) for n in usable], dtype=np.bool_)
        greedy, others = usable[is_greedy], usable[~is_greedy]
        if greedy.size:
            self._put(index[greedy], _copy(ids[:, 0], greedy))
        if others.size:
            self.sample(index[others], _rows(logits, others))

    def _is_greedy(self, row: int) -> bool:
        return self._rows[row].is_greedy and not self._rows[row].num_candidates

    def sample(self, index: NDArray[np.int64], logits: Tensor) -> None:
        """Draw at random, or search for candidates, in the rows `index`, one chunk."""
        is_searched = np.array([self._rows[i].num_candidates > 0 for i in index], dtype=np.bool_)
        searched, random = is_searched.nonzero()[0], (~is_searched).nonzero()[0]
        if self._candidates and searched.size:
            self._candidates.fill(index[searched], _rows(logits, searched))
        if random.size:
            parameters = RandomRows.of(
                [self._rows[i] for i in index[random]],
                vocab_size=logits.shape[1],
                device=logits.device,
            )
            self._put(index[random], draw(_rows(logits, random), parameters))

    def _put(self, index: NDArray[np.int64], tokens: Tensor) -> None:
        """Set all draws of the rows, which are in ascending order."""
        self._tokens[np.isin(self._row_of_draw, index)] = tokens.cpu().numpy()

    def finish(self, logits: Tensor) -> SampledRows:
        """Look up what is reported."""
        self._tokens[np.isin(self._row_of_draw, list(self.errors))] = 0
        logprobs = SampledLogprobs.of(
            logits, self._rows, tokens=self._tokens, row_of_draw=self._row_of_draw
        )
        return SampledRows(self._tokens, self._draw_start, logprobs, self._candidates, self.errors)


def _rows(logits: Tensor, index: NDArray[np.int64]) -> Tensor:
    """Rows in ascending order: a view where they lie side by side."""
    first, last = int(index[0]), int(index[-1])
    return logits[first : last + 1] if last - first + 1 == len(index) else _copy(logits, index)


def _copy(values: Tensor, index: NDArray[np.int64]) -> Tensor:
    return values.index_select(0, torch.from_numpy(index).to(values.device))


def _unusable(peaks: Tensor, what: str) -> dict[int, str]:
    """Why rows with these largest logits [N] cannot be sampled; without those that can."""
    largest = peaks.cpu().numpy()
    errors = {}
    for row in np.flatnonzero(~np.isfinite(largest)).tolist():
        if np.isneginf(largest[row]):
            errors[row] = f"no token is left to sample: {what} are all -inf"
        else:
            errors[row] = f"{what} hold {'NaN' if np.isnan(largest[row]) else 'infinity'}"
    return errors
