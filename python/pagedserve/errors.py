"""The exceptions of pagedserve: one tree, each also the builtin that a caller would expect.

The Rust core raises these very classes (``rust/py/src/error.rs`` names them), so there is
one definition of each.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any


@contextmanager
def extra_needed(who: str, extra: str) -> Iterator[None]:
    """A context that imports what ``who`` needs; a package that is not there is named.

    Raises:
        ImportError: Which package is missing, and the extra that brings it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "pagedserve":
            raise
        raise ImportError(
            f"{who} needs {error.name}, which is not installed: pip install 'pagedserve[{extra}]'"
        ) from error


class PagedServeError(Exception):
    """Base of everything that pagedserve raises on purpose."""


class ConfigError(PagedServeError, ValueError):
    """A configuration that cannot work; nothing was built."""


class RequestError(PagedServeError, ValueError):
    """A request that cannot be accepted: its prompt or its sampling parameters.

    Attributes:
        param: The parameter that is wrong, where one is.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelLoadError(PagedServeError, ValueError):
    """A model that cannot be found, read or loaded."""


class UnsupportedModelError(ModelLoadError):
    """A model of an architecture that the engine cannot run correctly."""


class StaleHandleError(PagedServeError, LookupError):
    """A handle of a sequence or group that has ended, or that never was."""


class StepError(PagedServeError, RuntimeError):
    """Calls of one step out of order, or arrays that do not belong to the step."""


class EngineDeadError(PagedServeError, RuntimeError):
    """An engine that runs no more: it died, or it was shut down."""


class ExecutorDeadError(EngineDeadError):
    """A process that shares the model has died: nothing can be computed until a restart.

    Attributes:
        rank: Which process.
        step: How many steps had been launched.
    """

    def __init__(self, message: str, *, rank: int, step: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step

    def __reduce__(self) -> tuple[Any, ...]:
        """Of exceptions pickle knows positional arguments alone."""
        return partial(type(self), rank=self.rank, step=self.step), self.args


class EngineStalledError(PagedServeError, RuntimeError):
    """An engine whose requests wait while no step ends."""


class InvariantError(PagedServeError, RuntimeError):
    """The whole-state checker found the core in a state that must not be: a bug."""
