"""The outputs of one HTTP request: of all its prompts, as they come."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from pagedserve.engine.client import EngineClient
from pagedserve.inputs import Prompt
from pagedserve.outputs import RequestOutput
from pagedserve.sampling_params import SamplingParams
from pagedserve.server.errors import ServerError


@dataclass(slots=True)
class Usage:
    """Tokens that a request used so far.

    Attributes:
        prompt_tokens: Of each prompt.
        cached_tokens: Those of them that the prefix cache had.
        completion_tokens: New tokens of all outputs.
    """

    prompt_tokens: dict[int, int] = field(default_factory=dict)
    cached_tokens: dict[int, int] = field(default_factory=dict)
    completion_tokens: int = 0

    def count_prompt(self, place: int, output: RequestOutput) -> None:
        """Count the prompt at ``place``, by its first output."""
        self.prompt_tokens[place] = len(output.prompt_token_ids)
        self.cached_tokens[place] = output.num_cached_tokens or 0

    def shown(self, *, with_details: bool) -> dict[str, object]:
        """The object that clients read."""
        prompt = sum(self.prompt_tokens.values())
        usage: dict[str, object] = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
        }
        if with_details:
            cached = sum(self.cached_tokens.values())
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return usage


def prompt_ids(engine_id: str, num_prompts: int) -> list[str]:
    """What the engine calls the prompts of a request: its name, and their places."""
    if num_prompts == 1:
        return [engine_id]
    return [f"{engine_id}-{place}" for place in range(num_prompts)]


async def generate(
    client: EngineClient,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    request_ids: Sequence[str],
    *,
    priority: int,
    arrival_time: float,
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Run all prompts of a request together.

    Args:
        client: The engine.
        prompts: At least one.
        params: Of all of them.
        request_ids: Of each, that of no other unfinished request.
        priority: Smaller goes first, where the scheduler's policy asks for it.
        arrival_time: Seconds of the wall clock.

    Yields:
        The place of a prompt and its next output, as they come.  Who leaves before the last aborts
        them all.

    Raises:
        RequestError: A request that cannot be run.
        ServerError: A request that the engine had to end.
    """
    streams = [
        client.generate(
            prompt,
            params,
            request_id,
            priority=priority,
            arrival_time=arrival_time,
        )
        for request_id, prompt in zip(request_ids, prompts, strict=True)
    ]
    begun: set[int] = set()
    async with contextlib.AsyncExitStack() as stack:
        for stream in streams:
            await stack.enter_async_context(contextlib.aclosing(stream))
        if len(streams) == 1:
            async for output in streams[0]:
                yield 0, checked(output, is_begun=0 in begun)
                begun.add(0)
        else:
            async with contextlib.aclosing(_merged(streams)) as merged:
                async for place, output in merged:
                    yield place, checked(output, is_begun=place in begun)
                    begun.add(place)


async def _merged(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    places = {asyncio.ensure_future(anext(stream)): n for n, stream in enumerate(streams)}
    try:
        while places:
            done, _ = await asyncio.wait(places, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                place = places.pop(future)
                output = future.result()
                if not output.finished:
                    places[asyncio.ensure_future(anext(streams[place]))] = place
                yield place, output
    finally:
        for future in places:
            future.cancel()
        await asyncio.gather(*places, return_exceptions=True)


def checked(output: RequestOutput, *, is_begun: bool) -> RequestOutput:
    """An output that is an answer; one that outgrew the KV cache ended by its length.

    Args:
        output: Of the engine.
        is_begun: Whether there were tokens before it.

    Raises:
        ServerError: The engine ended the request before it could be answered.
    """
    for completion in output.outputs:
        if completion.finish_reason == "error":
            raise ServerError(500, f"the request failed: {completion.stop_reason}")
        if completion.finish_reason == "ignored":
            if not (is_begun or completion.token_ids):
                raise ServerError(400, f"the request cannot be run: {completion.stop_reason}")
            completion.finish_reason = "length"
    return output
