"""Replacement of a model's modules on a GPU, each after a comparison with the original."""

from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from pagedserve.config.precision import CpuKernels
from pagedserve.models.fused.compare import is_close, layers_agree, random_numbers
from pagedserve.models.fused.gpu.norms import GpuRMSNorm
from pagedserve.models.fused.recognize import is_norm
from pagedserve.models.fused.replace import replace_modules


@torch.inference_mode()
def replace_for_gpu(
    model: nn.Module, kernels: CpuKernels, everywhere: Callable[[bool], bool] = bool
) -> str:
    """Replace decoder layers and then the remaining norms, in place.

    Args:
        model: model of transformers, with its original modules.
        kernels: "fused" replaces layers, which attend in Triton, and norms; "modules" norms.
        everywhere: all-reduce of a condition over the ranks that share the model.

    Returns:
        Numbers of replaced modules by type, as text.
    """
    replaced: Counter[str] = Counter()
    if kernels == "generic":
        return "none"
    if kernels == "fused":
        replaced["decoder layers"] = _replace_layers(model, everywhere)
    replaced["norms"] = replace_modules(model, is_norm, GpuRMSNorm, _agree, everywhere)
    return ", ".join(f"{kind} {count}" for kind, count in replaced.items() if count) or "none"


def _replace_layers(model: nn.Module, everywhere: Callable[[bool], bool]) -> int:
    from pagedserve.attention.triton import BACKEND
    from pagedserve.models.fused.gpu.layers import GpuDecoderLayer, can_fuse  # imports triton

    agree = partial(layers_agree, backend=BACKEND)
    return replace_modules(model, can_fuse, GpuDecoderLayer, agree, everywhere)


def _agree(norm: nn.Module, fused: GpuRMSNorm) -> bool:
    """Whether both outputs are equal except for rounding."""
    weight = fused.weight
    x = random_numbers(8, len(weight)).to(weight.device, weight.dtype)
    found, expected = fused(x), norm(x)
    same_dtype = found.dtype == expected.dtype
    return same_dtype and is_close(found, expected, num_terms=len(weight), num_parts=1)
