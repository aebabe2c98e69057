"""Logits processors of torch tensors, for logits on a GPU and in host memory."""

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


@torch.inference_mode()
def run_on_tensor(
    processor: Callable[[list[int], Any], object],
    token_ids: list[int],
    logits: Tensor | NDArray[Any],
) -> str | None:
    """`SamplingOps.run_processor` for processors of tensors."""
    row = torch.as_tensor(logits)
    result = processor(token_ids, row.clone())
    wanted = f"expected a dense float tensor of shape [{len(row)}]"
    if not isinstance(result, Tensor):
        return f"returned {type(result).__name__}, {wanted}"
    is_dense = result.layout is torch.strided and not result.is_meta
    if result.shape != row.shape or not (result.is_floating_point() and is_dense):
        kind = str(result.dtype).removeprefix("torch.")
        layout = "" if is_dense else "meta " if result.is_meta else f"{result.layout} "
        return f"returned {layout}{kind} {list(result.shape)}, {wanted}"
    if result.isnan().any():
        return "returned NaN"
    row.copy_(result)
    return None
