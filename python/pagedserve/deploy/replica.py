"""A replica: an engine in an actor of Ray Serve, and what is said between it and the front."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple

from ray import serve

from pagedserve.config import EngineArgs
from pagedserve.engine.async_engine import AsyncLLMEngine
from pagedserve.engine.defaults import server_defaults
from pagedserve.engine.llm_engine import LLMEngine
from pagedserve.engine.stats import EngineSnapshot
from pagedserve.errors import EngineDeadError
from pagedserve.executor.protocol import ModelInfo
from pagedserve.inputs import Prompt
from pagedserve.lora.request import LoRARequest
from pagedserve.outputs import RequestOutput
from pagedserve.pooling_params import PoolingParams
from pagedserve.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

# Seconds between two looks whether a request has begun.
_LOOK = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRequest:
    """A request on its way to a replica.

    Attributes:
        keys: Of the beginnings of its prompt (`pagedserve.deploy.affinity.prefix_keys`).
        prompt: As of ``AsyncLLMEngine.generate``, and so are the others.
    """

    keys: tuple[int, ...]
    prompt: Prompt
    params: SamplingParams | PoolingParams | None
    request_id: str
    lora_request: LoRARequest | None
    priority: int
    arrival_time: float | None
    output_token_ids: tuple[int, ...] = ()
    choice: int = 0


class ReplicaFacts(NamedTuple):
    """What the front needs to know of a replica.

    Attributes:
        model_info: What the model is.
        max_num_seqs: Sequences of a step.
    """

    model_info: ModelInfo
    max_num_seqs: int


class ReplicaState(NamedTuple):
    """How a replica is.

    Attributes:
        name: Ray Serve's, no two alike.
        snapshot: Of its engine.
    """

    name: str
    snapshot: EngineSnapshot


class Replica:
    """What Ray Serve runs so many times; every method may be called while others run."""

    def __init__(self, args: EngineArgs, stall_timeout: float) -> None:
        """Load the model.

        Args:
            args: Of the engine.
            stall_timeout: As of ``AsyncLLMEngine``.
        """
        self._engine = AsyncLLMEngine(
            lambda: LLMEngine(args, choose=server_defaults), stall_timeout=stall_timeout
        )
        self._engine.wait_until_ready()
        self._is_ending = False

    async def generate(self, request: ReplicaRequest) -> AsyncGenerator[RequestOutput | None, None]:
        """Run a request; see ``EngineClient.generate``.

        Yields:
            None once a step has taken it up, and its outputs.
        """
        outputs = self._outputs(request)
        async with aclosing(outputs):
            first = asyncio.ensure_future(anext(outputs))
            try:
                while not (first.done() or self._engine.has_begun(request.request_id)):
                    await asyncio.wait([first], timeout=_LOOK)
                yield None
                yield await first
            finally:
                first.cancel()
            async for output in outputs:
                yield output

    async def _outputs(self, request: ReplicaRequest) -> AsyncGenerator[RequestOutput, None]:
        """The engine's, but for those that say that it has died."""
        outputs = self._engine.generate(
            request.prompt,
            request.params,
            request.request_id,
            request.lora_request,
            priority=request.priority,
            arrival_time=request.arrival_time,
            output_token_ids=request.output_token_ids,
            choice=request.choice,
        )
        async with aclosing(outputs):
            try:
                async for output in outputs:
                    if any(completion.finish_reason == "error" for completion in output.outputs):
                        await self.check_health()
                    yield output
            except EngineDeadError:
                await self.check_health()
                raise

    async def facts(self) -> ReplicaFacts:
        """What the front needs to know."""
        return ReplicaFacts(await self._engine.get_model_config(), self._engine.max_num_seqs)

    async def state(self) -> ReplicaState:
        """How it is."""
        name = serve.get_replica_context().replica_id.unique_id
        return ReplicaState(name, self._engine.snapshot())

    async def check_health(self) -> None:
        """Asked by Ray Serve, which ends a replica that raises and starts another.

        One whose engine has died ends by itself: Serve asks again and again, and sends requests
        to it meanwhile.
        """
        try:
            await self._engine.check_health()
        except EngineDeadError:
            if not self._is_ending:
                logger.exception("the replica ends: its engine has died")
                os._exit(1)
            raise

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """See ``EngineClient.add_lora``."""
        return await self._engine.add_lora(lora_request)

    async def remove_lora(self, lora_id: int) -> bool:
        """See ``EngineClient.remove_lora``."""
        return await self._engine.remove_lora(lora_id)

    async def reset_prefix_cache(self) -> bool:
        """See ``EngineClient.reset_prefix_cache``."""
        return await self._engine.reset_prefix_cache()

    def __del__(self) -> None:
        """Called by Ray Serve once the last request has ended."""
        self._is_ending = True
        self._engine.shutdown()
