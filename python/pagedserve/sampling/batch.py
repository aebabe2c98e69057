"""The sampling parameters of one step's rows, as given and as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedserve.sampling.rows import RowSampling


@dataclass(frozen=True, slots=True)
class RandomRows:
    """Parameters of rows that are drawn at random, ``[N]`` each.

    Attributes:
        temperature: float64, above 0.
        top_k: int64, 1 to V.
        top_p: float64, above 0.
        min_p: float64.
        uniforms: float64 ``[N, U]``, U the most draws of a row; 0 past a row's own.
        num_draws: int64, 0 to U.
        has_tops: whether any row may have a top_k or top_p that drops tokens.
        draws_alike: whether every row draws U tokens.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniforms: Tensor
    num_draws: Tensor
    has_tops: bool
    draws_alike: bool

    @classmethod
    def of(
        cls, rows: Sequence[RowSampling], *, vocab_size: int, device: torch.device
    ) -> "RandomRows":
        """Turn the parameters of random rows, at least one, into arrays."""
        top_k = [row.top_k if 0 < row.top_k < vocab_size else vocab_size for row in rows]
        num_draws = [len(row.uniforms) for row in rows]
        width = max(num_draws)
        parameters = [
            (row.temperature, k, row.top_p, row.min_p, n, *row.uniforms, *(0.0,) * (width - n))
            for row, k, n in zip(rows, top_k, num_draws, strict=True)
        ]
        # Whole numbers are exact in float64, so one copy takes everything to the device.
        columns = to_device(torch.tensor(parameters, dtype=torch.float64), device).T
        return cls(
            temperature=columns[0],
            top_k=columns[1].long(),
            top_p=columns[2],
            min_p=columns[3],
            uniforms=columns[5:].T.contiguous(),
            num_draws=columns[4].long(),
            has_tops=any(row.top_p < 1 for row in rows) or min(top_k) < vocab_size,
            draws_alike=min(num_draws) == width,
        )

    def __len__(self) -> int:
        """Number of rows."""
        return self.temperature.shape[0]

    def pick(self, index: Tensor) -> "RandomRows":
        """Some of the rows."""
        return RandomRows(
            self.temperature[index],
            self.top_k[index],
            self.top_p[index],
            self.min_p[index],
            self.uniforms[index],
            self.num_draws[index],
            self.has_tops,
            self.draws_alike,
        )


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on a device, without waiting for what the device still does."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """Tensors of 4-byte elements on their way to the host, in one transfer.

    On the CPU they are there.
    """

    def __init__(self, *tensors: Tensor) -> None:
        """Send the tensors, all of one device, behind what the device still does."""
        self._tensors = tensors
        if tensors[0].device.type == "cuda":
            packed = torch.cat([tensor.flatten().view(torch.int32) for tensor in tensors])
            self._packed = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._packed.copy_(packed, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def arrays(self) -> list[NDArray[Any]]:
        """The tensors in host memory, once they are there."""
        if self._tensors[0].device.type == "cpu":
            return [tensor.numpy() for tensor in self._tensors]
        self._arrived.synchronize()
        parts = self._packed.split([tensor.numel() for tensor in self._tensors])
        return [
            part.view(tensor.dtype).view(tensor.shape).numpy()
            for part, tensor in zip(parts, self._tensors, strict=True)
        ]
