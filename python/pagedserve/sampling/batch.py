"""The sampling parameters of one step's rows, as given and as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedserve.device import Cuda
from pagedserve.sampling.rows import RowSampling

# Likeliest tokens that top_k and top_p look at, first and second; rows that need more are sorted
# whole, which costs several times the rest of a draw.
NUM_LIKELIEST = (256, 4096)


@dataclass(frozen=True, slots=True)
class RandomRows:
    """Parameters of rows that are drawn at random, ``[N]`` each; U is the most draws of a row.

    What the host can know of the rows it says here, so that nothing asks the device.

    Attributes:
        temperature: float64, above 0.
        top_k: int64, 1 to V.
        top_p: float64, above 0.
        min_p: float64.
        uniforms: float64 ``[N, U]``; 0 past a row's own.
        draws: int64 ``[D]``, the places in ``[N, U]`` that are drawn, row by row; None for all.
        with_top_k: numbers of likeliest tokens that hold the top_k of some rows, and those rows,
            int64.
        with_top_p: int64, the rows that have a top_p alone; None if there are none.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniforms: Tensor
    draws: Tensor | None
    with_top_k: list[tuple[int, Tensor]]
    with_top_p: Tensor | None

    @classmethod
    def of(
        cls, rows: Sequence[RowSampling], *, vocab_size: int, cuda: Cuda | None = None
    ) -> "RandomRows":
        """Turn the parameters of random rows, at least one, into arrays."""
        top_k = [row.top_k if 0 < row.top_k < vocab_size else vocab_size for row in rows]
        num_draws = [len(row.uniforms) for row in rows]
        width = max(num_draws)
        parameters = [
            (row.temperature, k, row.top_p, row.min_p, *row.uniforms, *(0.0,) * (width - n))
            for row, k, n in zip(rows, top_k, num_draws, strict=True)
        ]
        # Whole numbers are exact in float64, so one copy takes everything to the device.
        columns = to_device(torch.tensor(parameters, dtype=torch.float64), cuda).T
        by_size: dict[int, list[int]] = {}
        for row, k in enumerate(top_k):
            if k < vocab_size:
                size = next(size for size in (*NUM_LIKELIEST, vocab_size) if size >= k)
                by_size.setdefault(min(size, vocab_size), []).append(row)
        alone = [n for n, row in enumerate(rows) if row.top_p < 1 and top_k[n] == vocab_size]
        draws = [row * width + draw for row, n in enumerate(num_draws) for draw in range(n)]
        return cls(
            temperature=columns[0],
            top_k=columns[1].long(),
            top_p=columns[2],
            min_p=columns[3],
            uniforms=columns[4:].T.contiguous(),
            draws=_index(draws, cuda) if len(draws) < width * len(rows) else None,
            with_top_k=[(size, _index(found, cuda)) for size, found in sorted(by_size.items())],
            with_top_p=_index(alone, cuda) if alone else None,
        )

    def __len__(self) -> int:
        """Number of rows."""
        return self.temperature.shape[0]


def _index(places: Sequence[int], cuda: Cuda | None) -> Tensor:
    return to_device(torch.tensor(places), cuda)


def to_device(host: Tensor, cuda: Cuda | None) -> Tensor:
    """A host tensor where the logits are, without waiting for what the device still does."""
    return host if cuda is None else cuda.to_device(host)


class HostCopy:
    """Tensors of 4-byte elements on their way to the host, in one transfer.

    In host memory they are there.
    """

    def __init__(self, *tensors: Tensor, cuda: Cuda | None = None) -> None:
        """Send the tensors, all of one device, behind what the device still does."""
        self._tensors = tensors
        self._cuda = cuda
        if cuda is not None:
            packed = torch.cat([tensor.flatten().view(torch.int32) for tensor in tensors])
            self._packed = cuda.pinned(*packed.shape, dtype=packed.dtype)
            cuda.copy(packed, self._packed)
            self._arrived = cuda.event()
            self._arrived.record()

    def arrays(self) -> list[NDArray[Any]]:
        """The tensors in host memory, once they are there."""
        if self._cuda is None:
            return [tensor.numpy() for tensor in self._tensors]
        self._arrived.synchronize()
        parts = self._packed.split([tensor.numel() for tensor in self._tensors])
        return [
            part.view(tensor.dtype).view(tensor.shape).numpy()
            for part, tensor in zip(parts, self._tensors, strict=True)
        ]
