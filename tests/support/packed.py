"""Products with packed weights, and how near they must come to float64."""

from typing import Any

import torch
from torch import Tensor

from pagedserve import _core
from pagedserve.config.precision import Quantization
from pagedserve.host_ops.capabilities import DTYPE_NAMES
from pagedserve.models.fused.cpu.packing import quantize

INSTRUCTIONS = _core.cpu.instruction_sets()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
POISON = 6.0e4
QUANTIZATIONS: list[Quantization | None] = [None, "int8"]


def is_near(found: Tensor, exact: Tensor, *dtypes: torch.dtype) -> bool:
    """Sums are made in float32; results are rounded to what stores them."""
    bound = max(4e-6, *(torch.finfo(dtype).eps for dtype in dtypes))
    scale = float(exact.abs().max()) + 1e-3
    return bool(((found.double() - exact).abs() <= bound * scale).all())


def held(weight: Tensor, quantization: Quantization | None) -> Tensor:
    """What is left of weights, in float64."""
    return weight.double() if quantization is None else quantize(weight).dequantize(torch.float64)


def product(
    packed: Any,
    x: Tensor,
    *,
    num_features: int,
    output_dtype: torch.dtype,
    gap: int,
    added: Tensor | None,
    **options: Any,
) -> Tensor:
    """Rows ``[T, K]`` times packed weights, and what was there before, ``[T, N]``.

    Rows lie ``gap`` numbers and more apart: NaN between those that are read, and what is between
    those that are written must stay.
    """
    num_rows, depth = x.shape
    apart = torch.full((num_rows, depth + gap), torch.nan, dtype=x.dtype)
    apart[:, :depth] = x
    stride = num_features + num_features % 2 + gap
    output = torch.full((num_rows, stride), POISON, dtype=output_dtype)
    if added is not None:
        output[:, :num_features] = added
    packed.multiply(
        num_rows=num_rows,
        x=apart.data_ptr(),
        x_stride=apart.stride(0),
        output=output.data_ptr(),
        output_stride=stride,
        output_dtype=DTYPE_NAMES[output_dtype],
        adds=added is not None,
        **options,
    )
    assert (output[:, num_features:] == torch.tensor(POISON, dtype=output_dtype)).all()
    return output[:, :num_features]
