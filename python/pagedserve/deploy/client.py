"""``ReplicatedEngine``: many replicas behind the face of one engine.

A request goes to one replica.  When that dies, another goes on behind the tokens that have come: so
its stream is whole, and greedy and seeded ones say what they would have said.

Invariants:

1. A stream ends once: with its last output, an error, or because its reader left, and then nothing
   of it runs on any replica.
2. A request that kills whoever runs it is given up after a few deaths without a new token.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from pagedserve.deploy.affinity import prefix_keys
from pagedserve.deploy.progress import Progress, merged
from pagedserve.deploy.replica import Replica, ReplicaFacts, ReplicaRequest, ReplicaState
from pagedserve.engine.stats import EngineSnapshot
from pagedserve.errors import EngineDeadError, RequestError
from pagedserve.executor.protocol import ModelInfo
from pagedserve.inputs import Prompt
from pagedserve.lora.request import LoRARequest
from pagedserve.outputs import CompletionOutput, RequestMetrics, RequestOutput
from pagedserve.pooling_params import PoolingParams
from pagedserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Replicas that may die of a request without a token of it.
_MAX_DEATHS: Final = 3
# Seconds between two looks at all replicas.
_LOOK: Final = 1.0
# Seconds for an answer to anything but a request, and for the end of all.
_PATIENCE: Final = 60.0
# Seconds for one that says that a replica is there.
_HEALTH_PATIENCE: Final = 5.0


@dataclass(frozen=True, slots=True)
class Deployed:
    """What there is once the first replica is.

    Attributes:
        handle: Of the replicas.
        tokenizer: The model's.
        facts: Of a replica; all are alike.
        most: Replicas at most.
    """

    handle: DeploymentHandle[Replica]
    tokenizer: "PreTrainedTokenizerBase"
    facts: ReplicaFacts
    most: int


@dataclass(slots=True, eq=False)
class _Stream:
    """A request that has not ended."""

    has_begun: bool = False
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


class ReplicatedEngine:
    """An ``EngineClient`` over replicas; all calls come from one event loop."""

    closing_seconds = _PATIENCE

    def __init__(self, deploy: Callable[[], Deployed], end: Callable[[], None]) -> None:
        """Begin to deploy.

        Args:
            deploy: Starts the replicas, in a thread of its own.
            end: Ends them.
        """
        self._end = end
        self._deployed: Deployed | None = None
        self._failure: BaseException | None = None
        self._is_ready = threading.Event()
        self._is_stopped = False
        self._streams: dict[str, _Stream] = {}
        self._replicas: dict[str, EngineSnapshot] = {}
        # What those that are gone had done: sums of all do not fall.
        self._gone: list[EngineSnapshot] = []
        self._watch: asyncio.Task[None] | None = None
        self._is_over = threading.Event()
        threading.Thread(target=self._run, args=(deploy,), daemon=True).start()

    def _run(self, deploy: Callable[[], Deployed]) -> None:
        try:
            self._deployed = deploy()
        except BaseException as error:  # noqa: BLE001  # told by wait_until_ready
            self._failure = error
        self._is_ready.set()
        # A cluster that was started here ends with the thread that started it (PR_SET_PDEATHSIG).
        self._is_over.wait()

    @property
    def is_loading(self) -> bool:
        """Whether the first replica is still being made."""
        return not self._is_ready.is_set()

    def wait_until_ready(self) -> None:
        """Wait until requests are taken.

        Raises:
            BaseException: What kept the replicas from being made.
        """
        self._is_ready.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def is_running(self) -> bool:
        """Whether requests are taken."""
        return self._deployed is not None and not self._is_stopped

    @property
    def errored(self) -> bool:
        """False: Ray Serve starts a replica for each that dies."""
        return False

    @property
    def dead_error(self) -> BaseException:
        """Why no requests are taken."""
        return EngineDeadError("the replicas are shut down" if self._is_stopped else "they run")

    @property
    def max_num_seqs(self) -> int:
        """Sequences of the steps of all replicas that there may be."""
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
        """The outputs of a request, from as many replicas as it takes."""
        progress = Progress(request)
        num_deaths = 0
        while True:
            try:
                async for output in self._part(request, stream):
                    _check_end(output, stream)
                    num_deaths = 0
                    progress.add(output)
                    yield output
                    if output.finished:
                        return
            except (RayActorError, EngineDeadError) as death:
                num_deaths += 1
                can_go_on = progress.is_known or not stream.has_begun
                if num_deaths >= _MAX_DEATHS or not can_go_on:
                    raise EngineDeadError(f"a replica has died: {death}") from death
            else:
                raise EngineDeadError("a replica has ended a stream that was not whole")
            if not stream.has_begun:
                continue
            if progress.has_several:
                texts = {i: self._whole(text, stream) for i, text in progress.requests.items()}
                async with aclosing(merged(request.request_id, texts)) as outputs:
                    async for output in outputs:
                        yield output
                return
            (request,) = progress.requests.values()

    async def _part(
        self, request: ReplicaRequest, stream: _Stream
    ) -> AsyncGenerator[RequestOutput, None]:
        """What one replica says; what it raises is raised as it raised it."""
        said: Any = self._here.handle.options(stream=True).generate.remote(request)
        wants_abort = asyncio.ensure_future(stream.aborted.wait())
        coming: asyncio.Future[RequestOutput | None] | None = None
        try:
            while True:
                coming = asyncio.ensure_future(anext(said))
                await asyncio.wait([coming, wants_abort], return_when=asyncio.FIRST_COMPLETED)
                if stream.aborted.is_set() and not coming.done():
                    yield _aborted(request)
                    return
                output = await coming
                stream.has_begun = True
                if output is not None:
                    yield output
        except StopAsyncIteration:
            return
        except RayTaskError as error:
            if isinstance(error.cause, Exception):
                raise error.cause from None
            raise
        finally:
            wants_abort.cancel()
            said.cancel()
            if coming is not None:
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; their streams get a last output with the finish reason "abort"."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            if name in self._streams:
                self._streams[name].aborted.set()

    def has_begun(self, request_id: str) -> bool:
        """Whether a step has taken an unfinished request up."""
        stream = self._streams.get(request_id)
        return stream is not None and stream.has_begun

    async def check_health(self) -> None:
        """Whether a replica answers.

        Raises:
            EngineDeadError: None does.
        """
        for _ in range(_MAX_DEATHS):
            try:
                await asyncio.wait_for(self._here.handle.state.remote(), _HEALTH_PATIENCE)
            except (RayActorError, RayServeException):
                continue
            except TimeoutError:
                break
            return
        raise EngineDeadError("no replica answers")

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Have every replica read an adapter; True."""
        await self._ask_all("add_lora", lora_request)
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Have every replica forget an adapter; whether one knew it."""
        return any(await self._ask_all("remove_lora", lora_id))

    async def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """The model's tokenizer."""
        return self._here.tokenizer

    async def get_model_config(self) -> ModelInfo:
        """What the model is."""
        return self._here.facts.model_info

    async def reset_prefix_cache(self) -> bool:
        """Have every replica forget every prefix; whether all did."""
        return all(await self._ask_all("reset_prefix_cache"))

    def snapshot(self) -> EngineSnapshot:
        """The sums of all replicas, as of a second ago."""
        if self._watch is None:
            with suppress(RuntimeError):  # outside the event loop
                self._watch = asyncio.get_running_loop().create_task(self._keep_looking())
        return EngineSnapshot.total(self._replicas, self._gone)

    def shutdown(self) -> None:
        """End the replicas; streams that have not ended get a last output."""
        self._is_stopped = True
        if self._watch is not None:
            self._watch.cancel()
        self._end()
        self._is_over.set()

    @property
    def _here(self) -> Deployed:
        if self._deployed is None:
            raise self._failure or EngineDeadError("the replicas are still being made")
        return self._deployed

    async def _ask_all(self, method: str, *given: object) -> list[Any]:
        asked = self._here.handle.broadcast(method, *given)
        try:
            return list(await asyncio.to_thread(asked.results, timeout_s=_PATIENCE))
        except RayTaskError as error:
            if isinstance(error.cause, Exception):
                raise error.cause from None
            raise

    async def _keep_looking(self) -> None:
        while True:
            with suppress(RayError, RayServeException, TimeoutError):  # one has just died
                found: list[ReplicaState] = await self._ask_all("state")
                replicas = {state.name: state.snapshot for state in found}
                gone = self._replicas.keys() - replicas.keys()
                self._gone += [self._replicas[name] for name in gone]
                self._replicas = replicas
            await asyncio.sleep(_LOOK)


def _check_end(output: RequestOutput, stream: _Stream) -> None:
    """Whether a replica ended a request for its own sake: it is being shut down.

    Raises:
        EngineDeadError: It did.
    """
    reasons = {completion.finish_reason for completion in output.outputs}
    if output.finished and "abort" in reasons and not stream.aborted.is_set():
        raise EngineDeadError("it was shut down")


def _aborted(request: ReplicaRequest) -> RequestOutput:
    """The last output of a request that was ended from here."""
    prompt = request.prompt
    return RequestOutput(
        request_id=request.request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=[],
        prompt_logprobs=None,
        outputs=[CompletionOutput(index=0, text="", token_ids=[], finish_reason="abort")],
        finished=True,
        metrics=RequestMetrics(request.arrival_time or 0.0),
        lora_request=request.lora_request,
    )
