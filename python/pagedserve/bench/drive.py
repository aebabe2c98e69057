"""Sends requests at their times, and waits for their responses."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pagedserve.bench.client import Client, Job
from pagedserve.bench.outcome import Outcome


@dataclass(slots=True)
class Run:
    """Measurements of a run.

    Attributes:
        start: Start time, by ``time.perf_counter``, as ``end``.
        end: End of the last request, or Ctrl-C.
        outcomes: Outcomes of the requests that ended, in that order.
        is_interrupted: Whether Ctrl-C interrupted the run.
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

    A job is late only if ``max_concurrency`` requests are running, or this process lacks CPU time:
    requests do not wait for others.

    Cancelling this task, as Ctrl-C does, ends running requests and the run, which is returned in
    its state.

    Args:
        client: Client that sends.
        jobs: Jobs in the order of their times.
        max_concurrency: Maximum number of concurrent requests; None is unlimited.
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
                # Also with nothing left to wait for: started tasks need one iteration of the loop.
                await asyncio.sleep(max(0.0, run.start + job.due_s - time.perf_counter()))
                tasks.create_task(send(job))
    except asyncio.CancelledError:
        run.is_interrupted = True
    run.end = time.perf_counter()
    return run
