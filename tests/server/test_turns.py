"""Requests that begin take turns, so that streams go on between them."""

import asyncio
from itertools import pairwise

from pagedserve.server.http.turns import Turns

NUM_REQUESTS = 20


async def _begin(turns: Turns, name: str, events: list[str]) -> None:
    await turns.take()
    events.append(name)


async def _stream(events: list[str], num_tokens: int) -> None:
    for _ in range(num_tokens):
        events.append("token")
        await asyncio.sleep(0)


def test_a_stream_goes_on_between_requests_that_arrive_together() -> None:
    async def run() -> list[str]:
        turns, events = Turns(), list[str]()
        async with asyncio.TaskGroup() as group:
            group.create_task(_stream(events, 2 * NUM_REQUESTS))
            for number in range(NUM_REQUESTS):
                group.create_task(_begin(turns, str(number), events))
        return events

    events = asyncio.run(run())
    assert [event for event in events if event != "token"] == list(map(str, range(NUM_REQUESTS)))
    begun = [position for position, event in enumerate(events) if event != "token"]
    for one, other in pairwise(begun):
        assert "token" in events[one:other]


def test_a_request_that_leaves_passes_its_turn_on() -> None:
    async def run() -> list[str]:
        turns, events = Turns(), list[str]()
        tasks = [asyncio.create_task(_begin(turns, str(number), events)) for number in range(6)]
        await asyncio.sleep(0)
        for number in (1, 2, 5):
            tasks[number].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await turns.take()
        return events

    assert asyncio.run(asyncio.wait_for(run(), 60)) == ["0", "3", "4"]
