"""Checks of the sizes in a ``config.json``, before anything is built from it.

A config is untrusted.  transformers builds what it describes: a model of 10^9 layers takes an hour,
one without heads fails, and one whose rotary base is 0 silently gives wrong tokens.

Invariants:

1. Fields are checked where they are in the file, of the whole model and of each part
   (``text_config`` and the like); an absent or null field is left to its class.
2. Values of real checkpoints are accepted: a list with a number per layer, -1 for unlimited
   positions, a head size that does not follow from the hidden size.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

_SHOWN_CHARACTERS: Final = 80
# A check returns what is accepted; None for a valid value.
_Check: TypeAlias = Callable[[Any], str | None]


def _size(most: int, least: int = 1) -> _Check:
    """Check for an integer, or a list of them per layer, of which some may be none."""

    def check(value: Any) -> str | None:
        values = value if isinstance(value, list) and value else [value]
        low = 0 if values is value else least
        accepted = all(type(number) is int and low <= number <= most for number in values)
        return None if accepted else f"an integer from {least} to {most}"

    return check


def _positions(value: Any) -> str | None:
    is_whole = _is_number(value) and value == value // 1  # some configs have 1200.0
    accepted = is_whole and (value == -1 or 1 <= value <= _MOST_POSITIONS)
    return None if accepted else f"an integer from 1 to {_MOST_POSITIONS}, or -1"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _epsilon(value: Any) -> str | None:
    return None if _is_number(value) and 0 <= value < 1 else "a number from 0 to below 1"


def _positive(value: Any) -> str | None:
    accepted = _is_number(value) and 0 < value < _MOST_NUMBER
    return None if accepted else "a finite number above 0"


def _names(value: Any) -> str | None:
    accepted = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return None if accepted else "a list of names"


def _name(value: Any) -> str | None:
    return None if isinstance(value, str) else "a name"


def _object(value: Any) -> str | None:
    return None if isinstance(value, Mapping) else "an object"


_MOST_POSITIONS: Final = 1 << 31
_MOST_NUMBER: Final = 1e30

MAX_LAYERS: Final = 4096
MAX_HEADS: Final = 1 << 16
MAX_FEATURES: Final = 1 << 24


def _table(rows: Iterable[tuple[str, _Check]]) -> dict[str, _Check]:
    return {name: check for names, check in rows for name in names.split()}


_CHECKS: Final = _table(
    [
        ("architectures", _names),
        ("model_type", _name),
        ("quantization_config", _object),
        ("num_hidden_layers n_layer n_layers num_layers num_decoder_layers", _size(MAX_LAYERS)),
        ("encoder_layers decoder_layers", _size(MAX_LAYERS)),
        ("num_attention_heads n_head n_heads num_heads num_key_value_heads", _size(MAX_HEADS)),
        ("num_kv_heads encoder_attention_heads decoder_attention_heads", _size(MAX_HEADS)),
        ("hidden_size n_embd d_model d_kv vocab_size", _size(MAX_FEATURES)),
        ("head_dim", _size(MAX_FEATURES, least=0)),  # 0 if other fields define it
        ("intermediate_size d_ff ffn_dim n_inner moe_intermediate_size", _size(MAX_FEATURES)),
        ("max_position_embeddings n_positions max_seq_len max_target_positions", _positions),
        ("rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon", _epsilon),
        ("rope_theta rotary_emb_base global_rope_theta local_rope_theta", _positive),
        ("rope_local_base_freq factor", _positive),
    ]
)
# Objects whose fields are checked too, besides those that end in _config.
_ROPE: Final = ("rope_parameters", "rope_scaling")


def check_config(content: Mapping[str, Any], *, is_text: bool = True) -> None:
    """Check the fields of a config as in the file.

    Args:
        content: Contents of the file, or of a part of it.
        is_text: Whether it is for a text model; other parts may have 0 or -1 for absent features.

    Raises:
        ValueError: Names the invalid field, its value, and what is accepted.
    """
    for name, value in content.items():
        is_part = name.endswith("_config") and name != "quantization_config"
        if isinstance(value, Mapping) and (is_part or name in _ROPE):
            _check_part(name, value)
        elif value is not None and name in _CHECKS and (is_text or value not in (0, -1)):
            accepted = _CHECKS[name](value)
            if accepted is not None:
                raise ValueError(f"{name} is {_shown(value)}; it must be {accepted}")
    _check_key_heads(content)


def _check_part(name: str, part: Mapping[str, Any]) -> None:
    """Check a part, or rotary parameters, which may be an object for each type of layer."""
    try:
        check_config(part, is_text=name in ("text_config", *_ROPE))
        for kind, parameters in part.items() if name in _ROPE else ():
            if isinstance(parameters, Mapping):
                _check_part(kind, parameters)
    except ValueError as error:
        raise ValueError(f"{name}.{error}") from None


def _check_key_heads(content: Mapping[str, Any]) -> None:
    heads, key_heads = content.get("num_attention_heads"), content.get("num_key_value_heads")
    if not (type(heads) is int and type(key_heads) is int):
        return
    if heads > 0 < key_heads and heads % key_heads:  # a part may have 0 or -1
        raise ValueError(
            f"num_key_value_heads is {key_heads}; it must divide num_attention_heads, {heads}"
        )


def _shown(value: Any) -> str:
    shown = repr(value[:_SHOWN_CHARACTERS] if isinstance(value, str) else value)
    return shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[:_SHOWN_CHARACTERS]}..."


def check_positive(numbers: Mapping[str, float | None]) -> None:
    """Check numbers of a config, of which None is absent.

    Raises:
        ValueError: Names the first one that is not finite and above 0.
    """
    for name, value in numbers.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} is {value}; it must be finite and above 0")
