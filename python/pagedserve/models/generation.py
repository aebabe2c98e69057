"""What a model's generation config says: the tokens that end a sequence, how its makers sample."""

from collections.abc import Mapping
from typing import Final

from transformers import GenerationConfig, PreTrainedConfig

# Their names in transformers, and ours.
_SAMPLING_NAMES: Final = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


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


def recommended_sampling(generation_config: GenerationConfig | None) -> Mapping[str, float]:
    """What the model's makers recommend, by the names of ``SamplingParams``.

    Defaults of transformers are left out.
    """
    if generation_config is None:
        return {}
    stated = generation_config.to_diff_dict()
    named = {name: stated.get(theirs) for theirs, name in _SAMPLING_NAMES.items()}
    return {name: value for name, value in named.items() if value is not None}
