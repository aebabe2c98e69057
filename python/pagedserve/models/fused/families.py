"""Families of transformers' decoder layers with the same structure.

A module is recognized by its class and its parts.  Names prove nothing, so code that replaces a
module also runs and compares both (`pagedserve.models.fused.compare`).
"""

import inspect
from typing import Any, Final, Literal, NamedTuple

from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation

from pagedserve.parallel.modules import own_linear

Gate = Literal["silu", "gelu_tanh"]

_GATES: Final[dict[type, Gate]] = {
    nn.SiLU: "silu",
    SiLUActivation: "silu",
    GELUTanh: "gelu_tanh",
}


class NormNames(NamedTuple):
    """Norms of a decoder layer, None for absent ones.

    Attributes:
        attention: norm before attention.
        attention_output: norm of its output.
        mlp: norm before the gated layers.
        mlp_output: norm of their output.
    """

    attention: str
    attention_output: str | None
    mlp: str
    mlp_output: str | None


_TWO: Final = NormNames("input_layernorm", None, "post_attention_layernorm", None)
_FOUR: Final = NormNames(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_FAMILIES: Final[dict[str, NormNames]] = {
    "LlamaDecoderLayer": _TWO,
    "MistralDecoderLayer": _TWO,
    "Qwen2DecoderLayer": _TWO,
    "Qwen3DecoderLayer": _TWO,
    "SmolLM3DecoderLayer": _TWO,
    "GemmaDecoderLayer": _TWO,
    "Gemma2DecoderLayer": _FOUR,
    "Gemma3DecoderLayer": _FOUR,
}


def norm_names(layer: Any) -> NormNames | None:
    """Norms of a decoder layer of a known family; None for any other module."""
    if not type(layer).__module__.startswith("transformers.models."):
        return None
    return _FAMILIES.get(type(layer).__name__)


def attention_linears(attention: Any) -> list[Any] | None:
    """Linear layers of queries, keys, values and output; None unless all are plain."""
    return _linears(attention, "q_proj", "k_proj", "v_proj", "o_proj")


def mlp_linears(mlp: Any) -> list[Any] | None:
    """Linear layers of gate, up and down; None unless all are plain."""
    return _linears(mlp, "gate_proj", "up_proj", "down_proj")


def gate_of(mlp: Any) -> Gate | None:
    """Activation of ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``; None for other modules.

    Gate and up have no bias.
    """
    linears = mlp_linears(mlp)
    if linears is None or any(linear.bias is not None for linear in linears[:2]):
        return None
    return _GATES.get(type(getattr(mlp, "act_fn", None)))


def is_plain_linear(module: Any) -> bool:
    """Whether a module is torch's linear layer with its original forward."""
    return type(module) is nn.Linear and "forward" not in vars(module)


def is_norm(module: Any) -> bool:
    """Whether a module looks like an RMS norm."""
    weight = getattr(module, "weight", None)
    return (
        type(module).__name__.endswith("RMSNorm")
        and isinstance(weight, Tensor)
        and weight.dim() == 1
        and isinstance(_epsilon(module), float)
        and len(inspect.signature(module.forward).parameters) == 1
    )


def norm_epsilon(norm: Any) -> float:
    """Epsilon that an RMS norm adds to the mean square."""
    return float(_epsilon(norm))


def _epsilon(norm: Any) -> Any:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _linears(module: Any, *names: str) -> list[Any] | None:
    linears = [own_linear(getattr(module, name, None)) for name in names]
    return linears if all(is_plain_linear(linear) for linear in linears) else None
