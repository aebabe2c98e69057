"""Progress of a load: lines in the log or on stderr, and bars on a terminal, one at a time."""

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any, Final, TypeVar, cast

from tqdm import tqdm

T = TypeVar("T")

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


class Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """A progress bar as wide as the terminal, if bars are shown."""

    def __init__(self, *positional: Any, is_shown: bool = True, **named: Any) -> None:
        """Create a bar as ``tqdm`` does; ``is_shown`` may hide it where others are shown."""
        settings = {"dynamic_ncols": True, "disable": not (is_shown and are_bars_shown())}
        super().__init__(*positional, **(named | settings))


class DownloadBar(Bar):
    """The bar of a download's bytes, one of three that huggingface_hub shows at a time."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        """Create a bar as ``tqdm`` does; only bytes written are shown."""
        is_shown = named.get("unit") == "B" and named.get("desc") != "Downloading bytes"
        settings = {"desc": "downloading", "bar_format": None, "is_shown": is_shown}
        super().__init__(*positional, **(named | settings))

    def set_description(self, desc: str | None = None, *, refresh: bool | None = True) -> None:
        """Keep the description."""


@contextmanager
def bars_of(module: ModuleType) -> Iterator[None]:
    """A context in which a library's module uses our bars."""
    before = module.tqdm
    module.tqdm = Bar  # type: ignore[attr-defined]  # the library has no option for it
    try:
        yield
    finally:
        module.tqdm = before  # type: ignore[attr-defined]


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


def progress(items: Iterable[T], what: str) -> Iterator[T]:
    """Iterate over items, with a bar that shows how many of them are done."""
    return cast(Iterator[T], iter(Bar(items, desc=what)))
