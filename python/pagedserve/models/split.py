"""Whether tensor parallelism supports a model, from its config alone."""

from transformers import AutoModelForCausalLM

from pagedserve.config import EngineArgs
from pagedserve.errors import UnsupportedModelError
from pagedserve.models.files import architecture_of, find_model_files, quiet_transformers
from pagedserve.models.pooling import find_pooling
from pagedserve.models.towers import has_tower
from pagedserve.parallel.plan import read_plan


def check_split(args: EngineArgs) -> None:
    """Refuse a model that cannot be sharded over this many ranks.

    Raises:
        ModelLoadError: The model does not exist.
        UnsupportedModelError: It cannot be sharded; gives the reason.
    """
    with quiet_transformers():
        files = find_model_files(args)
        config = files.hf_config
        kinds = {
            "an encoder-decoder": config.is_encoder_decoder,
            "a pooling model": find_pooling(args, files) is not None,
            "one that accepts images": has_tower(config),
        }
        for kind, is_it in kinds.items():
            if is_it:
                raise UnsupportedModelError(
                    f"tensor_parallel_size is {args.tensor_parallel_size}, and "
                    f"{architecture_of(config)} is {kind}: those are run by one process so far"
                )
        read_plan(AutoModelForCausalLM, config, args.tensor_parallel_size)
