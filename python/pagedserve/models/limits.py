"""How long a sequence of a model may be, and which tokens end it: read from its configs."""

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from pagedserve.errors import ConfigError, ModelLoadError
from pagedserve.models.architectures.positions import first_position
from pagedserve.models.architectures.rope import has_long_set, original_positions

# What configs call the number of positions; a later name counts where the earlier ones are absent.
_LENGTH_NAMES = ("max_position_embeddings", "max_target_positions", "max_seq_len", "seq_length")

# These change the frequencies of every row by the largest position of the whole batch, so in a
# batch of several sequences they are right only below the length where that begins, unless
# `pagedserve.models.architectures.rope` fixes them.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


def derive_max_model_len(config: PreTrainedConfig, requested: int | None) -> int:
    """The longest sequence, in tokens.

    Args:
        config: of the text model.
        requested: what the user asks for, or None, which for longrope is the original length.

    Raises:
        ConfigError: if the user asks for more than the model can do.
        ModelLoadError: if the config does not say and nor does the user.
    """
    limit, reason = _num_positions(config)
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


def num_positions(config: PreTrainedConfig) -> int | None:
    """Positions that the model has; None if its config does not say."""
    return _num_positions(config)[0]


def _num_positions(config: PreTrainedConfig) -> tuple[int | None, str]:
    """Positions that the model has, and the reason in words; None if its config does not say."""
    for name in _LENGTH_NAMES:
        number = getattr(config, name, None)
        if number is not None and number > 0:  # XLNet says -1
            first = first_position(config)
            reason = f"its {name} is {number}"
            return number - first, reason + (f", of which it uses those from {first}" * bool(first))
    return None, "its config does not say how long"


def check_max_model_len(requested: int | None, limit: int | None, reason: str) -> int:
    """The length requested, or else the limit.

    Raises:
        ConfigError: if more is requested than the limit.
        ModelLoadError: if neither is known.
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


def eos_token_ids(
    generation_config: GenerationConfig | None, config: PreTrainedConfig
) -> tuple[int, ...]:
    """Tokens that end a sequence: the generation config's, else the model config's."""
    for source in (generation_config, config):
        ids = getattr(source, "eos_token_id", None)
        if isinstance(ids, int):
            return (ids,)
        if ids:
            return tuple(int(token) for token in ids)
    return ()


def _rope_parameters(config: PreTrainedConfig) -> Iterator[Mapping[str, Any]]:
    """The rotary parameters, which are one mapping or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, Mapping):
        return
    yield parameters
    for value in parameters.values():
        if isinstance(value, Mapping):
            yield value
