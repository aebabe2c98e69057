"""Fields of GGUF files that transformers does not read, added to the config that it makes.

Without them the model would run with other numbers than its file says.  What a config cannot say is
refused by name.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from pagedserve.errors import ModelLoadError
from pagedserve.models.families.record import DecoderFamily
from pagedserve.models.families.table import family_of_gguf
from pagedserve.models.load.gguf_header import BIASES, GgufHeader, end_token_ids, rope_scaling

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import PretrainedConfig

_DIVISORS: Final = "rope_freqs.weight"
# Divisors of short and of long sequences.
_SETS: Final = "rope_factors_"
# What Llama 3.1 to 3.3 were trained with, besides the factor.
_LLAMA3: Final = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# Fields of a config whose layers differ, by keys after the architecture.
_OF_LAYERS: Final = {
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "attention.key_length_swa": "head_dim",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
}
# Parts of the names of weights that make keys and values.
_KEYS_AND_VALUES: Final = ("k", "k_norm", "v")
_LAYER_TYPES: Final = ("full_attention", "sliding_attention")
# Name in files, and in transformers' map, of the factor of a layer's output.
_SCALE: Final = re.compile(r"(blk\.\d+\.layer_output_scale)\.weight")


def name_in_transformers(tensor: str) -> str:
    """Name that transformers' map has for a tensor of a file."""
    return _SCALE.sub(r"\1", tensor)


def fields_of_layers(header: GgufHeader) -> dict[str, Any]:
    """Fields of a config by the values that a file lists for its layers; empty without a list."""
    architecture = header.fields.get("general.architecture")
    start = f"{architecture}."
    given = {
        name.removeprefix(start): value
        for name, value in header.fields.items()
        if name.startswith(start)
    }
    if not isinstance(windows := given.get("attention.sliding_window_pattern"), list):
        return {}
    found = {field: given[key] for key, field in _OF_LAYERS.items() if key in given}
    found["layer_types"] = [_LAYER_TYPES[bool(is_window)] for is_window in windows]
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    if (shape := shapes.get("per_layer_token_embd.weight")) is not None:
        found["vocab_size_per_layer_input"] = shape[0]
    if isinstance(sizes := given.get("feed_forward_length"), list):
        found |= {"intermediate_size": min(sizes), "use_double_wide_mlp": min(sizes) < max(sizes)}
    if isinstance(heads := given.get("attention.head_count_kv"), list):
        by_type = dict(zip(found["layer_types"], heads, strict=True))
        found["num_global_key_value_heads"], found["num_key_value_heads"] = (
            by_type.get(kind) for kind in _LAYER_TYPES
        )
    if False in windows:
        values = f"blk.{windows.index(False)}.attn_v.weight"
        found["attention_k_eq_v"] = values not in shapes
    return found


def unused_tensors(config: "PretrainedConfig") -> list[str]:
    """Tensors of a file that no computation reads: keys and values of layers that reuse others'."""
    num_layers = config.num_hidden_layers
    shared = range(num_layers - getattr(config, "num_kv_shared_layers", 0), num_layers)
    return [f"blk.{layer}.attn_{part}.weight" for layer in shared for part in _KEYS_AND_VALUES]


def rope_divisors(reader: "GGUFReader") -> NDArray[np.float32] | None:
    """Divisors of the rotary frequencies, float32 ``[head size / 2]``; None without any."""
    found = next((tensor for tensor in reader.tensors if tensor.name == _DIVISORS), None)
    return None if found is None else np.array(found.data, np.float32)


def complete_config(
    config: "PretrainedConfig", header: GgufHeader, divisors: NDArray[np.float32] | None
) -> None:
    """Add what a file says of attention, rotary embeddings and the tokens that end a sequence.

    Args:
        config: As transformers made it of the file; changed.
        header: Header of the file.
        divisors: As ``rope_divisors`` found them.

    Raises:
        ModelLoadError: The file has a rotary embedding that a config cannot say.
    """
    if len(ends := end_token_ids(header.fields)) > 1:
        known = config.eos_token_id
        more = known if isinstance(known, list) else []  # of Gemma 4
        config.eos_token_id = list(dict.fromkeys([*ends, *more]))
    names = {tensor.name for tensor in header.tensors}
    for field, tensor in BIASES.items():
        if hasattr(config, field):
            setattr(config, field, tensor in names)
    architecture = str(header.fields.get("general.architecture"))
    _complete_attention(config, architecture, header.fields)
    parameters = _full_attention(config)
    # Scaled as transformers reads it (gpt-oss), or as its class has it (Gemma 4).
    if parameters.get("rope_type", "default") != "default":
        return
    if any(name.startswith(_SETS) for name in names):
        raise _unreadable(f"it has {_SETS}long and {_SETS}short")
    _check_head_sizes(config, architecture, header.fields)
    if (base := header.fields.get(f"{architecture}.rope.freq_base")) is not None:
        parameters["rope_theta"] = float(base)
    scaling = _scaling(architecture, header.fields)
    if scaling and divisors is not None:
        raise _unreadable(f"it has {_DIVISORS} beside {scaling}")
    if divisors is not None:
        scaling = {**_LLAMA3, "factor": float(divisors.max())}
    parameters.update(scaling)
    if divisors is not None and not _divides_so(config, divisors):
        raise _unreadable(f"its {_DIVISORS} are not those of Llama 3")


def _complete_attention(
    config: "PretrainedConfig", architecture: str, fields: Mapping[str, Any]
) -> None:
    """Add the scale, the caps, the direction and the windows of attention."""
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if (cap := fields.get(f"{architecture}.{name}")) is not None and hasattr(config, name):
            setattr(config, name, float(cap))
    if fields.get(f"{architecture}.attention.causal") is False:
        config.is_causal = False
    family = family_of_gguf(architecture)
    if not isinstance(family, DecoderFamily):
        return
    if (score_size := family.score_size(config.to_dict())) is not None:
        config.query_pre_attn_scalar = score_size
    if family.has_local_rope and f"{architecture}.attention.sliding_window" not in fields:
        config.layer_types = ["full_attention"] * config.num_hidden_layers


def _check_head_sizes(
    config: "PretrainedConfig", architecture: str, fields: Mapping[str, Any]
) -> None:
    """Check that heads, and the rotated part of each, have the sizes that a file gives.

    Raises:
        ModelLoadError: One has another size in the config.
    """
    if not (parameters := _full_attention(config)):
        return
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = int(size * parameters.get("partial_rotary_factor", 1.0))
    for key, known in (("attention.key_length", size), ("rope.dimension_count", rotated)):
        if fields.get(f"{architecture}.{key}", known) != known:
            raise _unreadable(f"{key} is {str(fields[f'{architecture}.{key}'])[:80]}, not {known}")


def _scaling(architecture: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a scaled rotary embedding, as a config has them; empty without scaling."""
    kind, factor = rope_scaling(architecture, fields)
    if kind == "none":
        return {}
    scaling = {"rope_type": kind, "factor": float(factor or 1.0)}
    original = fields.get(f"{architecture}.rope.scaling.original_context_length")
    if kind == "yarn" and original:
        return scaling | {"original_max_position_embeddings": int(original)}
    if kind != "linear":
        raise _unreadable(f"rope.scaling.type is {str(kind)[:80]!r}")
    return scaling


def _full_attention(config: "PretrainedConfig") -> dict[str, Any]:
    """Rotary parameters of a config: where types of layers have theirs, those of full attention."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    nested = parameters.get("full_attention")
    return parameters if nested is None else nested


def _divides_so(config: "PretrainedConfig", divisors: NDArray[np.float32]) -> bool:
    """Whether a config divides its frequencies by these numbers."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].numpy()
    size = 2 * len(scaled)
    theta = float(_full_attention(config)["rope_theta"])
    plain = theta ** (-np.arange(0, size, 2, dtype=np.float64) / size)
    return divisors.shape == scaled.shape and np.allclose(plain / scaled, divisors, rtol=1e-3)


def _unreadable(what: str) -> ModelLoadError:
    return ModelLoadError(
        f"{what}, which transformers does not read from GGUF files: give the model's directory"
    )
