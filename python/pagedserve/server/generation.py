"""Outputs of all prompts of one HTTP request, as they arrive."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from pagedserve.engine.client import EngineClient, merge_streams
from pagedserve.errors import GRAMMAR_FAULT, NO_TOKEN_LEFT
from pagedserve.inputs import Prompt
from pagedserve.lora.request import LoRARequest
from pagedserve.outputs import CompletionOutput, RequestOutput
from pagedserve.pooling_params import PoolingParams
from pagedserve.sampling_params import SamplingParams
from pagedserve.server.http.errors import ServerError


@dataclass(slots=True)
class Usage:
    """Token usage of a request so far.

    Attributes:
        prompt_tokens: Prompt tokens of each prompt, those of an encoder included.
        cached_tokens: Prompt tokens of each that were found in the prefix cache.
        completion_tokens: New tokens of all outputs.
        accepted: Accepted draft tokens of each prediction that has ended.
        rejected: Its rejected ones.
    """

    prompt_tokens: dict[int, int] = field(default_factory=dict)
    cached_tokens: dict[int, int] = field(default_factory=dict)
    completion_tokens: int = 0
    accepted: dict[int, int] = field(default_factory=dict)
    rejected: dict[int, int] = field(default_factory=dict)

    def count_prompt(self, place: int, output: RequestOutput) -> None:
        """Count the prompt at index ``place``, from its first output."""
        encoder = output.encoder_prompt_token_ids or ()
        self.prompt_tokens[place] = len(output.prompt_token_ids) + len(encoder)
        self.cached_tokens[place] = output.num_cached_tokens or 0

    def count_prediction(self, place: int, output: RequestOutput) -> None:
        """Count the prediction of the prompt at index ``place``, from its last output."""
        accepted = output.metrics.num_accepted_prediction_tokens
        self.accepted[place] = accepted
        self.rejected[place] = output.metrics.num_prediction_tokens - accepted

    def shown(self, *, with_details: bool) -> dict[str, object]:
        """Build the ``usage`` object of the response."""
        prompt = sum(self.prompt_tokens.values())
        usage: dict[str, object] = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
        }
        if with_details:
            cached = sum(self.cached_tokens.values())
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        if self.accepted:
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": sum(self.accepted.values()),
                "rejected_prediction_tokens": sum(self.rejected.values()),
            }
        return usage


def prompt_ids(engine_id: str, num_prompts: int) -> list[str]:
    """Request ids of the prompts in the engine: the request's id and their indices."""
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
    """Run all prompts of a request concurrently.

    Args:
        client: The engine.
        prompts: At least one prompt.
        params: Parameters of all prompts.
        request_ids: Request id of each prompt, unique among unfinished requests.
        lora_request: Adapter to use.
        priority: Priority; the lowest is served first, with ``scheduling_policy="priority"``.
        arrival_time: Seconds of the wall clock.

    Returns:
        Outputs of all prompts, as they arrive.  Stopping the iteration early aborts all of them.
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
    return streams[0] if len(streams) == 1 else merge_streams(streams)


def check_end(completion: CompletionOutput, *, is_begun: bool) -> None:
    """Check that an output is complete; one that outgrew the KV cache ended by its length.

    Args:
        completion: Completion that has ended.
        is_begun: Whether it had tokens before.

    Raises:
        ServerError: The engine ended the request before it produced output.
    """
    if completion.finish_reason == "error":
        is_callers = str(completion.stop_reason).startswith((GRAMMAR_FAULT, NO_TOKEN_LEFT))
        status = 400 if is_callers else 500
        raise ServerError(status, f"the request failed: {completion.stop_reason}")
    if completion.finish_reason == "ignored":
        if not (is_begun or completion.token_ids):
            raise ServerError(400, f"the request cannot be run: {completion.stop_reason}")
        completion.finish_reason = "length"
