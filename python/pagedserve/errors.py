"""The exceptions of pagedserve: one tree, each also the builtin that a caller would expect.

The Rust core raises the same classes (``rust/py/src/error.rs`` names them), so each is defined
once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

# Prefixes of the reasons that end a request for its grammar alone, or for its grammar together
# with the tokens that it allows, bans and biases.
GRAMMAR_FAULT: Final = "the grammar cannot continue"
NO_TOKEN_LEFT: Final = "no token is left to sample: the edited logits"


# Clients look for the words and numbers of OpenAI, Anthropic and vLLM, and then shorten the prompt.
TOO_LONG: Final = (
    "prompt is too long: {found}. This model's maximum context length is {max_model_len} tokens"
)


class PagedServeError(Exception):
    """Base class of all exceptions of pagedserve."""


class MissingPackageError(PagedServeError, ImportError):
    """A package that is not installed; names the command that installs it."""


class ConfigError(PagedServeError, ValueError):
    """An invalid configuration; nothing was built."""


class RequestError(PagedServeError, ValueError):
    """A request refused for its prompt or its sampling parameters.

    Attributes:
        param: Name of the invalid parameter, if it is a single one.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelLoadError(PagedServeError, ValueError):
    """A model that is not found, or cannot be read or loaded."""


class UnsupportedModelError(ModelLoadError):
    """A model whose architecture is not supported."""


class StaleHandleError(PagedServeError, LookupError):
    """A handle of a sequence or group that has ended or never existed."""


class StepError(PagedServeError, RuntimeError):
    """Calls of one step out of order, or arrays that do not belong to the step."""


class ConcurrentCallError(PagedServeError, RuntimeError):
    """A call into an engine during another call, from a callback or another thread."""


class EngineDeadError(PagedServeError, RuntimeError):
    """An engine that died or was shut down."""


class ExecutorDeadError(EngineDeadError):
    """A rank of the model has died: nothing can be computed until a restart.

    Attributes:
        rank: Number of the rank.
        step: Number of steps launched before.
    """

    def __init__(self, message: str, *, rank: int, step: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the keyword arguments too, which exceptions omit."""
        return partial(type(self), rank=self.rank, step=self.step), self.args


class EngineStalledError(PagedServeError, RuntimeError):
    """An engine whose requests wait while no step completes."""


class InvariantError(PagedServeError, RuntimeError):
    """The consistency check found an invalid state of the core: a bug."""


def reason(error: Exception) -> str:
    """What failed, without the number and the path that the text of an ``OSError`` has."""
    return str((isinstance(error, OSError) and error.strerror) or error)


@contextmanager
def panic_as_error() -> Iterator[None]:
    """Context for calls of a Rust library, whose panic would pass every ``except Exception``.

    Raises:
        RuntimeError: The library panics.
    """
    try:
        yield
    except BaseException as error:
        name = type(error).__name__
        if name != "PanicException":
            raise
        raise RuntimeError(f"{name} in a library: {error}") from error


@contextmanager
def extra_needed(who: str, extra: str) -> Iterator[None]:
    """Context for imports that ``who`` needs; reports a missing package by name.

    Raises:
        MissingPackageError: Names the missing package, and the command that installs the extra's.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "pagedserve":
            raise
        from pagedserve.extras import install_command

        raise MissingPackageError(
            f"{who} needs {error.name}, which is not installed: "
            f"{install_command(extra, error.name)}"
        ) from error
