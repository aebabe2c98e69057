"""The sampler: from a step's logits to tokens, all rows at once.

The largest logit of every row is computed first: it is the token of plain greedy rows, and shows
whether the logits are usable.  Rows without edits are sampled (`pagedserve.sampling.draw`) from the
original logits, and all of this is copied to the host in one transfer.  Rows that only have a
grammar are among them: it checks their tokens there, and those that it refuses are sampled again
from the allowed ones.  The other rows are copied, a chunk at a time, edited
(`pagedserve.sampling.edits`), and sampled or searched for candidates.  Log-probabilities of
sampled tokens are computed from the original logits afterwards.

Invariants:

1. A row's tokens depend on its logits and parameters, never on other rows.
2. A row that cannot be sampled becomes an entry of `SampledRows.errors`; others are unaffected.
3. Besides the logits, memory is limited to a few chunks (`rows_per_chunk`).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedserve.device import Cuda, to_device
from pagedserve.sampling.chunks import copy_rows, in_chunks, select_rows
from pagedserve.sampling.draw import draw
from pagedserve.sampling.edits import edit_logits
from pagedserve.sampling.grammar import GrammarState, compute_masks
from pagedserve.sampling.logprobs import (
    empty_candidates,
    fill_candidates,
    sampled_logprobs,
)
from pagedserve.sampling.results import SampledRows
from pagedserve.sampling.rows import RowSampling
from pagedserve.sampling.top_k import argmax


class HostCopy:
    """Asynchronous copy of tensors of 4-byte elements to the host, in one transfer.

    Does nothing for tensors in host memory.
    """

    def __init__(self, *tensors: Tensor, cuda: Cuda | None = None) -> None:
        """Queue the copy of tensors, all on one device."""
        self._tensors = tensors
        self._cuda = cuda
        if cuda is not None:
            packed = torch.cat([tensor.flatten().view(torch.int32) for tensor in tensors])
            self._packed = cuda.pinned(*packed.shape, dtype=packed.dtype)
            cuda.copy(packed, self._packed)
            self._arrived = cuda.event()
            self._arrived.record()

    def arrays(self) -> list[NDArray[Any]]:
        """Wait for the copy, and return the tensors as arrays."""
        if self._cuda is None:
            return [tensor.numpy() for tensor in self._tensors]
        self._arrived.synchronize()
        parts = self._packed.split([tensor.numel() for tensor in self._tensors])
        return [
            part.view(tensor.dtype).view(tensor.shape).numpy()
            for part, tensor in zip(parts, self._tensors, strict=True)
        ]


class Sampler:
    """Samples tokens from logits."""

    def __init__(self, cuda: Cuda | None = None) -> None:
        """Store the device of the logits; None for logits in host memory."""
        self._cuda = cuda

    def sample(self, logits: Tensor, rows: Sequence[RowSampling]) -> SampledRows:
        """Sample the rows of a step, and wait for the results; see `launch`."""
        return self.launch(logits, rows).results()

    @torch.inference_mode()
    def launch(self, logits: Tensor, rows: Sequence[RowSampling]) -> "LaunchedSamples":
        """Start to sample the rows of a step.

        Args:
            logits: float32 ``[S, V]``; not modified.
            rows: parameters of the S rows.
        """
        return LaunchedSamples(logits, rows, self._cuda)


class LaunchedSamples:
    """Samples of a step, some of them still on the device."""

    def __init__(
        self, logits: Tensor, rows: Sequence[RowSampling], cuda: Cuda | None = None
    ) -> None:
        """Compute what does not depend on edits; see `Sampler.launch`."""
        peaks, ids = argmax(logits)
        self._logits, self._rows, self._cuda = logits, rows, cuda
        tried = ((i, row.tried_grammar) for i, row in enumerate(rows))
        self._tried = {i: grammar for i, grammar in tried if grammar is not None}
        self._edited = [i for i, row in enumerate(rows) if i not in self._tried and row.is_edited]
        self._random = [i for i, row in enumerate(rows) if row.is_drawn_as_is]
        self._greedy = ids.int()
        self._drawn = self._greedy[:0]
        if self._random:
            index = np.array(self._random)
            random, largest = [rows[i] for i in index], select_rows(peaks, index, cuda)
            self._drawn = draw(logits, random, index, largest, cuda=cuda)
        self._arriving = HostCopy(self._greedy, peaks, self._drawn, cuda=cuda)

    @property
    def is_async_safe(self) -> bool:
        """Whether the step needs one token per row only, and all are computed."""
        return all(row.is_async_safe for row in self._rows)

    def tokens(self) -> Tensor:
        """Tokens of a step with one sample per row, int32 ``[S]``, on its device.

        They are ids below V, including undefined ones.
        """
        if not self._random:
            return self._greedy
        drawn = self._drawn.clamp(max=self._logits.shape[1] - 1)
        index = to_device(torch.tensor(self._random), self._cuda)
        return self._greedy.index_copy(0, index, drawn)

    @torch.inference_mode()
    def results(self) -> SampledRows:
        """Wait for the copy, and do the remaining work; the logits must still be valid.

        Raises:
            IndexError: A token id of an edit is not below V.
        """
        logits, rows = self._logits, self._rows
        found, largest, drawn = self._arriving.arrays()
        step = _Collector(rows, found, logits.shape[1], self._cuda)
        if self._random:
            step.put(np.array(self._random), drawn)
        step.errors.update(_unusable(largest, "the logits"))
        for index in in_chunks(step.refused(self._tried) if self._tried else [], logits):
            step.sample_again(index, logits, [self._tried[i] for i in index])
        for index in in_chunks([i for i in self._edited if i not in step.errors], logits):
            step.edit_and_sample(index, copy_rows(logits, index, self._cuda))
        usable = [(i, row) for i, row in enumerate(rows) if i not in step.errors]
        searched = [i for i, row in usable if row.num_candidates and not row.is_edited]
        for index in in_chunks(searched, logits):
            step.search(index, select_rows(logits, index, self._cuda))
        return step.finish(logits)


class _Collector:
    """Collects the results of one step."""

    def __init__(
        self,
        rows: Sequence[RowSampling],
        greedy: NDArray[np.int32],
        vocab_size: int,
        cuda: Cuda | None,
    ) -> None:
        self._cuda = cuda
        num_draws = [row.num_draws for row in rows]
        self._rows = rows
        self._draw_start = np.cumsum([0, *num_draws], dtype=np.int64)
        self._row_of_draw = np.repeat(np.arange(len(rows)), num_draws)
        self._tokens = greedy[self._row_of_draw]
        self._candidates = empty_candidates(rows, vocab_size=vocab_size)
        self.errors: dict[int, str] = {}

    def edit_and_sample(self, index: NDArray[np.int64], logits: Tensor) -> None:
        """Edit and sample the rows `index`, whose logits are a copy, one chunk."""
        rows = [self._rows[i] for i in index]
        failed = edit_logits(logits, rows)
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
        self, index: NDArray[np.int64], logits: Tensor, grammars: Sequence[GrammarState]
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
        self, index: NDArray[np.int64], logits: Tensor, masks: NDArray[np.int32]
    ) -> None:
        """Take the most likely allowed token, for the rows `index`."""
        packed = to_device(torch.from_numpy(masks), self._cuda)
        peaks, ids = argmax(logits, packed, index.tolist())
        self._note_unusable(index, peaks)
        self.put(index, ids.cpu().numpy())

    def _draw_allowed(
        self, index: NDArray[np.int64], logits: Tensor, masks: NDArray[np.int32]
    ) -> None:
        """Sample from the tokens of their masks, for the rows `index`."""
        packed = to_device(torch.from_numpy(masks), self._cuda)
        peaks, _ = argmax(logits, packed, index.tolist())
        self._note_unusable(index, peaks)
        rows = [self._rows[i].again() for i in index]
        tokens = draw(logits, rows, index, peaks, packed, cuda=self._cuda)
        self.put(index, tokens.cpu().numpy())

    def _note_unusable(self, index: NDArray[np.int64], peaks: Tensor) -> None:
        """Set errors of rows whose largest logits show that they cannot be sampled."""
        for n, why in _unusable(peaks.cpu().numpy(), "the edited logits").items():
            self.errors.setdefault(int(index[n]), why)

    def _sample(
        self, index: NDArray[np.int64], logits: Tensor, rows: Sequence[RowSampling]
    ) -> None:
        """Sample the rows `index`, except those that failed."""
        peaks, ids = argmax(logits)
        self._note_unusable(index, peaks)
        usable = [(n, row) for n, row in enumerate(rows) if index[n] not in self.errors]
        searched = np.array([n for n, row in usable if row.num_candidates], dtype=np.int64)
        drawn = np.array([n for n, row in usable if row.num_draws], dtype=np.int64)
        is_greedy = np.array([rows[n].is_greedy for n in drawn], dtype=np.bool_)
        greedy, random = drawn[is_greedy], drawn[~is_greedy]
        if searched.size:
            self.search(index[searched], select_rows(logits, searched, self._cuda))
        if greedy.size:
            self.put(index[greedy], copy_rows(ids, greedy, self._cuda).cpu().numpy())
        if random.size:
            wanted, largest = [rows[n] for n in random], select_rows(peaks, random, self._cuda)
            tokens = draw(logits, wanted, random, largest, cuda=self._cuda)
            self.put(index[random], tokens.cpu().numpy())

    def search(self, index: NDArray[np.int64], logits: Tensor) -> None:
        """Find the candidates of the rows `index`, one chunk."""
        if self._candidates is not None:
            fill_candidates(self._candidates, index, logits)

    def put(self, index: NDArray[np.int64], tokens: NDArray[np.integer]) -> None:
        """Set all samples of the rows, which are in ascending order."""
        is_one_each = len(tokens) == len(index)
        places = self._draw_start[index] if is_one_each else np.isin(self._row_of_draw, index)
        self._tokens[places] = tokens

    def finish(self, logits: Tensor) -> SampledRows:
        """Compute requested log-probabilities."""
        self._tokens[np.isin(self._row_of_draw, list(self.errors))] = 0
        logprobs = sampled_logprobs(
            logits, self._rows, tokens=self._tokens, row_of_draw=self._row_of_draw
        )
        return SampledRows(self._tokens, self._draw_start, logprobs, self._candidates, self.errors)


def _unusable(largest: NDArray[np.float32], what: str) -> dict[int, str]:
    """Errors of rows that cannot be sampled, from their largest logits [N]."""
    errors = {}
    for row in np.flatnonzero(~np.isfinite(largest)).tolist():
        if np.isneginf(largest[row]):
            errors[row] = f"no token is left to sample: {what} are all -inf"
        else:
            errors[row] = f"{what} hold {'NaN' if np.isnan(largest[row]) else 'infinity'}"
    return errors
