"""Sending requests at their times, and waiting for their ends."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pagedserve.bench.client import Client, Job
from pagedserve.bench.outcome import Outcome


@dataclass(slots=True)
class Run:
    """What was measured, from the start on.

    Attributes:
        start: By ``time.perf_counter``, as ``end`` is.
        end: When the last request came to its end, or Ctrl-C.
        outcomes: Of the requests that came to their end, in that order.
        is_interrupted: Whether Ctrl-C came first.
    """

    start: float
    end: float
    outcomes: list[Outcome] = field(default_factory=list)
    is_interrupted: bool = False


async def drive(
    client: Client,
    jobs: Sequence[Job],
    *,
    max_concurrency: int | None = None,
    when_done: Callable[[Outcome], None] = lambda _: None,
) -> Run:
    """Send all jobs, each at its time.

    A job is late only where ``max_concurrency`` requests are on their way, or this process has not
    the time: what the server does to one holds no other back.

    Cancelling this task, as Ctrl-C does, ends the requests on their way and the run, which is
    returned as it is then.

    Args:
        client: Who sends.
        jobs: In the order of their times.
        max_concurrency: How many may be on their way at a time; None is any number.
        when_done: Called with each outcome.
    """
    run = Run(start=time.perf_counter(), end=0.0)
    slots = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()

    async def send(job: Job) -> None:
        async with slots:
            outcome = await client.send(job, due=run.start + job.due_s)
        run.outcomes.append(outcome)
        when_done(outcome)

    try:
        async with asyncio.TaskGroup() as tasks:
            for job in jobs:
                # Also where nothing is left to wait for: those that were started need a turn.
                await asyncio.sleep(max(0.0, run.start + job.due_s - time.perf_counter()))
                tasks.create_task(send(job))
    except asyncio.CancelledError:
        run.is_interrupted = True
    run.end = time.perf_counter()
    return run
