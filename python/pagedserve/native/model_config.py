"""What a ``config.json`` means for the native backend.

It is read as transformers does, defaults of its classes included; the metadata of a GGUF file
become the same fields first (`pagedserve.native.gguf_config`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pagedserve.config.precision import quantization_of_files
from pagedserve.models.families.record import DecoderFamily
from pagedserve.models.load.config_checks import check_positive
from pagedserve.models.rotary import ROPE_TYPES, Rope
from pagedserve.native.choice import OTHER_BACKEND
from pagedserve.native.config import DecoderConfig, Head, LayerConfig
from pagedserve.native.families import UnsupportedError, decoder_family

# Fields whose null is a value: the class's default is another.
_NULLABLE: Final = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "head_dim",
    "num_key_value_heads",
    "sliding_window",
)
# Fields that each type of rotary scaling needs.
_ROPE_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def decoder_config(content: Mapping[str, Any]) -> DecoderConfig:
    """What a model computes, by its ``config.json``, whose sizes were checked.

    Args:
        content: Contents of the file, as `pagedserve.models.load.config_checks` accepts them.

    Raises:
        UnsupportedError: The family, or a field of it.
        ValueError: Sizes are missing or do not fit each other.
    """
    family = decoder_family(content)
    given = {
        name: value
        for name, value in content.items()
        if name not in family.ignored and (value is not None or name in _NULLABLE)
    }
    fields = {**family.defaults, **given}
    _refuse(family, fields)
    return _config(family, fields)


def _refuse(family: DecoderFamily, fields: Mapping[str, Any]) -> None:
    """Refuse fields that change what a layer computes."""
    act = fields.get("hidden_activation") or fields.get("hidden_act")
    refused = {
        "quantization_config": bool(fields.get("quantization_config")),
        "mlp_bias": bool(fields.get("mlp_bias")),
        "use_bidirectional_attention": bool(fields.get("use_bidirectional_attention")),
        "is_causal": fields.get("is_causal") is False,
        "partial_rotary_factor": fields.get("partial_rotary_factor", 1) != 1,
        "hidden_act": act is not None and act not in family.activations,
    }
    for name, is_refused in refused.items():
        if is_refused:
            value = act if name == "hidden_act" else fields[name]
            raise UnsupportedError(
                f"{name} is {str(value)[:80]}, which the native backend does not support for "
                f"model_type {family.model_type!r}{_without_option(value)}: {OTHER_BACKEND}"
            )


def _without_option(value: object) -> str:
    """Clause that names the option for files of a quantization_config; "" if none reads them."""
    option = quantization_of_files(value)
    return f" without quantization={option!r}" if option else ""


def _config(family: DecoderFamily, fields: Mapping[str, Any]) -> DecoderConfig:
    hidden_size, num_heads = _size(fields, "hidden_size"), _size(fields, "num_attention_heads")
    head_size = int(fields.get("head_dim") or hidden_size // num_heads)
    positions = fields.get("max_position_embeddings", -1)
    has_bias = bool(fields.get("attention_bias"))
    has_qkv_bias = has_bias if family.has_biases is None else family.has_biases
    layers = tuple(_layers(family, fields, _size(fields, "num_hidden_layers")))
    max_positions, reason = _positions(family, positions, layers)
    return DecoderConfig(
        family=family,
        vocab_size=_size(fields, "vocab_size"),
        hidden_size=hidden_size,
        inner_size=_size(fields, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=int(fields.get("num_key_value_heads") or num_heads),
        head_size=head_size,
        epsilon=float(fields.get("rms_norm_eps", 1e-6)),
        scale=_scale(fields.get("query_pre_attn_scalar", head_size)),
        score_softcap=_cap(fields, "attn_logit_softcapping"),
        has_qkv_bias=has_qkv_bias,
        has_output_bias=family.has_biases is None and has_bias,
        head=Head(
            num_outputs=_size(fields, "vocab_size"),
            is_tied=bool(fields.get("tie_word_embeddings", False)),
            softcap=_cap(fields, "final_logit_softcapping"),
        ),
        max_positions=max_positions,
        max_positions_reason=reason,
        eos_token_id=fields.get("eos_token_id"),
        layers=layers,
    )


def _positions(
    family: DecoderFamily, given: float, layers: Sequence[LayerConfig]
) -> tuple[int | None, str]:
    """Number of positions, and the reason; see `pagedserve.models.limits.derive_max_model_len`."""
    reason = f"its max_position_embeddings is {int(given)}"
    if given <= 0:
        return None, reason
    ropes = [] if family.has_local_rope else [layer.rope for layer in layers]
    factors = [rope.factor for rope in ropes if rope is not None and rope.kind == "linear"]
    if (factor := max(factors, default=1.0)) <= 1:
        return int(given), reason
    reason = f"its 'linear' rotary embedding has a factor of {factor}, and {reason}"
    return int(given * factor), reason


def _layers(family: DecoderFamily, fields: Mapping[str, Any], num_layers: int) -> list[LayerConfig]:
    is_sliding = _sliding_layers(family, fields, num_layers)
    has_rope = _rotated_layers(fields, num_layers)
    window = fields.get("sliding_window")
    if window is None:
        is_sliding = [False] * num_layers
    elif any(is_sliding) and (type(window) is not int or window < 1):
        raise ValueError(f"sliding_window is {window}; it must be an integer from 1")
    ropes = {sliding: _rope(family, fields, is_sliding=sliding) for sliding in set(is_sliding)}
    return [
        LayerConfig(ropes[sliding] if rotated else None, window if sliding else None)
        for sliding, rotated in zip(is_sliding, has_rope, strict=True)
    ]


def _sliding_layers(
    family: DecoderFamily, fields: Mapping[str, Any], num_layers: int
) -> list[bool]:
    """Which layers have the sliding window."""
    types, windows, layers = fields.get("layer_types"), family.windows, range(num_layers)
    # With the switch off, layers ignore their types.
    is_off = "use_sliding_window" in fields and not fields["use_sliding_window"]
    if types is not None:
        known = {"full_attention": False, "sliding_attention": True}
        if not isinstance(types, list) or len(types) < num_layers or set(types) - set(known):
            raise UnsupportedError(
                f"layer_types is {str(types)[:80]}; it must name {num_layers} layers as one of "
                f"{', '.join(known)}"
            )
        return [not is_off and known[name] for name in types[:num_layers]]
    if windows == "all":
        return [True] * num_layers
    if windows == "all but the last":
        every = int(fields["sliding_window_pattern"])
        return [bool((layer + 1) % every) for layer in layers]
    if is_off or windows == "none":
        return [False] * num_layers
    if windows == "unrotated":
        return [not rotated for rotated in _rotated_layers(fields, num_layers)]
    return [layer >= fields["max_window_layers"] for layer in layers]


def _rotated_layers(fields: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Which layers have rotary embeddings."""
    given = fields.get("no_rope_layers")
    if given is not None:
        if not isinstance(given, list) or len(given) < num_layers:
            raise ValueError(
                f"no_rope_layers is {str(given)[:80]}; it must have {num_layers} flags"
            )
        return [bool(flag) for flag in given[:num_layers]]
    every = fields.get("no_rope_layer_interval")
    return [every is None or (layer + 1) % int(every) != 0 for layer in range(num_layers)]


def _rope(family: DecoderFamily, fields: Mapping[str, Any], *, is_sliding: bool) -> Rope:
    """Rotary parameters of layers."""
    is_local = family.has_local_rope and is_sliding
    kind = "sliding_attention" if is_sliding else "full_attention"
    parameters = _rope_parameters(family, fields, kind)
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type not in ROPE_TYPES or parameters.get("partial_rotary_factor", 1) != 1:
        raise UnsupportedError(
            f"rope_type is {str(rope_type)[:80]!r}, of parameters {str(dict(parameters))[:200]}; "
            f"the native backend has {', '.join(ROPE_TYPES)}, of whole heads: {OTHER_BACKEND}"
        )
    if absent := [name for name in _ROPE_FIELDS[rope_type] if name not in parameters]:
        raise ValueError(f"rope_type is {rope_type!r}, which needs {', '.join(absent)}")
    theta = fields["rope_local_base_freq"] if is_local else fields.get("rope_theta", 10_000.0)
    original = parameters.get("original_max_position_embeddings")
    return Rope(
        theta=float(parameters.get("rope_theta") or theta),
        kind=rope_type,
        original_positions=int(original or fields.get("max_position_embeddings", 0)),
        divisors=tuple(fields.get("rope_divisors", ())),
        **{name: float(parameters[name]) for name in _ROPE_FIELDS[rope_type]},
    )


def _rope_parameters(
    family: DecoderFamily, fields: Mapping[str, Any], kind: str
) -> Mapping[str, Any]:
    """Rotary parameters of a kind of layers, with transformers' precedence of the two fields."""
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(fields.get(name, {}), Mapping):
            raise TypeError(f"{name} is {str(fields[name])[:80]}; it must be an object")
    given, scaling = fields.get("rope_parameters", {}), fields.get("rope_scaling", {})
    parameters: Mapping[str, Any]
    if not family.has_local_rope:
        parameters = scaling or given
        nested = parameters.get(kind)
        return nested if isinstance(nested, Mapping) else parameters
    if "type" in scaling:
        raise UnsupportedError(
            f"rope_scaling is {str(dict(scaling))[:200]}, of which transformers does not read "
            f"the type: give it as rope_type, or {OTHER_BACKEND}"
        )
    parameters = given[kind] if isinstance(given.get(kind), Mapping) else {}
    return {**parameters, **scaling} if kind == "full_attention" else parameters


def _size(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int:
        raise ValueError(f"{name} is {str(value)[:80]}; it must be an integer")
    return value


def _scale(size: Any) -> float:
    """Factor of the scores by the size that it is the root of."""
    check_positive({"query_pre_attn_scalar": float(size)})
    return 1.0 / math.sqrt(size)


def _cap(fields: Mapping[str, Any], name: str) -> float | None:
    value = fields.get(name)
    return None if value is None else float(value)
