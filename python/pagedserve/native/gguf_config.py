"""The metadata of a GGUF file as the fields of a ``config.json``."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from pagedserve.models.families.record import DecoderFamily
from pagedserve.models.families.table import DECODERS, family_of_gguf
from pagedserve.models.load.gguf_header import BIASES, end_token_ids, rope_scaling
from pagedserve.native.choice import OTHER_BACKEND
from pagedserve.native.families import UnsupportedError
from pagedserve.native.gguf_file import GgufFile
from pagedserve.native.stored import StoredTensor

_ROPE_DIVISORS: Final = "rope_freqs.weight"
# Fields of a config, by keys after the architecture.
_KEYS: Final = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.causal": "is_causal",
    "rope.freq_base": "rope_theta",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


def config_of_gguf(gguf: GgufFile) -> dict[str, Any]:
    """Fields of a ``config.json`` for the model of a file.

    Raises:
        UnsupportedError: The architecture, or its rotary embedding.
        ValueError: A field is missing.
    """
    family = _family_of(gguf.fields)
    fields = _fields_of(family, gguf.fields)
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError("it has no 'token_embd.weight'")
    head_size = fields.setdefault("head_dim", _head_size(family, fields, gguf.fields))
    num_rotated = _own(family, gguf.fields, "rope.dimension_count", head_size)
    if num_rotated != head_size:
        raise UnsupportedError(
            f"rope.dimension_count is {num_rotated}; the native backend rotates whole heads, here "
            f"of {head_size}: {OTHER_BACKEND}"
        )
    if (score_size := family.score_size(fields)) is not None:
        fields["query_pre_attn_scalar"] = score_size
    divisors = gguf.tensors.get(_ROPE_DIVISORS)
    scaling = _rope_scaling(family, gguf.fields)
    if divisors is not None and scaling:
        raise UnsupportedError(
            f"it has {_ROPE_DIVISORS} beside rope.scaling.type {scaling['rope_type']!r}; "
            f"the native backend applies one of them: {OTHER_BACKEND}"
        )
    return fields | {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        **{field: tensor in gguf.tensors for field, tensor in BIASES.items()},
        "eos_token_id": end_token_ids(gguf.fields) or None,
        "rope_scaling": scaling,
        "rope_divisors": () if divisors is None else _numbers(divisors, head_size // 2),
    }


def _family_of(metadata: Mapping[str, Any]) -> DecoderFamily:
    name = str(metadata.get("general.architecture"))
    family = family_of_gguf(name)
    if not isinstance(family, DecoderFamily):
        known = ", ".join(family.gguf for family in DECODERS if family.gguf is not None)
        raise UnsupportedError(
            f"general.architecture is {name[:80]!r}; the native backend has {known}: "
            f"{OTHER_BACKEND}"
        )
    return family


def _own(family: DecoderFamily, metadata: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Value of a key of the architecture."""
    return metadata.get(f"{family.gguf}.{key}", default)


def _fields_of(family: DecoderFamily, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that have a key in the file."""
    values = {field: _own(family, metadata, key) for key, field in _KEYS.items()}
    fields = {field: value for field, value in values.items() if value is not None}
    for field in ("hidden_size", "num_attention_heads"):
        if type(fields.get(field)) is not int or fields[field] < 1:
            given = str(fields.get(field))[:80]  # an array may be long
            raise ValueError(f"its {field} is {given}; it must be an integer from 1")
    if family.has_local_rope:  # without the key there are no windows, whatever a class's default
        fields.setdefault("sliding_window", None)
    # Without it there are as many as query heads, whatever a class's default.
    fields.setdefault("num_key_value_heads", fields["num_attention_heads"])
    return fields


def _head_size(
    family: DecoderFamily, fields: Mapping[str, Any], metadata: Mapping[str, Any]
) -> int:
    """Size of a head where no key gives it."""
    default = family.defaults.get("head_dim")
    if default is None and family.interleaves:
        default = _own(family, metadata, "rope.dimension_count")
    return int(default or fields["hidden_size"] // fields["num_attention_heads"])


def _rope_scaling(family: DecoderFamily, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary scaling of layers with full attention, besides the divisors of frequencies."""
    kind, factor = rope_scaling(str(family.gguf), metadata)
    if kind == "none":
        return {}
    return {"rope_type": kind, "factor": 1.0 if factor is None else factor}


def _numbers(tensor: StoredTensor, num: int) -> tuple[float, ...]:
    if tensor.storage != "F32" or tensor.shape != (num,):
        raise ValueError(f"{tensor.name!r} is {tensor.shape} of {tensor.storage}; it must be {num}")
    found = np.frombuffer(tensor.read(), np.float32)
    if not (np.isfinite(found).all() and (found > 0).all()):
        raise ValueError(f"{tensor.name!r} must have finite numbers above 0")
    return tuple(found.tolist())
