"""What is being loaded, said while it is: a line to the log or to stderr, and bars on stderr."""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, TypeVar, cast

from tqdm import tqdm

T = TypeVar("T")

logger = logging.getLogger(__name__)

_is_shown: Final = ContextVar("_is_shown", default=False)
_model: Final = ContextVar[str | None]("_model", default=None)


@contextmanager
def loading(model: str, *, is_shown: bool) -> Iterator[None]:
    """Say which model this thread loads, unless whoever began with it has said so.

    Args:
        model: as the user names it.
        is_shown: whether it and what follows is shown; else only the log has it.
    """
    shown, named = _is_shown.set(is_shown), _model.set(model)
    try:
        if named.old_value != model:
            say(f"loading {model}")
        yield
    finally:
        _is_shown.reset(shown)
        _model.reset(named)


def is_progress_shown() -> bool:
    """Whether bars are wanted."""
    return _is_shown.get()


def say(text: str) -> None:
    """Write a line to the log; to stderr where the log leaves it out and progress is shown."""
    if is_progress_shown() and not (logger.isEnabledFor(logging.INFO) and logger.hasHandlers()):
        print(text, file=sys.stderr)  # noqa: T201  # for the user
    logger.info("%s", text)


def progress(items: Sequence[T], what: str) -> Iterator[T]:
    """The items, and how many of them are done."""
    bar: Any = tqdm(items, desc=what, disable=not is_progress_shown(), dynamic_ncols=True)
    return cast(Iterator[T], iter(bar))


class QuietBar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """A bar that is not shown, for who asks for a class of bars."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        """As ``tqdm``, whatever it says of being shown."""
        super().__init__(*positional, **{**named, "disable": True})
