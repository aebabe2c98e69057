"""Whether tensor parallelism supports a model, from its config alone."""

from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
)

from pagedserve.config import EngineArgs
from pagedserve.errors import UnsupportedModelError
from pagedserve.models.encoder_decoder import class_of
from pagedserve.models.families.towers import has_tower
from pagedserve.models.files import architecture_of, find_model_files, quiet_transformers
from pagedserve.models.pooling import Pooling, find_pooling
from pagedserve.parallel.plan import read_plan


def check_split(args: EngineArgs) -> None:
    """Refuse a model that cannot be sharded over this many ranks.

    Raises:
        ModelLoadError: The model does not exist.
        UnsupportedModelError: It cannot be sharded; gives the reason.
    """
    with quiet_transformers():
        files = find_model_files(args)
        config, pooling = files.hf_config, find_pooling(args, files)
        if pooling is not None and pooling.is_encoder:
            raise UnsupportedModelError(
                f"tensor_parallel_size is {args.tensor_parallel_size}, and "
                f"{architecture_of(config)} is an encoder, whose attention over whole texts is "
                "run by one process"
            )
        read_plan(_class_to_load(config, pooling), config, args.tensor_parallel_size)


def _class_to_load(config: PreTrainedConfig, pooling: Pooling | None) -> Any:
    """Class of transformers that a model is loaded with."""
    if config.is_encoder_decoder:
        return class_of(config)
    if pooling is not None and pooling.rules.classes is not None:
        return AutoModelForSequenceClassification
    return AutoModelForImageTextToText if has_tower(config) else AutoModelForCausalLM
