"""Loading of a native model's weights while the modules that run it are still imported.

Packing needs two cores and no Python, imports need Python and one core.  A command begins to load
as soon as its options are checked; the engine that is then made of equal options takes the result.

Owns at most one load, from ``load_ahead`` to ``take_ahead``.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from pagedserve.config import EngineArgs
from pagedserve.config.precision import DIRECTORY_QUANTIZATIONS
from pagedserve.errors import ModelLoadError
from pagedserve.models.load.sources import ModelSource, find_local_source
from pagedserve.native.choice import OTHER_BACKEND, BackendChoice, choose_backend

if TYPE_CHECKING:
    from pagedserve.native.load import LoadedNative, OpenedModel


class OpenedFiles(NamedTuple):
    """Files of a model, and the backend that they leave.

    Attributes:
        source: Location of the files.
        backend: The backend.
        opened: The opened files; None for torch, which opens them itself.
    """

    source: ModelSource
    backend: BackendChoice
    opened: "OpenedModel | None"


class Ahead(NamedTuple):
    """A load that has begun.

    Attributes:
        args: Options of the engine that takes it.
        files: Files of the model.
        loaded: The model, once its weights are packed.
    """

    args: EngineArgs
    files: OpenedFiles
    loaded: "Future[LoadedNative]"


_begun: list[Ahead] = []


def open_files(args: EngineArgs, source: ModelSource) -> OpenedFiles:
    """Choose the backend, and open a model's files if it is the native one.

    Raises:
        ModelLoadError: The native backend is required, and the files are damaged or not supported.
    """
    backend = choose_backend(args)
    if backend.name == "torch":
        return OpenedFiles(source, backend, None)
    from pagedserve.native.load import open_native

    try:
        return OpenedFiles(source, backend, open_native(args, source))
    except ModelLoadError as error:
        if not backend.may_change:
            raise
        reason = str(error).removesuffix(f": {OTHER_BACKEND}")
        return OpenedFiles(source, BackendChoice("torch", reason), None)


def load_ahead(args: EngineArgs) -> None:
    """Begin to load the model of an engine of these options, if that needs no more than headers.

    Without effect where torch runs the model, files are downloaded or converted first, or a module
    of logits processors may set torch's number of threads.

    Raises:
        ModelLoadError: As ``open_files``, or the model's path has none.
    """
    if args.logits_processors or args.quantization in DIRECTORY_QUANTIZATIONS:
        return
    source = find_local_source(args)
    if source is None:
        return
    files = open_files(args, source)
    if files.opened is not None:
        _begun[:] = [Ahead(args, files, begin_packing(args, files.opened))]


def take_ahead(args: EngineArgs) -> Ahead | None:
    """Take the load that has begun for these options; None without one."""
    begun = _begun.pop() if _begun else None
    return begun if begun is not None and begun.args == args else None


def begin_packing(args: EngineArgs, opened: "OpenedModel") -> "Future[LoadedNative]":
    """Pack the weights of a model in the background."""
    from pagedserve.native.load import load_native

    worker = ThreadPoolExecutor(1, thread_name_prefix="pagedserve-weights")
    loaded = worker.submit(load_native, args, opened)
    worker.shutdown(wait=False)
    return loaded
