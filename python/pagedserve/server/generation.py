"""The outputs of one HTTP request: of all its prompts, as they come."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from pagedserve.engine.client import EngineClient
from pagedserve.inputs import Prompt
from pagedserve.lora.request import LoRARequest
from pagedserve.outputs import CompletionOutput, RequestOutput
from pagedserve.pooling_params import PoolingParams
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


def generate(
    client: EngineClient,
    prompts: Sequence[Prompt],
    params: SamplingParams | PoolingParams,
    request_ids: Sequence[str],
    *,
    lora_request: LoRARequest | None,
    priority: int,
    arrival_time: float,
) -> AsyncGenerator[RequestOutput, None]:
    """Run all prompts of a request together.

    Args:
        client: The engine.
        prompts: At least one.
        params: Of all of them.
        request_ids: Of each, that of no other unfinished request.
        lora_request: The adapter to answer with.
        priority: Smaller goes first, where the scheduler's policy asks for it.
        arrival_time: Seconds of the wall clock.

    Returns:
        The outputs of all, as they come.  Who leaves before the last aborts them all.
    """
    streams = [
        client.generate(
            prompt,
            params,
            request_id,
            lora_request,
            priority=priority,
            arrival_time=arrival_time,
        )
        for request_id, prompt in zip(request_ids, prompts, strict=True)
    ]
    return streams[0] if len(streams) == 1 else _merged(streams)


async def _merged(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[RequestOutput, None]:
    async with contextlib.AsyncExitStack() as stack:
        for stream in streams:
            await stack.enter_async_context(contextlib.aclosing(stream))
        coming = {asyncio.ensure_future(anext(stream)): stream for stream in streams}
        try:
            while coming:
                done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
                for future in done:
                    stream = coming.pop(future)
                    output = future.result()
                    if not output.finished:
                        coming[asyncio.ensure_future(anext(stream))] = stream
                    yield output
        finally:
            for future in coming:
                future.cancel()
            await asyncio.gather(*coming, return_exceptions=True)


def check_end(completion: CompletionOutput, *, is_begun: bool) -> None:
    """Check that an output ended as an answer; one that outgrew the KV cache did by its length.

    Args:
        completion: Of the engine, ended.
        is_begun: Whether there were tokens before it.

    Raises:
        ServerError: The engine ended the request before it could be answered.
    """
    if completion.finish_reason == "error":
        raise ServerError(500, f"the request failed: {completion.stop_reason}")
    if completion.finish_reason == "ignored":
        if not (is_begun or completion.token_ids):
            raise ServerError(400, f"the request cannot be run: {completion.stop_reason}")
        completion.finish_reason = "length"
