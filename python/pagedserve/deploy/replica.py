"""A replica: an engine in a Ray Serve actor, and the messages between it and the server."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ray import serve

from pagedserve.config import EngineArgs
from pagedserve.engine.async_engine import AsyncLLMEngine
from pagedserve.engine.defaults import server_defaults
from pagedserve.engine.llm_engine import LLMEngine
from pagedserve.engine.row_sampler import OWN_DRAWS, DrawKey
from pagedserve.engine.stats import EngineSnapshot
from pagedserve.errors import EngineDeadError
from pagedserve.executor.protocol import ModelInfo
from pagedserve.inputs import Prompt
from pagedserve.lora.request import LoRARequest
from pagedserve.outputs import RequestOutput
from pagedserve.pooling_params import PoolingParams
from pagedserve.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

# Seconds between two checks whether a request has started.
_LOOK = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRequest:
    """A request to a replica.

    Attributes:
        keys: Hashes of its prompt's prefixes (`pagedserve.deploy.affinity.prefix_keys`).
        prompt: As in ``AsyncLLMEngine.generate``, like the other fields.
        draws: Selects the random numbers; its number is the server's, since all replicas have the
            same seed.
    """

    keys: tuple[int, ...]
    prompt: Prompt
    params: SamplingParams | PoolingParams | None
    request_id: str
    lora_request: LoRARequest | None
    priority: int
    arrival_time: float | None
    output_token_ids: tuple[int, ...] = ()
    draws: DrawKey = OWN_DRAWS


class ReplicaFacts(NamedTuple):
    """Properties of a replica for the server.

    Attributes:
        model_info: Properties of the model.
        max_num_seqs: Maximum sequences per step.
    """

    model_info: ModelInfo
    max_num_seqs: int


class ReplicaState(NamedTuple):
    """State of a replica.

    Attributes:
        name: Ray Serve's unique name.
        snapshot: Snapshot of its engine.
    """

    name: str
    snapshot: EngineSnapshot


class Replica:
    """The deployment class of Ray Serve; every method may run concurrently."""

    def __init__(self, args: EngineArgs, stall_timeout: float) -> None:
        """Load the model.

        Args:
            args: Options of the engine.
            stall_timeout: As in ``AsyncLLMEngine``.

        Raises:
            OSError: The directory of the decision log cannot be made.
        """
        if args.decision_log is not None:
            # Here, on its machine.  A file would be that of all replicas.
            Path(args.decision_log).mkdir(parents=True, exist_ok=True)
        self._engine = AsyncLLMEngine(
            lambda: LLMEngine(args, choose=server_defaults), stall_timeout=stall_timeout
        )
        self._engine.wait_until_ready()
        self._is_ending = False

    async def generate(self, request: ReplicaRequest) -> AsyncGenerator[RequestOutput | None, None]:
        """Run a request; see ``EngineClient.generate``.

        Yields:
            None once a step has started it, then its outputs.
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
                await asyncio.gather(first, return_exceptions=True)
            async for output in outputs:
                yield output

    async def _outputs(self, request: ReplicaRequest) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of the engine, except those that report its death."""
        outputs = self._engine.generate(
            request.prompt,
            request.params,
            request.request_id,
            request.lora_request,
            priority=request.priority,
            arrival_time=request.arrival_time,
            output_token_ids=request.output_token_ids,
            draws=request.draws,
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

    async def abort(self, request_id: str) -> None:
        """See ``EngineClient.abort``; requests of other replicas are ignored."""
        await self._engine.abort(request_id)

    async def facts(self) -> ReplicaFacts:
        """Return the properties."""
        return ReplicaFacts(await self._engine.get_model_config(), self._engine.max_num_seqs)

    async def state(self) -> ReplicaState:
        """Return the state."""
        name = serve.get_replica_context().replica_id.unique_id
        return ReplicaState(name, self._engine.snapshot())

    async def check_health(self) -> None:
        """Check the engine for Ray Serve, which replaces a replica that raises.

        A replica whose engine has died exits at once: Serve would repeat the check, and send
        requests to it meanwhile.
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
        """Shut down; called by Ray Serve once the last request has ended."""
        self._is_ending = True
        self._engine.shutdown()
