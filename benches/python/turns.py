"""Engines side by side in one process, a step of each in turn.

So a machine that grows slower does so for all of them, which it does not for whole runs in turn.
"""

from collections.abc import Iterator, Sequence
from time import perf_counter

from pagedserve import LLMEngine, RequestOutput


def steps_in_turn(engines: Sequence[LLMEngine]) -> Iterator[tuple[int, float, list[RequestOutput]]]:
    """Run until none has work: whose step it was, its seconds, and what came of it."""
    order = list(range(len(engines)))
    while any(engine.has_unfinished_requests() for engine in engines):
        for place in order:
            if engines[place].has_unfinished_requests():
                started = perf_counter()
                outputs = engines[place].step()
                yield place, perf_counter() - started, outputs
        order.reverse()
