"""Whether tensor parallelism supports a model, from its config alone."""

from pagedserve.config import EngineArgs
from pagedserve.errors import UnsupportedModelError
from pagedserve.models.load.files import architecture_of, find_model_files, quiet_transformers
from pagedserve.models.load.read import class_to_load
from pagedserve.models.pooling import find_pooling
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
        rules = None if pooling is None else pooling.rules
        read_plan(class_to_load(config, rules), config, args.tensor_parallel_size)
