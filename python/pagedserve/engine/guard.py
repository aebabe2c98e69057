"""``EngineGuard``: checks whether an engine may be called.

An engine belongs to the process that created it: a forked child has the memory of its parent and
none of the threads and sockets that compute, so that a step would wait indefinitely.  A scheduler
has at most one open step, so calls into an engine do not overlap.  Invariants:

1. An invalid call raises at once, before it changes anything.
2. An exception in a call, Ctrl-C included, leaves the engine usable: a call is marked and unmarked
   by single assignments, between which and its ``try`` no signal handler runs.

Costs: a system call and three assignments per call.
"""

import os
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn, Protocol, Self, TypeVar, cast

from pagedserve.errors import ConcurrentCallError, EngineDeadError

Method = TypeVar("Method", bound=Callable[..., Any])


class EngineGuard:
    """State that decides whether a call is accepted.

    Attributes:
        thread: Identifier of the thread whose call runs; None while no call runs.
        is_shut_down: Whether ``shutdown`` was called.
    """

    __slots__ = ("_pid", "is_shut_down", "thread")

    def __init__(self) -> None:
        """Accept calls of this process."""
        self._pid = os.getpid()
        self.thread: int | None = None
        self.is_shut_down = False

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked from the one that created the engine."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raise an error if the engine can no longer be called.

        Raises:
            EngineDeadError: The process was forked, or the engine is shut down.
        """
        if self.is_inherited:
            raise EngineDeadError(
                f"the engine belongs to process {self._pid}, and this is process {os.getpid()}, "
                "forked from it without the threads that compute: make an engine in each process, "
                "started with multiprocessing's 'spawn' or 'forkserver'"
            )
        if self.is_shut_down:
            raise EngineDeadError("the engine was shut down; make another")

    def begin(self) -> int:
        """Check a call and return the identifier of its thread, for ``thread``."""
        self.check()
        return threading.get_ident()

    def refuse(self, name: str) -> NoReturn:
        """Refuse a call of a method while another runs.

        Raises:
            ConcurrentCallError: The message says whether the call is nested.
        """
        is_nested = self.thread == threading.get_ident()
        where = "from within" if is_nested else "by another thread during"
        raise ConcurrentCallError(
            f"{name} was called {where} a call of the same engine, which runs one at a time: call "
            "it afterwards, or use AsyncLLMEngine"
        )


class Guarded(Protocol):
    """An engine with a guard."""

    guard: EngineGuard


def exclusive(method: Method) -> Method:
    """Decorate a method so that it excludes all other such methods of its engine."""
    name = method.__name__.strip("_")

    @wraps(method)
    def call(engine: Guarded, *args: Any, **kwargs: Any) -> Any:
        guard = engine.guard
        caller = guard.begin()
        if guard.thread is not None:
            guard.refuse(name)
        guard.thread = caller
        try:
            return method(engine, *args, **kwargs)
        finally:
            guard.thread = None

    return cast(Method, call)


class ModelOwner:
    """An object that owns a loaded model: a context manager that shuts it down."""

    def __enter__(self) -> Self:
        """Return the object itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Shut down."""
        self.shutdown()

    def shutdown(self) -> None:
        """Free the memory."""
        raise NotImplementedError

    def __reduce__(self) -> NoReturn:
        """Refuse pickling and copying.

        Raises:
            TypeError: Names the class and the alternative.
        """
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied, as it owns a loaded model and its "
            "threads: make it in the process that uses it, from the same arguments"
        )
