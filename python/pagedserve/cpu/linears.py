"""Linear layers whose weights are packed once, the way the CPU's kernels read them.

torch's own linear layer has the weights rearranged in every call; with few rows, as in decoding,
that costs more than the product.  The packed copy takes the place of the original.
"""

from typing import Final, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from pagedserve import _core
from pagedserve.attention.cpu import DTYPE_NAMES
from pagedserve.cpu.memory import empty_in_huge_pages

PANEL_FEATURES: Final = 64  # of rust/cpu/src/linear.rs

Gate = Literal["silu", "gelu_tanh"]


def can_pack(weight: Tensor) -> bool:
    """Whether the kernels multiply with such weights ``[N, K]``."""
    per_unit = 4 // weight.element_size()
    return (
        weight.device.type == "cpu"
        and weight.dtype in DTYPE_NAMES
        and weight.dim() == 2  # noqa: PLR2004  # a matrix
        and weight.shape[1] % per_unit == 0
        and weight.numel() > 0
    )


def pack(
    weight: Tensor, bias: Tensor | None = None, gate: Gate | None = None
) -> _core.PackedWeights:
    """Pack the weights ``[N, K]`` and bias ``[N]`` of a linear layer.

    Args:
        weight: of a dtype that `can_pack`; it is copied.
        bias: of any dtype.
        gate: makes a gated layer: the first 32 features of each 64, activated, times the others.
    """
    num_features, depth = weight.shape
    padding = -num_features % PANEL_FEATURES
    units = functional.pad(weight.detach(), (0, 0, 0, padding)).contiguous().view(torch.int32)
    rows = units.view(-1, PANEL_FEATURES, units.shape[1])
    panels = empty_in_huge_pages(len(rows), units.shape[1], PANEL_FEATURES, dtype=torch.int32)
    panels.copy_(rows.transpose(1, 2))
    return _core.PackedWeights(
        panels.numpy().reshape(-1).view(np.uint32),
        dtype=DTYPE_NAMES[weight.dtype],
        in_features=depth,
        out_features=num_features,
        bias=None if bias is None else numbers(bias),
        gate=gate,
    )


def pack_gated(gate: Tensor, up: Tensor, activation: Gate) -> _core.PackedWeights:
    """Pack two weights ``[N, K]``, N a multiple of 32, into one gated layer."""
    half = PANEL_FEATURES // 2
    pairs = torch.stack((gate.view(-1, half, gate.shape[1]), up.view(-1, half, up.shape[1])), dim=1)
    return pack(pairs.view(-1, gate.shape[1]), gate=activation)


def numbers(tensor: Tensor) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """A copy of a vector in float32: a view would keep the file of all weights in memory."""
    return tensor.detach().float().contiguous().numpy().copy()


def multiply(x: Tensor, weights: _core.PackedWeights, output: Tensor) -> Tensor:
    """Rows ``[T, K]`` times packed weights into ``[T, N]``, whose dtype may be another."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    weights.multiply(
        num_rows=x.shape[0],
        x=x.data_ptr(),
        x_stride=x.stride(0),
        output=output.data_ptr(),
        output_stride=output.stride(0),
        output_dtype=DTYPE_NAMES[output.dtype],
        num_threads=torch.get_num_threads(),
    )
    return output


class PackedLinear(nn.Module):
    """Computes what an ``nn.Linear`` computes."""

    def __init__(self, linear: nn.Linear, output_dtype: torch.dtype | None = None) -> None:
        """Pack the weights of ``linear``, which is left as it is.

        Args:
            linear: the layer.
            output_dtype: None is that of the weights.
        """
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.output_dtype = output_dtype or linear.weight.dtype
        self.packed = (pack(linear.weight, linear.bias),)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        rows = x.reshape(-1, self.in_features)
        output = torch.empty(len(rows), self.out_features, dtype=self.output_dtype)
        return multiply(rows, self.packed[0], output).view(*x.shape[:-1], self.out_features)


class PackedEmbedding(nn.Module):
    """The embedding of a model whose head has the same weights: they are held once, packed."""

    def __init__(self, head: PackedLinear, dtype: torch.dtype, scale: float = 1.0) -> None:
        """Take the weights of ``head``.

        Args:
            head: made of the same weights.
            dtype: of the weights.
            scale: what embeddings are multiplied with.
        """
        super().__init__()
        self._weights = head.packed[0]
        # Holds nothing: a model asks its parameters for their dtype and device.
        self.weight = nn.Parameter(torch.empty(0, head.in_features, dtype=dtype), False)
        self._scale = scale

    def forward(self, token_ids: Tensor) -> Tensor:
        """``[...]`` to ``[..., features]``."""
        ids = token_ids.reshape(-1).int().numpy()
        output = self.weight.new_empty(*token_ids.shape, self.weight.shape[1])
        self._weights.gather(ids, output.data_ptr(), torch.get_num_threads())
        return output if self._scale == 1.0 else output.mul_(self._scale)
