"""Checks and resources of a server before the model's libraries are imported."""

from dataclasses import dataclass
from typing import BinaryIO

from pagedserve.config import EngineArgs
from pagedserve.decisions.calibration import Calibration
from pagedserve.errors import ConfigError
from pagedserve.inputs.chat import read_chat_template
from pagedserve.server.files.lock import lock_directory
from pagedserve.server.http.listen import Listener, allow_descriptors, listen
from pagedserve.server.options import LoraModule, ServerArgs


@dataclass(frozen=True, slots=True)
class Prepared:
    """Resources of a server before its engine.

    Attributes:
        listener: Socket that listens; connections wait until the server accepts them.
        batch_lock: Holds the lock of the directory of batches; None without one.
        chat_template: Text of the template that the options name; None uses the model's own.
        calibration: Temperatures of typed decisions.
    """

    listener: Listener
    batch_lock: BinaryIO | None
    chat_template: str | None
    calibration: Calibration


def prepare(engine_args: EngineArgs, server_args: ServerArgs) -> Prepared:
    """Read the files that the options name, and listen.

    Raises:
        ConfigError: Options that contradict each other, a file that cannot be read, or an address
            or a directory that is in use or cannot be used.
    """
    chat_template = read_files(engine_args, server_args)
    path = server_args.decision_calibration
    calibration = Calibration() if path is None else Calibration.load(path)
    directory = server_args.batch_directory
    batch_lock = None if directory is None else lock_directory(directory)
    allow_descriptors()
    return Prepared(listen(server_args), batch_lock, chat_template, calibration)


def read_files(engine_args: EngineArgs, server_args: ServerArgs) -> str | None:
    """Read the chat template that the options name; None uses the model's own.

    Raises:
        ConfigError: The file cannot be read, or adapters are given that the engine cannot take, or
            whose names are taken.
    """
    if server_args.lora_modules and not engine_args.enable_lora:
        raise ConfigError("lora_modules is given without enable_lora; give both")
    taken = {*server_args.model_names(engine_args.model)}
    for name in (LoraModule.parse(text).name for text in server_args.lora_modules):
        if name in taken:
            raise ConfigError(
                f"lora_modules has the name {name!r}, which the model or another adapter has; "
                "give each a separate name"
            )
        taken.add(name)
    return read_chat_template(server_args.chat_template)
