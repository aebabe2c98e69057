"""Operations of the sampler on arrays: in host memory or on a GPU.

`pagedserve.sampling.on_host` implements them with numpy and the Rust kernels, and
`pagedserve.sampling.on_gpu` with torch.  All else of the sampler is written once, over these.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pagedserve.sampling.results import PositionLogprobs
    from pagedserve.sampling.rows import RowSampling
    from pagedserve.sampling_params import LogitsProcessor

# A numpy array in host memory, a tensor on a GPU.
Array: TypeAlias = Any


class SamplingOps(Protocol):
    """Operations on arrays of one memory.

    Logits are float32 ``[N, V]``.  Packed masks are int32 ``[N, ceil(V / 32)]``, as in
    `pagedserve.sampling.grammar.compute_masks`.
    """

    @property
    def xp(self) -> Any:
        """Module of the arrays, numpy or torch, for functions with the same name in both."""

    @property
    def max_elements(self) -> int:
        """Maximum elements of an intermediate array; see `in_chunks`."""

    def inference(self) -> AbstractContextManager[object]:
        """Context of all work on the arrays."""

    def upload(self, values: NDArray[np.generic]) -> Array:
        """Copy an array of the host to the memory of the logits; host memory is not copied."""

    def download(self, values: Array) -> NDArray[Any]:
        """Wait for an array and return it in host memory."""

    def fetch(self, *arrays: Array) -> Callable[[], list[NDArray[Any]]]:
        """Start to copy arrays of 4-byte elements to the host, in one transfer.

        Returns:
            Function that waits for them and returns them.
        """

    def copy_rows(self, values: Array, index: NDArray[np.int64]) -> Array:
        """Copy rows."""

    def replaced(self, values: Array, index: NDArray[np.int64], others: Array) -> Array:
        """Copy of an array in which those at ``index`` are replaced by others."""

    def unpack_masks(self, masks: Array, vocab_size: int) -> Array:
        """Unpack masks to bool ``[N, V]``: the allowed tokens."""

    def argmax(
        self, logits: Array, masks: Array | None = None, rows: NDArray[np.int64] | None = None
    ) -> tuple[Array, Array]:
        """Largest logit of each row and its int32 id, ``[N]`` each; of equals the smaller id.

        Args:
            logits: not modified; more rows than N if ``rows`` are given.
            masks: packed masks of the N rows; None allows all.  The logit is minus infinity if
                none is allowed.
            rows: N row indices of the logits; None for all.

        Returns:
            For a row with NaN the logit is NaN, and the id undefined.
        """

    def draw(
        self,
        logits: Array,
        rows: "Sequence[RowSampling]",
        index: NDArray[np.int64],
        peaks: Array,
        masks: Array | None = None,
    ) -> Array:
        """Sample tokens for N rows, at least one.

        A row is filtered by thresholds: temperature, then top_k, top_p (of what top_k kept), min_p.
        Tokens equal to a threshold are all kept.  A sample inverts the cumulative distribution of
        the kept tokens in the order of their ids, in float64, so that

        1. it does not depend on other rows: the sums that decide are running sums along a row,
           which round equally in any batch;
        2. tiny differences of logits change it only at the edges of its interval: intervals are in
           the order of ids, not of probabilities, which nearly equal tokens swap.

        Args:
            logits: edited; not modified.
            rows: parameters of the N rows.
            index: their rows of the logits, in ascending order.
            peaks: float32 ``[N]``, the largest allowed logit of each.
            masks: packed masks of the N rows, for rows without top_k and top_p; None allows all.

        Returns:
            int32 ``[D]`` token ids below V, row by row; undefined for rows whose peak is not
            finite.
        """

    def candidates(
        self, logits: Array, num: int
    ) -> tuple[NDArray[np.integer], NDArray[np.float32]]:
        """Most likely tokens of each row and their log-probabilities, ``[N, num]`` each.

        The most likely comes first, of equals the smaller id.
        """

    def top_logprobs(
        self,
        logits: Array,
        rows: NDArray[np.int64],
        targets: NDArray[np.integer],
        num_top: int,
    ) -> "PositionLogprobs":
        """Log-probabilities of one token in each of N rows, and of the most likely ones.

        A log-probability is a logit minus the log-sum-exp of its row, computed without an array of
        all of them.

        Args:
            logits: not modified.
            rows: ``[N]``, row indices of the logits; one chunk.
            targets: ``[N]``, token ids.
            num_top: number of most likely tokens, V at most.
        """

    def token_logprobs(
        self, logits: Array, rows: NDArray[np.int64], tokens: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Log-probabilities of K tokens in each of N rows, ``[N, K]``; see `top_logprobs`.

        Args:
            logits: not modified.
            rows: ``[N]``, row indices of the logits; one chunk.
            tokens: ``[N, K]``, token ids; K is at least 1.
        """

    def run_processor(
        self, processor: "LogitsProcessor", token_ids: list[int], logits: Array
    ) -> str | None:
        """Replace a row of logits ``[V]`` by the result of a logits processor.

        Returns:
            What is wrong with the result; None if it is valid.

        Raises:
            Exception: anything that the processor raises.
        """


def in_chunks(
    rows: Sequence[int] | NDArray[np.int64], vocab_size: int, ops: SamplingOps
) -> Iterator[NDArray[np.int64]]:
    """Split row indices into chunks of at most ``ops.max_elements`` logits."""
    size = max(1, ops.max_elements // vocab_size)
    for start in range(0, len(rows), size):
        yield np.asarray(rows[start : start + size])


def select_rows(values: Array, index: NDArray[np.int64], ops: SamplingOps) -> Array:
    """Select rows in ascending order: a view if they are contiguous."""
    first, last = int(index[0]), int(index[-1])
    if last - first + 1 == len(index):
        return values[first : last + 1]
    return ops.copy_rows(values, index)
