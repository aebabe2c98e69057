"""Weights of linear layers, packed once in the order in which the Rust kernels read them.

torch's linear layer rearranges the weights in every call; with few rows, as in decoding, that costs
more than the product.  The packed copy replaces the original.

With int8 weights each output feature has a scale, a 127th of its largest weight, and each weight
becomes the nearest multiple of it, so its error is at most half a scale (Wu et al., "Integer
Quantization for Deep Learning Inference", section 3.1, symmetric).  Activations, sums and biases
are not quantized.

Float32 weights that are those of a 16-bit file are packed in 16 bits, which loses nothing.
"""

from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pagedserve._core.cpu import PackedWeights
from pagedserve.config.precision import Quantization
from pagedserve.host_ops.capabilities import DTYPE_NAMES
from pagedserve.host_ops.memory import empty_in_huge_pages
from pagedserve.models.families.record import Gate

PANEL_FEATURES: Final = 64  # as in rust/cpu/src/linear.rs

_ROWS_AT_ONCE: Final = 1024  # that are compared, in little memory
_LARGEST_INT8: Final = 127  # without -128, which has no positive counterpart


class Int8Weights(NamedTuple):
    """Weights ``[N, K]`` as integers from -127 to 127, and their scales ``[N]`` in float32."""

    values: Tensor
    scales: Tensor

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Dequantize to weights ``[N, K]``."""
        return (self.values.float() * self.scales[:, None]).to(dtype)


def quantize(weight: Tensor, peaks: Tensor | None = None) -> Int8Weights:
    """Quantize weights ``[N, K]`` to int8, ties to even.

    Args:
        weight: the weights.
        peaks: float32 ``[N]``, largest magnitudes in the whole layer of which these are a shard;
            None for a whole layer.
    """
    weight = weight.detach().float()
    scales = (weight.abs().amax(dim=1) if peaks is None else peaks) / _LARGEST_INT8
    # Without a scale all weights of a feature are zero, or so small that they become zero.
    steps = weight / scales.masked_fill(scales == 0, torch.inf)[:, None]
    return Int8Weights(steps.round_().clamp_(-_LARGEST_INT8, _LARGEST_INT8).to(torch.int8), scales)


def can_pack(weight: Tensor) -> bool:
    """Whether the kernels support such weights ``[N, K]``."""
    per_unit = 4 // weight.element_size()
    return (
        type(weight) in (Tensor, nn.Parameter)  # subclasses override operations
        and weight.device.type == "cpu"
        and weight.dtype in DTYPE_NAMES
        and weight.dim() == 2  # noqa: PLR2004  # a matrix
        and weight.shape[1] % per_unit == 0
        and weight.numel() > 0
    )


def pack(
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gate: Gate | None = None,
    quantization: Quantization | None = None,
    peaks: Tensor | None = None,
) -> PackedWeights:
    """Pack the weights ``[N, K]`` and bias ``[N]`` of a linear layer.

    Args:
        weight: weight of a dtype that `can_pack`; it is copied.
        bias: bias of any dtype.
        gate: makes a gated layer: the first 32 features of each 64, activated, times the others.
        quantization: quantization of the weights; None keeps them.
        peaks: as in `quantize`.
    """
    num_features, depth = weight.shape
    kept = _narrowest(weight.detach()) if quantization is None else weight
    panels, scales = (
        (_panels(kept, torch.int32).view(np.uint32), None)
        if quantization is None
        else _int8_panels(weight, peaks)
    )
    return PackedWeights(
        panels,
        dtype=DTYPE_NAMES[weight.dtype],
        in_features=depth,
        out_features=num_features,
        scales=scales,
        bias=None if bias is None else float32_vector(bias),
        gate=gate,
        weight_dtype=DTYPE_NAMES[kept.dtype],
    )


def _narrowest(weight: Tensor) -> Tensor:
    """Weights ``[N, K]``, those of float32 in 16 bits if all of them are such numbers."""
    if weight.dtype != torch.float32 or weight.shape[1] % 2:  # a unit is a pair
        return weight
    for dtype in (torch.bfloat16, torch.float16):
        if all(rows.to(dtype).float().equal(rows) for rows in weight.split(_ROWS_AT_ONCE)):
            return weight.to(dtype)
    return weight


def _int8_panels(
    weight: Tensor, peaks: Tensor | None
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    values, scales = quantize(weight, peaks)
    return _panels(values, torch.int8), scales.numpy()


def _panels(weight: Tensor, lane: torch.dtype) -> NDArray[Any]:
    """Weights ``[N, K]`` as ``[ceil(N / 64), K, 64]`` lanes, each of which may hold several."""
    lanes = weight.contiguous().view(lane)
    num_whole, rest = divmod(len(lanes), PANEL_FEATURES)
    depth, whole = lanes.shape[1], lanes[: num_whole * PANEL_FEATURES]
    panels = empty_in_huge_pages(num_whole + bool(rest), depth, PANEL_FEATURES, dtype=lane)
    panels[:num_whole].copy_(whole.view(-1, PANEL_FEATURES, depth).transpose(1, 2))
    if rest:  # only the last panel is padded: a copy of all weights would take much memory
        panels[num_whole].zero_()[:, :rest].copy_(lanes[len(whole) :].T)
    return panels.numpy().reshape(-1)


def pack_gated(
    gate: Tensor, up: Tensor, activation: Gate, quantization: Quantization | None = None
) -> PackedWeights:
    """Pack two weights ``[N, K]``, N a multiple of 32, into one gated layer."""
    half = PANEL_FEATURES // 2
    pairs = torch.stack((gate.view(-1, half, gate.shape[1]), up.view(-1, half, up.shape[1])), dim=1)
    return pack(pairs.view(-1, gate.shape[1]), gate=activation, quantization=quantization)


def float32_vector(tensor: Tensor) -> NDArray[np.float32]:
    """Copy a vector to float32: a view would keep the file of all weights in memory."""
    return tensor.detach().float().contiguous().numpy().copy()
