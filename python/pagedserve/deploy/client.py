"""``ReplicatedEngine``: several replicas with the interface of one engine.

A request is sent to one replica.  If that dies, another continues after the tokens received so far:
the stream stays complete, with the tokens that would have followed.

Invariants:

1. A stream ends once: with its last output, an error, or because its reader left; after that no
   replica runs a part of it.
2. A request that kills its replicas fails after a few deaths without a new token.
"""

import asyncio
import itertools
import math
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from pagedserve.deploy.affinity import prefix_keys
from pagedserve.deploy.progress import Progress, merged
from pagedserve.deploy.replica import Replica, ReplicaFacts, ReplicaRequest, ReplicaState
from pagedserve.engine.row_sampler import DrawKey
from pagedserve.engine.stats import EngineSnapshot
from pagedserve.errors import EngineDeadError, RequestError
from pagedserve.executor.protocol import ModelInfo
from pagedserve.inputs import Prompt
from pagedserve.lora.request import LoRARequest
from pagedserve.outputs import CompletionOutput, RequestMetrics, RequestOutput
from pagedserve.pooling_params import PoolingParams
from pagedserve.sampling_params import SamplingParams
from pagedserve.tokenizer import Tokenizer

# Replicas that may die during a request without a new token.
_MAX_DEATHS: Final = 3
# Seconds after which the request of a replica that shut down is sent again.
_PAUSE: Final = 0.1
# Seconds between two state requests to all replicas.
_LOOK: Final = 1.0
# Seconds that a replica has to end an aborted request; the server's drain waits a little longer.
_ABORT_PATIENCE: Final = 1.5
# Timeout in seconds of calls other than requests, and of the shutdown.
_PATIENCE: Final = 60.0
# Seconds without an answer of any replica after which the deployment is unhealthy.
_HEALTH_PATIENCE: Final = 10.0


@dataclass(frozen=True, slots=True)
class Deployed:
    """The deployment, once the first replica is running.

    Attributes:
        handle: Handle of the replicas.
        tokenizer: Tokenizer of the model.
        facts: Facts about each replica.
        most: Maximum number of replicas.
    """

    handle: DeploymentHandle[Replica]
    tokenizer: Tokenizer
    facts: ReplicaFacts
    most: int


@dataclass(slots=True, eq=False)
class _Stream:
    """An unfinished request.

    Attributes:
        has_begun: Whether a step has processed a part of it.
        num_sent: Number of times that it or a part of it was sent to a replica.
        aborted: Set once it is aborted.
    """

    has_begun: bool = False
    num_sent: int = 0
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


class ReplicatedEngine:
    """An ``EngineClient`` over replicas; all calls come from one event loop."""

    closing_seconds = _PATIENCE

    def __init__(self, deploy: Callable[[], Deployed], end: Callable[[bool], None]) -> None:
        """Start to deploy.

        Args:
            deploy: Starts the replicas; runs in a separate thread.
            end: Stops them, and waits until they have ended if its argument is true.
        """
        self._end = end
        self._deployed: Deployed | None = None
        self._failure: BaseException | None = None
        self._is_ready = threading.Event()
        self._is_stopped = False
        self._streams: dict[str, _Stream] = {}
        # Not those of the replicas: all have the same seed, and count from 0.
        self._numbers = itertools.count()
        # Replicas that answered the last state request, and the time of it.
        self._replicas: dict[str, EngineSnapshot] = {}
        self._answered = -math.inf
        # Last states of the others: totals must not decrease.
        self._gone: dict[str, EngineSnapshot] = {}
        self._watch: asyncio.Task[None] | None = None
        self._is_over = threading.Event()
        threading.Thread(target=self._run, args=(deploy,), daemon=True).start()

    def _run(self, deploy: Callable[[], Deployed]) -> None:
        try:
            self._deployed = deploy()
        except BaseException as error:  # noqa: BLE001  # raised by wait_until_ready
            self._failure = error
        self._is_ready.set()
        # A cluster started here ends with the thread that started it (PR_SET_PDEATHSIG).
        self._is_over.wait()

    @property
    def is_loading(self) -> bool:
        """Whether the first replica is still starting."""
        return not self._is_ready.is_set()

    def wait_until_ready(self) -> None:
        """Wait until requests are accepted.

        Raises:
            BaseException: What kept the replicas from being made.
        """
        self._is_ready.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def is_running(self) -> bool:
        """Whether requests are accepted."""
        return self._deployed is not None and not self._is_stopped

    @property
    def errored(self) -> bool:
        """False: Ray Serve starts a replica for each that dies."""
        return False

    @property
    def dead_error(self) -> BaseException:
        """Why requests are not accepted."""
        return EngineDeadError("the replicas are shut down" if self._is_stopped else "they run")

    @property
    def max_num_seqs(self) -> int:
        """Maximum number of sequences in the steps of all replicas."""
        return self._here.facts.max_num_seqs * self._here.most

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | PoolingParams | None,
        request_id: str,
        lora_request: LoRARequest | None = None,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        output_token_ids: Sequence[int] = (),
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a request on a replica; see ``EngineClient.generate``."""
        if self._is_stopped:
            raise self.dead_error
        if request_id in self._streams:
            raise RequestError(f"request_id is {request_id!r}, that of an unfinished request")
        adapter = None if lora_request is None else lora_request.lora_name
        request = ReplicaRequest(
            keys=prefix_keys(prompt, adapter),
            prompt=prompt,
            params=sampling_params,
            request_id=request_id,
            lora_request=lora_request,
            priority=priority,
            arrival_time=arrival_time,
            output_token_ids=tuple(output_token_ids),
            draws=DrawKey(next(self._numbers)),
        )
        stream = self._streams[request_id] = _Stream()
        try:
            async for output in self._whole(request, stream):
                yield output
        finally:
            del self._streams[request_id]

    async def _whole(
        self, request: ReplicaRequest, stream: _Stream
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a request; continues on another replica if one dies or ends."""
        progress = Progress(request)
        num_deaths = 0
        while True:
            try:
                async for output in self._part(request, stream, progress.unfinished):
                    _check_end(output, stream)
                    num_deaths = 0
                    progress.add(output)
                    yield output
                    if output.finished:
                        return
            except (RayActorError, EngineDeadError) as end:
                num_deaths += isinstance(end, RayActorError)
                can_go_on = progress.is_known or not stream.has_begun
                if num_deaths >= _MAX_DEATHS or not can_go_on or self._is_stopped:
                    raise self._error_after(end) from end
                # One that shut down is routed to for a while.
                await asyncio.sleep(0 if isinstance(end, RayActorError) else _PAUSE)
            else:
                raise EngineDeadError("a replica has ended a stream that was not whole")
            if not stream.has_begun:
                continue
            if progress.has_several:
                parts = {part.request_id: index for index, part in progress.requests.items()}
                streams = [self._whole(part, stream) for part in progress.requests.values()]
                async with aclosing(merged(request.request_id, parts, streams)) as outputs:
                    async for output in outputs:
                        yield output
                return
            (request,) = progress.requests.values()

    def _error_after(self, end: RayActorError | EngineDeadError) -> BaseException:
        """The error of a stream that does not resume after the end of its replica.

        A replica whose engine dies exits; one that raises was shut down.
        """
        if self._is_stopped:
            return self.dead_error
        what = "died" if isinstance(end, RayActorError) else "ended"
        return EngineDeadError(f"a replica has {what}: {end}")

    async def _part(
        self, request: ReplicaRequest, stream: _Stream, unfinished: AbstractSet[int]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of one replica; raises the exceptions of the replica."""
        sent = request
        if stream.num_sent:  # the last replica may only have been unreachable, and get it again
            sent = replace(request, request_id=f"{request.request_id}~{stream.num_sent}")
        stream.num_sent += 1
        said: Any = self._here.handle.options(stream=True).generate.remote(sent)
        aborting = asyncio.ensure_future(self._abort(sent.request_id, stream))
        coming: asyncio.Future[RequestOutput | None] | None = None
        try:
            while True:
                coming = asyncio.ensure_future(anext(said))
                await asyncio.wait([coming, aborting], return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    yield _aborted(request, unfinished)
                    return
                output = await coming
                stream.has_begun = True
                if output is not None:
                    output.request_id = request.request_id
                    yield output
        except StopAsyncIteration:
            return
        except RayTaskError as error:
            if isinstance(error.cause, Exception):
                raise error.cause from None
            raise
        finally:
            aborting.cancel()
            said.cancel()
            if coming is not None:
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)

    async def _abort(self, request_id: str, stream: _Stream) -> None:
        """Abort a request on its replica, once requested; returns when its last output is late."""
        await stream.aborted.wait()
        asked = self._ask_all("abort", request_id, timeout_s=_ABORT_PATIENCE)
        await asyncio.gather(asked, asyncio.sleep(_ABORT_PATIENCE), return_exceptions=True)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; their streams get a last output with the finish reason "abort"."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            if name in self._streams:
                self._streams[name].aborted.set()

    def has_begun(self, request_id: str) -> bool:
        """Whether a step has processed a part of an unfinished request."""
        stream = self._streams.get(request_id)
        return stream is not None and stream.has_begun

    async def check_health(self) -> None:
        """Check that a replica has answered lately; sends a request only before the first answer.

        Raises:
            EngineDeadError: No replica has.
        """
        if self._answered == -math.inf:
            await self._look()
        self._start_watch()
        if time.monotonic() > self._answered + _HEALTH_PATIENCE:
            raise EngineDeadError("no replica answers")

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter on every replica, or on none; returns True."""
        try:
            await self._ask_all("add_lora", lora_request)
        except Exception:
            with suppress(EngineDeadError):
                await self._ask_all("remove_lora", lora_request.lora_int_id)
            raise
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter on every replica; returns whether one had it."""
        return any(await self._ask_all("remove_lora", lora_id))

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._here.tokenizer

    async def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._here.tokenizer

    async def get_model_config(self) -> ModelInfo:
        """Information about the model."""
        return self._here.facts.model_info

    async def reset_prefix_cache(self) -> bool:
        """Reset the prefix cache of every replica; returns whether all did."""
        return all(await self._ask_all("reset_prefix_cache"))

    def snapshot(self) -> EngineSnapshot:
        """Totals of all replicas, at most a second old."""
        with suppress(RuntimeError):  # outside the event loop
            self._start_watch()
        return EngineSnapshot.total(self._replicas, list(self._gone.values()))

    def shutdown(self) -> None:
        """Stop the replicas; unfinished streams get a last output."""
        self._is_stopped = True
        if self._watch is not None:
            self._watch.cancel()
        self._end(True)
        self._is_over.set()

    def abandon(self) -> None:
        """Request the end of the replicas on a cluster that outlives this process."""
        self._end(False)

    @property
    def _here(self) -> Deployed:
        if self._deployed is None:
            raise self._failure or EngineDeadError("the replicas are still being made")
        return self._deployed

    async def _ask_all(
        self, method: str, *given: object, timeout_s: float = _PATIENCE
    ) -> list[Any]:
        """Call a method on every replica; those that die meanwhile are ignored.

        Raises:
            EngineDeadError: All died, or one does not answer in time.
            Exception: What the method raises.
        """
        asked = self._here.handle.broadcast(method, *given)
        try:
            found: list[Any] = await asyncio.to_thread(
                asked.results, timeout_s=timeout_s, return_exceptions=True
            )
            answers = [answer for answer in found if not isinstance(answer, RayActorError)]
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
        except RayTaskError as error:
            if isinstance(error.cause, Exception):
                raise error.cause from None
            raise
        except (RayError, RayServeException, TimeoutError) as error:
            raise EngineDeadError(f"a replica does not answer: {type(error).__name__}") from error
        if not answers:
            raise EngineDeadError("no replica answers")
        return answers

    def _start_watch(self) -> None:
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._keep_looking())

    async def _keep_looking(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(_LOOK)

    async def _look(self) -> None:
        """Request the state of all replicas; dead or stalled ones do not answer."""
        answers: list[Any] = []
        asked = self._here.handle.broadcast("state")
        with suppress(RayError, RayServeException, TimeoutError):
            answers = await asyncio.to_thread(
                asked.results, timeout_s=_HEALTH_PATIENCE / 2, return_exceptions=True
            )
        found = {state.name: state.snapshot for state in answers if isinstance(state, ReplicaState)}
        known = self._gone | self._replicas
        self._gone = {name: known[name] for name in known.keys() - found.keys()}
        self._replicas = found
        if found:
            self._answered = time.monotonic()


def _check_end(output: RequestOutput, stream: _Stream) -> None:
    """Check that a replica did not abort a request because it is shutting down.

    Raises:
        EngineDeadError: It did.
    """
    reasons = {completion.finish_reason for completion in output.outputs}
    if output.finished and "abort" in reasons and not stream.aborted.is_set():
        raise EngineDeadError("it was shut down")


def _aborted(request: ReplicaRequest, unfinished: AbstractSet[int]) -> RequestOutput:
    """Last output of an aborted request whose replica returned none."""
    prompt = request.prompt
    return RequestOutput(
        request_id=request.request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=[],
        prompt_logprobs=None,
        outputs=[
            CompletionOutput(index=index, text="", token_ids=[], finish_reason="abort")
            for index in sorted(unfinished)
        ],
        finished=True,
        metrics=RequestMetrics(request.arrival_time or 0.0),
        lora_request=request.lora_request,
    )
