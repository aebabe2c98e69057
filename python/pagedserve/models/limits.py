"""Maximum sequence length and end-of-sequence tokens of a model, from its configs."""

import logging
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from pagedserve.errors import ConfigError, ModelLoadError
from pagedserve.models.families.table import family_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)

# Config names of the number of positions; the first that exists is used.
_LENGTH_NAMES = ("max_position_embeddings", "max_target_positions", "max_seq_len", "seq_length")

LONGROPE: Final = "longrope"
# These change the frequencies of every row by the largest position of the whole batch, so batches
# of several sequences are correct only below the length where that begins, unless
# `pagedserve.models.families.rope` fixes them.
_BATCH_DEPENDENT_ROPE = ("dynamic", LONGROPE)
# Rotary embeddings whose config has the number of positions before they are stretched.
_STRETCHING = ("linear", "yarn")


def derive_max_model_len(config: "PreTrainedConfig", requested: int | None) -> int:
    """Compute the maximum sequence length, in tokens.

    Args:
        config: config of the text model.
        requested: length that the user requested; None is the maximum, for longrope the original
            one.

    Raises:
        ConfigError: the requested length exceeds that of the model.
        ModelLoadError: neither the config nor the user sets it.
    """
    limit, reason = _stretched(config, *_num_positions(config))
    for parameters in _rope_parameters(config):
        rope_type = parameters.get("rope_type")
        if rope_type in _BATCH_DEPENDENT_ROPE:
            original = original_positions(config, parameters)
            if requested is not None and has_long_set(config):
                continue
            if original is not None and (limit is None or original <= limit):
                limit = original
                reason = (
                    f"its {rope_type!r} rotary embedding depends on the longest sequence of a "
                    f"batch beyond {original} tokens"
                )
    return check_max_model_len(requested, limit, reason)


def original_positions(config: "PreTrainedConfig", parameters: Mapping[str, Any]) -> int | None:
    """Number of positions after which the frequencies change; None if not in the config."""
    for value in (
        parameters.get("original_max_position_embeddings"),
        getattr(config, "original_max_position_embeddings", None),
        getattr(config, "max_position_embeddings", None),
    ):
        if value is not None:
            return int(value)
    return None


def has_long_set(config: "PreTrainedConfig") -> bool:
    """Whether the model can use the long set of LongRoPE for all sequences."""
    parameters = getattr(config, "rope_parameters", None) or {}
    is_longrope = parameters.get("rope_type") == LONGROPE
    return is_longrope and not family_of(config.model_type).ignores_long_rope


def num_positions(config: "PreTrainedConfig") -> int | None:
    """Number of positions of the model; None if its config does not set it."""
    return _num_positions(config)[0]


def _num_positions(config: "PreTrainedConfig") -> tuple[int | None, str]:
    """Number of positions of the model, and the reason as text; None if its config has none."""
    for name in _LENGTH_NAMES:
        number = getattr(config, name, None)
        if isinstance(number, int | float) and number > 0:  # XLNet has -1
            number = int(number)
            first = family_of(config.model_type).first_position(config)
            reason = f"its {name} is {number}"
            return number - first, reason + (f", of which it uses those from {first}" * bool(first))
    return None, "its config does not say how long"


def _stretched(
    config: "PreTrainedConfig", limit: int | None, reason: str
) -> tuple[int | None, str]:
    """Multiply the positions by the factor of a rotary embedding that stretches them, as vLLM does.

    Parameters for each type of layer, as of Gemma 3, come with the number after stretching.
    """
    parameters = getattr(config, "rope_parameters", None)
    if limit is None or not isinstance(parameters, Mapping):
        return limit, reason
    rope_type, factor = parameters.get("rope_type"), parameters.get("factor")
    if rope_type not in _STRETCHING or not isinstance(factor, int | float):
        return limit, reason
    original = parameters.get("original_max_position_embeddings") if rope_type == "yarn" else None
    stretched = (original or limit) * factor
    if not limit < stretched < math.inf:  # the config has the number after stretching
        return limit, reason
    reason = f"its {rope_type!r} rotary embedding has a factor of {factor}, and {reason}"
    return int(stretched), reason


def check_max_model_len(requested: int | None, limit: int | None, reason: str) -> int:
    """Return the requested length, or else the limit.

    Raises:
        ConfigError: the requested length exceeds the limit.
        ModelLoadError: neither is known.
    """
    if limit is None:
        if requested is None:
            raise ModelLoadError(
                f"the model's config names none of {', '.join(_LENGTH_NAMES)}: give max_model_len"
            )
        return requested
    if requested is not None and requested > limit:
        raise ConfigError(f"max_model_len is {requested}: this model takes up to {limit}, {reason}")
    return limit if requested is None else requested


def eos_token_ids(generation_config: object, config: object, vocab_size: int) -> tuple[int, ...]:
    """Tokens that end a sequence: the generation config's, else the model config's.

    Args:
        generation_config: generation config of the model, if it has one; its attribute
            ``eos_token_id`` counts, as of the next.
        config: config of the text model.
        vocab_size: rows of the embedding.  Some of several tokens may be beyond: those of another
            tokenizer are never generated.

    Raises:
        ModelLoadError: a value is not a token, or all are beyond the vocabulary.
    """
    for source, file in ((generation_config, "generation_config.json"), (config, "config.json")):
        given = getattr(source, "eos_token_id", None)
        if given is None or given == []:
            continue
        tokens = given if isinstance(given, list | tuple) else [given]
        if not all(type(token) is int for token in tokens):
            raise ModelLoadError(
                f"eos_token_id of {file} is {str(given)[:80]!r}; it must be a token, or a list of "
                "tokens"
            )
        known = tuple(token for token in tokens if 0 <= token < vocab_size)
        if not known:
            raise ModelLoadError(
                f"eos_token_id of {file} is {str(given)[:80]}; the model's tokens are 0 to "
                f"{vocab_size - 1}, so nothing would end a sequence: give one of those, or null"
            )
        if len(known) < len(tokens):
            beyond = [token for token in tokens if token not in known]
            logger.warning(
                "eos_token_id of %s has %s, beyond the model's %d tokens: never generated",
                file,
                beyond[:8],
                vocab_size,
            )
        return known
    return ()


def _rope_parameters(config: "PreTrainedConfig") -> Iterator[Mapping[str, Any]]:
    """Rotary parameters, which are one mapping or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, Mapping):
        return
    yield parameters
    for value in parameters.values():
        if isinstance(value, Mapping):
            yield value
