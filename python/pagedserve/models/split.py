"""Whether ranks can share a model, told before anything of it is read but its config."""

from transformers import AutoModelForCausalLM

from pagedserve.config import EngineArgs
from pagedserve.errors import ConfigError, UnsupportedModelError
from pagedserve.models.files import architecture_of, find_model_files, quiet_transformers
from pagedserve.models.pooling import find_pooling
from pagedserve.models.towers import has_tower
from pagedserve.parallel.plan import read_plan


def check_split(args: EngineArgs) -> None:
    """Refuse a model that so many ranks cannot share.

    Raises:
        ModelLoadError: There is no such model.
        UnsupportedModelError: It cannot be shared, and why.
        ConfigError: Its weights are to be made up.
    """
    if args.load_format == "dummy":
        raise ConfigError(
            "load_format is 'dummy', and ranks read their parts of a model's files: save the model"
        )
    with quiet_transformers():
        files = find_model_files(args)
        config = files.hf_config
        kinds = {
            "an encoder-decoder": config.is_encoder_decoder,
            "one that pools": find_pooling(args, files) is not None,
            "one that sees images": has_tower(config),
        }
        for kind, is_it in kinds.items():
            if is_it:
                raise UnsupportedModelError(
                    f"tensor_parallel_size is {args.tensor_parallel_size}, and "
                    f"{architecture_of(config)} is {kind}: those are run by one process so far"
                )
        read_plan(AutoModelForCausalLM, config, args.tensor_parallel_size)
