"""Recognition of the modules of transformers that fused ones can replace.

A module is recognized by its class and its parts.  Names prove nothing, so code that replaces a
module also runs and compares both (`pagedserve.models.fused.compare`).
"""

import inspect
from typing import Any, Final

from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation

from pagedserve.models.families.record import DecoderFamily, Gate
from pagedserve.models.families.table import DECODERS
from pagedserve.parallel.modules import own_linear

_GATES: Final[dict[type, Gate]] = {
    nn.SiLU: "silu",
    SiLUActivation: "silu",
    GELUTanh: "gelu_tanh",
}
_BY_LAYER: Final = {f"{family.name}DecoderLayer": family for family in DECODERS}
_OFFSETS: Final = {f"{family.name}RMSNorm": family.norm_offset for family in DECODERS}


def family_of_layer(layer: Any) -> DecoderFamily | None:
    """Family of a decoder layer of transformers; None for any other module."""
    if not type(layer).__module__.startswith("transformers.models."):
        return None
    return _BY_LAYER.get(type(layer).__name__)


def layer_norms(layer: nn.Module, family: DecoderFamily) -> dict[str, Any]:
    """Norms of a decoder layer, by their `LayerPart`."""
    modules = family.modules.items()
    return {part: layer.get_submodule(name) for part, name in modules if part.endswith("_norm")}


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


def norm_factor(norm: Any) -> Tensor:
    """Factor of an RMS norm, ``[F]``: its weight, which some families store without an offset."""
    weight: Tensor = norm.weight
    offset = _OFFSETS.get(type(norm).__name__, 0.0)
    return offset + weight.float() if offset else weight


def norm_epsilon(norm: Any) -> float:
    """Epsilon that an RMS norm adds to the mean square."""
    return float(_epsilon(norm))


def _epsilon(norm: Any) -> Any:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _linears(module: Any, *names: str) -> list[Any] | None:
    linears = [own_linear(getattr(module, name, None)) for name in names]
    return linears if all(is_plain_linear(linear) for linear in linears) else None
