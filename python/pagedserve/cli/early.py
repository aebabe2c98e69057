"""Checks of a command before torch and transformers are imported, which takes seconds."""

from pagedserve.config import EngineArgs
from pagedserve.errors import ConfigError
from pagedserve.extras import check_installed
from pagedserve.native.choice import check_backend, may_have_gpu


def check_early(args: EngineArgs, command: str, extras: str) -> None:
    """Refuse what can be refused before the model is known.

    Args:
        args: Options of the engine.
        command: Name of the command, for messages.
        extras: Extras that it needs, with commas between them.

    Raises:
        ImportError: Packages are missing.
        ConfigError: Options that this machine cannot satisfy.
        ModelLoadError: A path that does not exist or holds no model.
    """
    check_installed(command, extras)
    check_backend(args)
    _check_device(args)
    _check_files(args)


def _check_device(args: EngineArgs) -> None:
    if may_have_gpu():
        return
    if args.device.startswith("cuda"):
        raise ConfigError(
            f"device is {args.device!r}, and this machine has no GPU driver: give 'cpu' or 'auto'"
        )
    args.check_without_gpu()


def _check_files(args: EngineArgs) -> None:
    from pagedserve.engine.defaults import default_sampling_params
    from pagedserve.models.load.hub import HubOptions
    from pagedserve.models.load.sources import find_local, find_local_source

    find_local_source(args)
    if args.tokenizer is not None:
        find_local(args.tokenizer, part="tokenizer", hub=HubOptions.of_tokenizer(args))
    drafts = args.speculative_config
    if drafts is not None and drafts.model is not None:
        find_local(drafts.model)
    if args.generation_config != "auto":
        default_sampling_params(args)
