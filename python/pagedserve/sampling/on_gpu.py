"""Operations of the sampler on a GPU, with torch.

Costs: the most likely tokens are a ``topk`` and a few small operations, and masked logits a kernel.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedserve.device import Cuda
from pagedserve.sampling.gpu_draw import RandomRows, draw_on_device
from pagedserve.sampling.ops import in_chunks, select_rows
from pagedserve.sampling.processors import run_on_tensor
from pagedserve.sampling.results import PositionLogprobs
from pagedserve.sampling.rows import RowSampling
from pagedserve.sampling_params import LogitsProcessor


class GpuOps:
    """`SamplingOps` on tensors of a GPU."""

    xp: Final = torch
    # Fewer, larger operations are faster than on a CPU.
    max_elements = 1 << 22

    def __init__(self, cuda: Cuda) -> None:
        """Store the device of the logits."""
        self._cuda = cuda

    def inference(self) -> AbstractContextManager[object]:
        """See `SamplingOps`."""
        return torch.inference_mode()

    def upload(self, values: NDArray[Any]) -> Tensor:
        """See `SamplingOps`; does not block the host."""
        return self._cuda.to_device(torch.from_numpy(values))

    def download(self, values: Tensor) -> NDArray[Any]:
        """See `SamplingOps`."""
        found: NDArray[Any] = values.cpu().numpy()
        return found

    def fetch(self, *arrays: Tensor) -> Callable[[], list[NDArray[Any]]]:
        """See `SamplingOps`."""
        packed = torch.cat([tensor.flatten().view(torch.int32) for tensor in arrays])
        pinned = self._cuda.pinned(*packed.shape, dtype=packed.dtype)
        self._cuda.copy(packed, pinned)
        arrived = self._cuda.event()
        arrived.record()

        def wait() -> list[NDArray[Any]]:
            arrived.synchronize()
            parts = pinned.split([tensor.numel() for tensor in arrays])
            return [
                part.view(tensor.dtype).view(tensor.shape).numpy()
                for part, tensor in zip(parts, arrays, strict=True)
            ]

        return wait

    def copy_rows(self, values: Tensor, index: NDArray[np.int64]) -> Tensor:
        """See `SamplingOps`."""
        return values.index_select(0, self.upload(index))

    def replaced(self, values: Tensor, index: NDArray[np.int64], others: Tensor) -> Tensor:
        """See `SamplingOps`."""
        return values.index_copy(0, self.upload(index), others)

    def unpack_masks(self, masks: Tensor, vocab_size: int) -> Tensor:
        """See `SamplingOps`."""
        return unpack_masks(masks, vocab_size)

    def argmax(
        self,
        logits: Tensor,
        masks: Tensor | None = None,
        rows: NDArray[np.int64] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `SamplingOps`."""
        if rows is not None:
            logits = logits[rows.tolist()]
        if masks is None:
            largest, ids = logits.max(dim=-1)
        else:
            from pagedserve.kernels.masks import masked_argmax  # needs triton

            largest, ids = masked_argmax(logits, masks)
        return largest, ids.int()

    def draw(
        self,
        logits: Tensor,
        rows: Sequence[RowSampling],
        index: NDArray[np.int64],
        peaks: Tensor,
        masks: Tensor | None = None,
    ) -> Tensor:
        """See `SamplingOps`."""
        vocab_size = logits.shape[1]
        parts = []
        for chunk in in_chunks(np.arange(len(index)), vocab_size, self):
            some = [rows[i] for i in chunk]
            parameters = RandomRows.of(some, vocab_size=vocab_size, cuda=self._cuda)
            is_allowed = None
            if masks is not None:
                is_allowed = unpack_masks(select_rows(masks, chunk, self), vocab_size)
            wanted = select_rows(logits, index[chunk], self)
            largest = select_rows(peaks, chunk, self)
            parts.append(draw_on_device(wanted, parameters, largest, is_allowed))
        return torch.cat(parts).clamp_(max=vocab_size - 1).int()

    def candidates(
        self, logits: Tensor, num: int
    ) -> tuple[NDArray[np.integer], NDArray[np.float32]]:
        """See `SamplingOps`."""
        _, ids = top_k(logits, num)
        values = logits.log_softmax(dim=-1).gather(1, ids)
        return self.download(ids), self.download(values)

    def top_logprobs(
        self,
        logits: Tensor,
        rows: NDArray[np.int64],
        targets: NDArray[np.integer],
        num_top: int,
    ) -> PositionLogprobs:
        """See `SamplingOps`."""
        chunk = self.copy_rows(logits, rows)
        total = chunk.logsumexp(dim=-1, keepdim=True)
        value = chunk.gather(1, self.upload(targets.astype(np.int64))[:, None])
        ranks = 1 + (chunk > value).sum(dim=-1)
        top_values, top_ids = top_k(chunk, num_top)
        found = ((value - total)[:, 0], ranks.int(), top_ids.int(), top_values - total)
        return PositionLogprobs(*map(self.download, found))

    def token_logprobs(
        self, logits: Tensor, rows: NDArray[np.int64], tokens: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """See `SamplingOps`."""
        chunk = self.copy_rows(logits, rows)
        total = chunk.logsumexp(dim=-1, keepdim=True)
        return self.download(chunk.gather(1, self.upload(tokens)) - total)

    def run_processor(
        self, processor: LogitsProcessor, token_ids: list[int], logits: Tensor
    ) -> str | None:
        """See `SamplingOps`."""
        return run_on_tensor(processor, token_ids, logits)


def unpack_masks(masks: Tensor, vocab_size: int) -> Tensor:
    """Unpack packed masks of allowed tokens to bool ``[N, V]``; see `SamplingOps`."""
    places = torch.arange(8, dtype=torch.uint8, device=masks.device)
    is_set = (masks.view(torch.uint8)[:, :, None] >> places & 1).bool()
    return is_set.view(len(masks), -1)[:, :vocab_size]


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits of each row, largest first, of equals the smaller id first.

    Args:
        logits: float32 ``[N, V]``.
        k: 0 to V.

    Returns:
        The logits and int64 ids, both ``[N, k]``; undefined for rows with NaN.
    """
    vocab_size = logits.shape[1]
    values, ids = logits.topk(min(k + 1, vocab_size), dim=-1)
    # topk chooses any of equals: if the next one equals the last, choose again.
    if 0 < k < vocab_size:
        tied = (values[:, k - 1] == values[:, k]).nonzero()[:, 0]
        if tied.numel():
            last = values[tied, k - 1 : k]
            ids[tied, :k] = _first_of_equals(logits[tied], last, k)
    ids = ids[:, :k].sort(dim=-1).values
    values = logits.gather(1, ids)
    order = values.argsort(dim=-1, descending=True, stable=True)
    return values.gather(1, order), ids.gather(1, order)


def _first_of_equals(logits: Tensor, last: Tensor, k: int) -> Tensor:
    """Ids of all logits above `last` [N, 1] and of the first that equal it, int64 [N, k]."""
    # Exact: vocabularies are far smaller than 2 ** 24.
    first = -torch.arange(logits.shape[1], dtype=torch.float32, device=logits.device)
    preference = torch.where(logits > last, 1.0, -torch.inf)
    return torch.where(logits == last, first, preference).topk(k, dim=-1).indices
