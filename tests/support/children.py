"""Forked children of a test, beside the threads of engines."""

import os
import warnings
from collections.abc import Callable
from typing import Any


def child_says(call: Callable[[], Any]) -> str:
    """What a call returns or raises in a forked child."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if child == 0:
        try:
            said = f"returned {call()}"
        except BaseException as error:  # noqa: BLE001  # it is what is asked about
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as file:
        return file.read()
