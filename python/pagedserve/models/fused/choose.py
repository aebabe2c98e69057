"""Which modules are replaced on a device, and fallbacks if the numerics check fails."""

from typing import Final, Literal

import torch
from transformers import PreTrainedModel

from pagedserve.attention.backend import AttentionBackend
from pagedserve.config import EngineArgs
from pagedserve.config.precision import CpuKernels
from pagedserve.models.fused.cpu.replace import replace_for_cpu
from pagedserve.models.fused.gpu.replace import replace_for_gpu
from pagedserve.parallel.group import RankGroup

_FEWER: Final[dict[CpuKernels, CpuKernels]] = {"fused": "modules", "modules": "generic"}


def choose_kernels(
    config: EngineArgs, device: torch.device, backend: AttentionBackend
) -> CpuKernels:
    """The kernels of an option, or else the fastest for the attention backend."""
    if config.cpu_kernels is not None:
        return config.cpu_kernels
    return "fused" if backend.fused_layers == _kind(config, device, backend) else "modules"


def with_fewer(kernels: CpuKernels, config: EngineArgs) -> CpuKernels | None:
    """The next choice that replaces less; None if there is none, or none with quantization."""
    fewer = _FEWER.get(kernels)
    return None if fewer == "generic" and config.quantization is not None else fewer


def replace_modules_of(
    model: PreTrainedModel,
    config: EngineArgs,
    backend: AttentionBackend,
    kernels: CpuKernels,
    group: RankGroup | None = None,
) -> str:
    """Replace modules for the device; returns a description.

    Ranks of a model replace the same modules.
    """
    everywhere = bool if group is None else group.agree
    if _kind(config, model.device, backend) == "cpu":
        return replace_for_cpu(model, kernels, config.quantization, everywhere)
    return replace_for_gpu(model, kernels, everywhere)


def _kind(
    config: EngineArgs, device: torch.device, backend: AttentionBackend
) -> Literal["cpu", "gpu"]:
    """Kind of the replacements: those of the device.

    In Triton's interpreter a model gets GPU modules, unless an option names those of the CPU.
    """
    if device.type != "cpu":
        return "gpu"
    names_cpu = config.cpu_kernels is not None or config.quantization is not None
    return "cpu" if names_cpu else backend.fused_layers or "cpu"
