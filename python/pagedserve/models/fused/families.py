"""The families of decoder layers in transformers that are built the same way.

A module is recognised by its class and its parts.  A name proves nothing, so whoever replaces a
module also runs both and compares (`pagedserve.models.fused.compare`).
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
    """The norms of a decoder layer, None where there is none.

    Attributes:
        attention: before attention.
        attention_output: of its result.
        mlp: before the gated layers.
        mlp_output: of their result.
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
    """The norms of a decoder layer of a known family; None for any other module."""
    if not type(layer).__module__.startswith("transformers.models."):
        return None
    return _FAMILIES.get(type(layer).__name__)


def attention_linears(attention: Any) -> list[Any] | None:
    """The linear layers of queries, keys, values and output; None unless they are all plain."""
    return _linears(attention, "q_proj", "k_proj", "v_proj", "o_proj")


def mlp_linears(mlp: Any) -> list[Any] | None:
    """The linear layers of gate, up and down; None unless they are all plain."""
    return _linears(mlp, "gate_proj", "up_proj", "down_proj")


def gate_of(mlp: Any) -> Gate | None:
    """The activation of ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``; None for other modules.

    Gate and up have no bias.
    """
    linears = mlp_linears(mlp)
    if linears is None or any(linear.bias is not None for linear in linears[:2]):
        return None
    return _GATES.get(type(getattr(mlp, "act_fn", None)))


def is_plain_linear(module: Any) -> bool:
    """Whether a module is torch's linear layer, and nobody has changed what its call does."""
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
    """What an RMS norm adds to the mean square."""
    return float(_epsilon(norm))


def _epsilon(norm: Any) -> Any:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _linears(module: Any, *names: str) -> list[Any] | None:
    linears = [own_linear(getattr(module, name, None)) for name in names]
    return linears if all(is_plain_linear(linear) for linear in linears) else None
