"""Work on files beside the event loop."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def to_end(make: Callable[[], T]) -> T:
    """Run a function in a thread; if this task is cancelled, only after the function has ended.

    So nothing of it happens later, when its caller has cleaned up.
    """
    work = asyncio.ensure_future(asyncio.to_thread(make))
    try:
        return await asyncio.shield(work)
    finally:
        await asyncio.wait([work])
