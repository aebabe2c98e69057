"""Replacement of a model's modules on the CPU, each after a comparison with the original.

A module with int8 weights computes a different result.  So it is compared with a copy of the
original whose weights are rounded to int8 and back, with the bound for rounding of sums, as without
quantization.
"""

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from pagedserve.attention.rust import BACKEND
from pagedserve.config.precision import CpuKernels, Quantization
from pagedserve.errors import ConfigError
from pagedserve.host_ops.capabilities import has_kernels
from pagedserve.host_ops.heap import return_freed_memory
from pagedserve.models.fused.compare import is_close, layers_agree, random_numbers
from pagedserve.models.fused.cpu.layers import CpuDecoderLayer, can_fuse
from pagedserve.models.fused.cpu.modules import (
    CpuRMSNorm,
    PackedEmbedding,
    PackedGatedMLP,
    PackedLinear,
    packable_gate_of,
)
from pagedserve.models.fused.cpu.packing import can_pack, quantize
from pagedserve.models.fused.cpu.rotary import replace_rotary
from pagedserve.models.fused.recognize import is_norm, is_plain_linear
from pagedserve.models.fused.replace import replace_modules
from pagedserve.parallel.modules import Gathered
from pagedserve.parallel.shards import peaks_of

_KINDS: Final[dict[type, str]] = {
    PackedGatedMLP: "gated layers",
    PackedLinear: "linear layers",
    CpuRMSNorm: "norms",
}


class _Replacement(NamedTuple):
    """A module's replacement, and the features of its input."""

    module: nn.Module
    num_features: int


@torch.inference_mode()
def replace_for_cpu(
    model: Any,
    kernels: CpuKernels,
    quantization: Quantization | None = None,
    everywhere: Callable[[bool], bool] = bool,
) -> str:
    """Replace modules of a model on the CPU, in place.

    Args:
        model: model of transformers, with its original modules.
        kernels: which modules; see `pagedserve.config.EngineArgs`.
        quantization: quantization of linear layers.
        everywhere: all-reduce of a condition over the ranks that share the model.

    Returns:
        Numbers of replaced modules by type, and the quantized fraction of the weights' bytes, as
        text.

    Raises:
        ConfigError: there is no linear layer to quantize.
    """
    replaced: Counter[str] = Counter()
    if kernels == "generic":
        return "none"
    if kernels == "fused":
        replaced["decoder layers"] = _replace_layers(model, quantization, everywhere)
        if replaced["decoder layers"]:
            replace_rotary(model)
    head = model.get_output_embeddings()
    head = head.inner if isinstance(head, Gathered) else head
    _Children(head, quantization, everywhere, replaced).replace(model)
    replaced["embeddings"] = _share_head(model, quantization)
    return_freed_memory()
    modules = ", ".join(f"{kind} {count}" for kind, count in replaced.items() if count) or "none"
    if quantization is None:
        return modules
    share = _packed_bytes(model) / weight_bytes(model)
    if share == 0:
        raise ConfigError(
            f"quantization is {quantization!r}, and {type(model).__name__} has no linear layers "
            "that can be packed: leave it out"
        )
    return f"{modules}; weights: {int(100 * share)}% {quantization}"


def weight_bytes(model: nn.Module) -> int:
    """Bytes of a model's weights, packed ones and others."""
    return _packed_bytes(model) + sum(parameter.nbytes for parameter in model.parameters())


def _packed_bytes(model: nn.Module) -> int:
    packed = (weights for module in model.modules() for weights in getattr(module, "packed", ()))
    return sum(int(weights.nbytes) for weights in packed)


def _replace_layers(
    model: nn.Module, quantization: Quantization | None, everywhere: Callable[[bool], bool]
) -> int:
    def agree(layer: nn.Module, fused: CpuDecoderLayer) -> bool:
        return layers_agree(_quantized(layer, quantization), fused, BACKEND)

    make = partial(CpuDecoderLayer, quantization=quantization)
    return replace_modules(model, can_fuse, make, agree, everywhere)


def _share_head(model: Any, quantization: Quantization | None) -> int:
    """Let an embedding that is tied to the head use its packed weights; return the number."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    weight = getattr(embedding, "weight", None)
    is_tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    if not is_tied or not isinstance(head, PackedLinear) or not isinstance(weight, Tensor):
        return 0
    scale = getattr(embedding, "embed_scale", 1.0)
    if isinstance(scale, Tensor):  # a tensor is rounded by the model, a number is not
        scale = scale.to(weight.dtype)
    packed = PackedEmbedding(head, weight.dtype, float(scale))
    ids = torch.arange(len(weight), device=weight.device)
    wanted = _quantized(embedding, quantization)
    if len(weight) != head.out_features or not packed(ids[:999]).equal(wanted(ids[:999])):
        return 0
    model.set_input_embeddings(packed)
    return 1


@dataclass(frozen=True, slots=True)
class _Children:
    """Replaces modules within others."""

    head: nn.Module | None
    quantization: Quantization | None
    everywhere: Callable[[bool], bool]
    replaced: Counter[str]

    def replace(self, parent: nn.Module) -> None:
        """Replace supported modules, and recurse into the others."""
        # By their names: no other reference may keep a replaced module in memory.
        for name in [name for name, _ in parent.named_children()]:
            child = getattr(parent, name)
            made = _replacement(child, self.quantization, is_head=child is self.head)
            if self.everywhere(made is not None) and made is not None and self._agree(child, made):
                setattr(parent, name, made.module)
                self.replaced[_KINDS[type(made.module)]] += 1
                if hasattr(made.module, "packed"):  # norms are small
                    return_freed_memory()
            else:
                self.replace(child)

    def _agree(self, child: nn.Module, made: _Replacement) -> bool:
        return self.everywhere(_agree(_quantized(child, self.quantization), made))


def _replacement(
    module: Any, quantization: Quantization | None, *, is_head: bool
) -> _Replacement | None:
    if (gate := packable_gate_of(module)) is not None:
        packed_mlp = PackedGatedMLP(module, gate, quantization)
        return _Replacement(packed_mlp, module.gate_proj.in_features)
    if is_plain_linear(module) and can_pack(module.weight) and (is_head or _has_whole_rows(module)):
        # Sampling is in float32: rounding the logits to fewer bits before would only add ties.
        packed = PackedLinear(module, torch.float32 if is_head else None, quantization)
        return _Replacement(packed, module.in_features)
    if is_norm(module) and has_kernels(module.weight.device, module.weight.dtype):
        return _Replacement(CpuRMSNorm(module), module.weight.numel())
    return None


def _has_whole_rows(linear: nn.Linear) -> bool:
    """Whether a row of the output is whole 32-bit units, as the kernels write them."""
    return linear.out_features * linear.weight.element_size() % 4 == 0


def _quantized(module: nn.Module, quantization: Quantization | None) -> nn.Module:
    """A copy with weights quantized and dequantized; the module itself without quantization."""
    if quantization is None:
        return module
    module = deepcopy(module)
    for child in module.modules():
        if isinstance(child, nn.Linear | nn.Embedding):
            kept = quantize(child.weight, peaks_of(child))
            child.weight.copy_(kept.dequantize(child.weight.dtype))
    return module


def _agree(module: nn.Module, replacement: _Replacement) -> bool:
    """Whether both outputs are equal except for rounding."""
    # The weight of Falcon-Mamba's norms is not a parameter.
    dtype = next(chain(module.parameters(), module.buffers())).dtype
    num_features = replacement.num_features
    x = random_numbers(8, num_features).to(dtype)
    return is_close(replacement.module(x), module(x), num_terms=num_features, num_parts=1)
