"""Progress of a load: lines in the log or on stderr, and bars on a terminal, one at a time."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

logger = logging.getLogger(__name__)

_is_shown: Final = ContextVar("_is_shown", default=False)
_model: Final = ContextVar[str | None]("_model", default=None)


@contextmanager
def loading(model: str, *, is_shown: bool) -> Iterator[None]:
    """Report that this thread loads a model, unless an outer context has reported it.

    Args:
        model: name that the user gave.
        is_shown: whether lines are written to stderr, and bars are shown; else only to the log.
    """
    named = _model.set(model)
    try:
        with progress_shown(is_shown=is_shown):
            if named.old_value != model:
                say(f"loading {model}")
            yield
    finally:
        _model.reset(named)


@contextmanager
def progress_shown(*, is_shown: bool) -> Iterator[None]:
    """A context in which this thread shows progress, or does not."""
    token = _is_shown.set(is_shown)
    try:
        yield
    finally:
        _is_shown.reset(token)


def are_bars_shown() -> bool:
    """Whether this thread shows bars: only on a terminal, or in a notebook."""
    return _is_shown.get() and (sys.stderr.isatty() or "ipykernel" in sys.modules)


def say(text: str) -> None:
    """Write a line to the log; to stderr if the log does not show it and progress is shown."""
    if _is_shown.get() and not (logger.isEnabledFor(logging.INFO) and logger.hasHandlers()):
        print(text, file=sys.stderr)  # noqa: T201  # for the user
    logger.info("%s", text)


@contextmanager
def quiet_logger(name: str) -> Iterator[None]:
    """A context without the log lines of a library below level WARNING."""
    noisy = logging.getLogger(name)
    level = noisy.level
    noisy.setLevel(logging.WARNING)
    try:
        yield
    finally:
        noisy.setLevel(level)
