"""Exchanges modules of one loaded model, each after a comparison with what it replaces.

int8 weights are not what they replace: such a module is compared with a copy of the model's own
that has the weights int8 leaves.  Those are at most half a scale from the model's (`quantize`);
anything else that differs is a fault, and is seen where it is larger than roundings of sums.
"""

import inspect
from collections import Counter
from copy import deepcopy
from typing import Any, Final, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from pagedserve import _core
from pagedserve.attention.buckets import StepLayout
from pagedserve.attention.cpu import DTYPE_NAMES
from pagedserve.attention.interface import StepAttention, answering
from pagedserve.attention.metadata import AttentionMetadata
from pagedserve.config import CpuTier, Quantization
from pagedserve.cpu.layers import FusedLayer, can_fuse
from pagedserve.cpu.linears import PackedEmbedding, PackedLinear, can_pack, quantize
from pagedserve.cpu.mlps import GatedMLP, gate_of
from pagedserve.cpu.norms import FastNorm
from pagedserve.errors import ConfigError

_KINDS: Final[dict[type, str]] = {
    GatedMLP: "gated layers",
    PackedLinear: "linear layers",
    FastNorm: "norms",
}
_TRIAL_TOKENS: Final = 5
_TRIAL_BLOCK_SIZE: Final = 16


class _Replacement(NamedTuple):
    """What may take a module's place, and the features of its input."""

    module: nn.Module
    num_features: int


def use_instructions(name: str | None) -> None:
    """Use these vector instructions in this process; see `pagedserve.config.ModelConfig`.

    Raises:
        ConfigError: if this CPU does not have them.
    """
    _core.use_cpu_instructions(name)


@torch.inference_mode()
def exchange(model: Any, tier: CpuTier, quantization: Quantization | None = None) -> str:
    """Exchange what a tier allows of a model on the CPU, in place.

    Args:
        model: of transformers, with its own modules.
        tier: see `pagedserve.config.ModelConfig`.
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
    places = [
        (parent, name)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if can_fuse(layer)
    ]
    num_fused = 0
    for parent, name in places:  # without its layer: nothing else keeps a replaced one in memory
        fused = FusedLayer(getattr(parent, name), quantization)
        if _layers_agree(_quantized(getattr(parent, name), quantization), fused):
            setattr(parent, name, fused)
            num_fused += 1
    return num_fused


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
    if (gate := gate_of(module)) is not None:
        return _Replacement(GatedMLP(module, gate, quantization), module.down_proj.out_features)
    if type(module) is nn.Linear and can_pack(module.weight):
        # Sampling is in float32: rounding logits to fewer bits on the way only makes ties.
        packed = PackedLinear(module, torch.float32 if is_head else None, quantization)
        return _Replacement(packed, module.in_features)
    if type(module).__name__.endswith("RMSNorm") and _is_plain_norm(module):
        return _Replacement(FastNorm(module), module.weight.numel())
    return None


def _is_plain_norm(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.device.type != "cpu":
        return False
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    takes_one = len(inspect.signature(module.forward).parameters) == 1
    return weight.dtype in DTYPE_NAMES and isinstance(epsilon, float) and takes_one


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
    x = _random(8, made.num_features).to(dtype)
    return _is_close(made.module(x), module(x), num_terms=made.num_features, num_parts=1)


def _layers_agree(layer: Any, fused: FusedLayer) -> bool:
    """The same for two decoder layers, which attend over a pool of one block."""
    attention = layer.self_attn
    dtype, head_size = attention.q_proj.weight.dtype, attention.head_dim
    num_features = attention.q_proj.in_features
    hidden = _random(1, _TRIAL_TOKENS, num_features).to(dtype)
    angles = _random(1, _TRIAL_TOKENS, head_size // 2).repeat(1, 1, 2)
    pool = hidden.new_zeros(
        1, _TRIAL_BLOCK_SIZE, attention.k_proj.out_features // head_size, 2 * head_size
    )

    def run(module: nn.Module) -> Tensor:
        with answering(StepAttention(_trial_metadata(), [pool], [None], "rust")):
            output = module(
                hidden.clone(),
                attention_mask=None,
                position_embeddings=(angles.cos().to(dtype), angles.sin().to(dtype)),
            )
        return cast(Tensor, output[0] if isinstance(output, tuple) else output)

    return _is_close(run(fused), run(layer), num_terms=num_features, num_parts=4)


def _trial_metadata() -> AttentionMetadata:
    layout = StepLayout(
        query_start=np.array([0, _TRIAL_TOKENS], dtype=np.int32),
        seq_lens=np.array([_TRIAL_TOKENS], dtype=np.int32),
        block_tables=np.zeros((1, 1), dtype=np.int32),
        block_size=_TRIAL_BLOCK_SIZE,
    )
    return AttentionMetadata(layout, torch.arange(_TRIAL_TOKENS))


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _is_close(found: Tensor, expected: Tensor, *, num_terms: int, num_parts: int) -> bool:
    """Whether results differ by roundings: of sums in float32, and of what each part stores."""
    error = torch.finfo(torch.float32).eps * num_terms**0.5
    if expected.dtype != torch.float32:
        error += torch.finfo(expected.dtype).eps
    largest = float(expected.float().abs().max())
    difference = float((found.float() - expected.float()).abs().max())
    return bool(difference <= 4 * num_parts * error * max(largest, 1e-3))
