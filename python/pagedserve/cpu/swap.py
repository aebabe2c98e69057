"""Exchanges modules of one loaded model, each after a comparison with what it replaces.

int8 weights are not what they replace: such a module is compared with a copy of the model's own
that has the weights int8 leaves.  Those are at most half a scale from the model's (`quantize`);
anything else that differs is a fault, and is seen where it is larger than roundings of sums.
"""

from collections import Counter
from copy import deepcopy
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from pagedserve import _core
from pagedserve.attention.cpu import can_attend
from pagedserve.config import CpuKernels, Quantization
from pagedserve.cpu.layers import FusedLayer, can_fuse
from pagedserve.cpu.linears import PackedEmbedding, PackedLinear, can_pack, quantize
from pagedserve.cpu.mlps import GatedMLP, packable_gate_of
from pagedserve.cpu.norms import FastNorm
from pagedserve.errors import ConfigError
from pagedserve.layers.exchange import exchange_each
from pagedserve.layers.families import is_norm
from pagedserve.layers.trial import is_close, layers_agree, random_numbers

_KINDS: Final[dict[type, str]] = {
    GatedMLP: "gated layers",
    PackedLinear: "linear layers",
    FastNorm: "norms",
}


class _Replacement(NamedTuple):
    """What may take a module's place, and the features of its input."""

    module: nn.Module
    num_features: int


def use_instructions(name: str | None) -> None:
    """Use these vector instructions in this process; see `pagedserve.config.EngineArgs`.

    Raises:
        ConfigError: if this CPU does not have them.
    """
    _core.use_cpu_instructions(name)


@torch.inference_mode()
def exchange(model: Any, tier: CpuKernels, quantization: Quantization | None = None) -> str:
    """Exchange what a tier allows of a model on the CPU, in place.

    Args:
        model: of transformers, with its own modules.
        tier: see `pagedserve.config.EngineArgs`.
        quantization: what the weights of linear layers become.

    Returns:
        How many modules of which kind were exchanged, and what share of the bytes of weights is
        quantized, for people.

    Raises:
        ConfigError: if there is no linear layer to quantize.
    """
    swapped: Counter[str] = Counter()
    # torch's own vectors are better than none, but they do not know int8 weights.
    is_slow = _core.cpu_instructions() == "portable" and quantization is None
    if tier == "generic" or is_slow:
        return "none"
    if tier == "fused":
        swapped["decoder layers"] = _fuse_layers(model, quantization)
    _swap_children(model, model.get_output_embeddings(), quantization, swapped)
    swapped["embeddings"] = _share_head(model, quantization)
    modules = ", ".join(f"{kind} {count}" for kind, count in swapped.items() if count) or "none"
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
    packed = (one for module in model.modules() for one in getattr(module, "packed", ()))
    return sum(int(one.nbytes) for one in packed)


def _fuse_layers(model: nn.Module, quantization: Quantization | None) -> int:
    def agree(layer: nn.Module, fused: FusedLayer) -> bool:
        return layers_agree(_quantized(layer, quantization), fused, "rust")

    return exchange_each(model, can_fuse, partial(FusedLayer, quantization=quantization), agree)


def _share_head(model: Any, quantization: Quantization | None) -> int:
    """Let an embedding whose weights the packed head has too read them there; whether it does."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    weight = getattr(embedding, "weight", None)
    is_tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    if not is_tied or not isinstance(head, PackedLinear) or not isinstance(weight, Tensor):
        return 0
    scale = getattr(embedding, "embed_scale", torch.tensor(1.0)).to(weight.dtype)
    packed = PackedEmbedding(head, weight.dtype, float(scale))
    ids = torch.arange(len(weight), device=weight.device)
    wanted = _quantized(embedding, quantization)
    if len(weight) != head.out_features or not packed(ids[:999]).equal(wanted(ids[:999])):
        return 0
    model.set_input_embeddings(packed)
    return 1


def _swap_children(
    parent: nn.Module,
    head: nn.Module | None,
    quantization: Quantization | None,
    swapped: Counter[str],
) -> None:
    for name, child in list(parent.named_children()):
        made = _replacement(child, quantization, is_head=child is head)
        if made is not None and _agree(_quantized(child, quantization), made):
            setattr(parent, name, made.module)
            swapped[_KINDS[type(made.module)]] += 1
        else:
            _swap_children(child, head, quantization, swapped)


def _replacement(
    module: Any, quantization: Quantization | None, *, is_head: bool
) -> _Replacement | None:
    if (gate := packable_gate_of(module)) is not None:
        return _Replacement(GatedMLP(module, gate, quantization), module.down_proj.out_features)
    if type(module) is nn.Linear and can_pack(module.weight):
        # Sampling is in float32: rounding logits to fewer bits on the way only makes ties.
        packed = PackedLinear(module, torch.float32 if is_head else None, quantization)
        return _Replacement(packed, module.in_features)
    if is_norm(module) and can_attend(module.weight.device, module.weight.dtype):
        return _Replacement(FastNorm(module), module.weight.numel())
    return None


def _quantized(module: nn.Module, quantization: Quantization | None) -> nn.Module:
    """A module with the weights that quantization leaves; itself without."""
    if quantization is None:
        return module
    module = deepcopy(module)
    for one in module.modules():
        if isinstance(one, nn.Linear | nn.Embedding):
            one.weight.copy_(quantize(one.weight).dequantize(one.weight.dtype))
    return module


def _agree(module: nn.Module, made: _Replacement) -> bool:
    """Whether both give the same, but for roundings."""
    dtype = next(module.parameters()).dtype
    x = random_numbers(8, made.num_features).to(dtype)
    return is_close(made.module(x), module(x), num_terms=made.num_features, num_parts=1)
