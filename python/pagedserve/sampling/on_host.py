"""Operations of the sampler in host memory: numpy arrays and the Rust kernels, without torch.

Costs: the largest logits take one read of them: 0.3 ms for 64 rows of 49,152 where torch's ``max``
takes 1.5 and its ``topk`` 2.9 (two cores).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any, Final, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray

from pagedserve._core import cpu
from pagedserve.host_ops.threads import num_compute_threads
from pagedserve.sampling.ops import SamplingOps
from pagedserve.sampling.processors import run_on_array
from pagedserve.sampling.results import PositionLogprobs
from pagedserve.sampling.rows import RowSampling
from pagedserve.sampling_params import LogitsProcessor

# As `SamplingOps.run_processor`.
ProcessorRunner: TypeAlias = Callable[[LogitsProcessor, list[int], NDArray[np.float32]], str | None]

# The Rust kernel keeps the best in order: above this, sorting them costs more than reading logits.
_MAX_RUST_K: Final = 64
# Logits that one thread reads before another has woken up.
_FEW_LOGITS: Final = 65536


class _Logits(TypedDict):
    """Arguments by which the Rust kernels get logits."""

    logits: int
    vocab_size: int
    num_threads: int


class HostOps:
    """`SamplingOps` on numpy arrays."""

    xp: Final = np
    # A few arrays of it (2 MB each) stay in the cache.
    max_elements = 1 << 19

    def __init__(
        self,
        run_processor: ProcessorRunner = run_on_array,
        num_threads: Callable[[], int] = num_compute_threads,
    ) -> None:
        """Store how to run processors, and with how many threads.

        Args:
            run_processor: runs a logits processor on a row of logits.
            num_threads: returns the number of threads of a Rust kernel.
        """
        self._run_processor = run_processor
        self._num_threads = num_threads

    def inference(self) -> AbstractContextManager[object]:
        """See `SamplingOps`."""
        return nullcontext()

    def upload(self, values: NDArray[Any]) -> NDArray[Any]:
        """See `SamplingOps`."""
        return values

    def download(self, values: NDArray[Any]) -> NDArray[Any]:
        """See `SamplingOps`."""
        return values

    def fetch(self, *arrays: NDArray[Any]) -> Callable[[], list[NDArray[Any]]]:
        """See `SamplingOps`."""
        return lambda: list(arrays)

    def copy_rows(self, values: NDArray[Any], index: NDArray[np.int64]) -> NDArray[Any]:
        """See `SamplingOps`."""
        rows: NDArray[Any] = values[index]
        return rows

    def replaced(
        self, values: NDArray[Any], index: NDArray[np.int64], others: NDArray[Any]
    ) -> NDArray[Any]:
        """See `SamplingOps`."""
        copied = values.copy()
        copied[index] = others
        return copied

    def unpack_masks(self, masks: NDArray[np.int32], vocab_size: int) -> NDArray[np.bool_]:
        """See `SamplingOps`."""
        words = masks.view(np.uint8)
        bits = np.unpackbits(words, axis=1, count=vocab_size, bitorder="little")
        return bits.view(np.bool_)

    def argmax(
        self,
        logits: NDArray[np.float32],
        masks: NDArray[np.int32] | None = None,
        rows: NDArray[np.int64] | None = None,
    ) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """See `SamplingOps`."""
        index = None if rows is None else rows.tolist()
        values, ids = self._likeliest(logits, 1, index, masks)
        return values.reshape(-1), ids.reshape(-1).astype(np.int32)

    def draw(
        self,
        logits: NDArray[np.float32],
        rows: Sequence[RowSampling],
        index: NDArray[np.int64],
        peaks: NDArray[np.float32],
        masks: NDArray[np.int32] | None = None,
    ) -> NDArray[np.int32]:
        """See `SamplingOps`."""
        vocab_size = logits.shape[1]
        parameters = [
            (row.temperature, row.top_k_of(vocab_size), row.top_p, row.min_p) for row in rows
        ]
        starts = [0, *accumulate(len(row.uniforms) for row in rows)]
        tokens = np.empty(starts[-1], np.int32)
        logits = np.ascontiguousarray(logits)
        cpu.draw(
            **self._address(logits, len(index) * vocab_size),
            rows=index.tolist(),
            peaks=peaks,
            parameters=np.array(parameters, np.float64).reshape(-1),
            uniforms=np.array([uniform for row in rows for uniform in row.uniforms]),
            starts=starts,
            masks=None if masks is None else masks.reshape(-1),
            tokens=tokens,
        )
        return tokens

    def top_k(
        self, logits: NDArray[np.float32], k: int, rows: Sequence[int] | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """The k largest logits of each row, largest first, of equals the smaller id first.

        Args:
            logits: float32 ``[N, V]``, or more rows than those of ``rows``.
            k: 0 to V.
            rows: N row indices of the logits; None for all.

        Returns:
            The logits and int64 ids, both ``[N, k]``; undefined for rows with NaN.
        """
        if k <= _MAX_RUST_K:
            return self._likeliest(logits, k, rows)
        index = np.arange(len(logits)) if rows is None else np.array(rows, np.int64)
        ids = np.empty((len(index), k), np.int64)
        for place, row in enumerate(index):
            ids[place] = _largest(logits[row], k)
        return logits[index[:, None], ids], ids

    def candidates(
        self, logits: NDArray[np.float32], num: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """See `SamplingOps`."""
        values, ids = self.top_k(logits, num)
        sums, _ = self._log_sums(logits, np.arange(len(logits)), ids[:, 0])
        return ids, values - sums[:, None]

    def top_logprobs(
        self,
        logits: NDArray[np.float32],
        rows: NDArray[np.int64],
        targets: NDArray[np.integer],
        num_top: int,
    ) -> PositionLogprobs:
        """See `SamplingOps`."""
        sums, num_larger = self._log_sums(logits, rows, targets)
        values, ids = self.top_k(logits, num_top, rows.tolist())
        return PositionLogprobs(
            logits[rows, targets] - sums,
            num_larger + np.int32(1),
            ids.astype(np.int32),
            values - sums[:, None],
        )

    def token_logprobs(
        self, logits: NDArray[np.float32], rows: NDArray[np.int64], tokens: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """See `SamplingOps`."""
        sums, _ = self._log_sums(logits, rows, tokens[:, 0])
        logprobs: NDArray[np.float32] = logits[rows[:, None], tokens] - sums[:, None]
        return logprobs

    def run_processor(
        self, processor: LogitsProcessor, token_ids: list[int], logits: NDArray[np.float32]
    ) -> str | None:
        """See `SamplingOps`."""
        return self._run_processor(processor, token_ids, logits)

    def _address(self, logits: NDArray[np.float32], num_read: int) -> _Logits:
        """Arguments of the Rust kernels, valid as long as the logits.

        Args:
            logits: float32 ``[N, V]``, contiguous.
            num_read: number of logits that the kernel reads.
        """
        return {
            "logits": logits.ctypes.data,
            "vocab_size": logits.shape[1],
            "num_threads": 1 if num_read < _FEW_LOGITS else self._num_threads(),
        }

    def _likeliest(
        self,
        logits: NDArray[np.float32],
        k: int,
        rows: Sequence[int] | None = None,
        masks: NDArray[np.int32] | None = None,
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """The Rust kernel, which sorts by insertion: for small k."""
        num_rows = len(logits) if rows is None else len(rows)
        ids, values = np.empty((num_rows, k), np.int64), np.empty((num_rows, k), np.float32)
        if k == 0:
            return values, ids
        num_read = num_rows * logits.shape[1] if masks is None else 32 * np.count_nonzero(masks)
        logits = np.ascontiguousarray(logits)
        cpu.top_k(
            **self._address(logits, int(num_read)),
            num=k,
            ids=ids.reshape(-1),
            values=values.reshape(-1),
            rows=rows,
            masks=None if masks is None else masks.reshape(-1),
        )
        return values, ids

    def _log_sums(
        self,
        logits: NDArray[np.float32],
        rows: NDArray[np.int64],
        targets: NDArray[np.integer],
    ) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """Log-sum-exp of rows, and the number of larger logits than that of a target in each."""
        logits = np.ascontiguousarray(logits)
        sums, num_larger = np.empty(len(rows), np.float32), np.empty(len(rows), np.int32)
        cpu.logprobs(
            **self._address(logits, len(rows) * logits.shape[1]),
            rows=rows.tolist(),
            targets=targets.tolist(),
            sums=sums,
            ranks=num_larger,
        )
        return sums, num_larger


def _largest(row: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Ids of the k largest logits, at least one, as in `HostOps.top_k`."""
    place = len(row) - k
    last = np.partition(row, place)[place]
    # NaN counts as the largest, so that there are always k.
    above = np.flatnonzero(~(row <= last))[:k]
    equal = np.flatnonzero(row == last)[: k - len(above)]
    ids = np.sort(np.concatenate((above, equal)))
    found: NDArray[np.int64] = ids[np.argsort(-row[ids], kind="stable")]
    return found


HOST: Final[SamplingOps] = HostOps()
