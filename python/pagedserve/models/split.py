"""Whether tensor parallelism supports a model, from its config alone."""

from pagedserve.config import EngineArgs
from pagedserve.models.load.files import find_model_files, quiet_transformers
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
        rules = None if pooling is None else pooling.rules
        is_encoder = pooling is not None and pooling.is_encoder
        auto_class = class_to_load(config, rules, is_encoder=is_encoder)
        read_plan(auto_class, config, args.tensor_parallel_size)
