"""Request handlers: from a body to the chunks of its response.

``Job`` is the base of all requests to the engine, ``GenerationJob`` that of completions and chats;
``completions`` and ``chat`` define the format of their choices.

Costs: a plain delta is one string joined and encoded, without a JSON library.
"""

import asyncio
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from typing import Any, Final, Protocol

from starlette.types import Scope

from pagedserve.engine.stats import request_time
from pagedserve.errors import RequestError
from pagedserve.inputs import Prompt
from pagedserve.lora.request import LoRARequest
from pagedserve.outputs import CompletionOutput, RequestOutput
from pagedserve.pooling_params import PoolingParams
from pagedserve.sampling_params import SamplingParams
from pagedserve.server.context import Context, Running
from pagedserve.server.fields import StreamOptions
from pagedserve.server.generation import Usage, check_end, generate, prompt_ids
from pagedserve.server.http.apis import error_event
from pagedserve.server.http.errors import ServerError, rename_fields, server_error
from pagedserve.server.protocol import Body, EngineBody

# Status codes from this one on are errors of the server.
_SERVER_FAILED: Final = 500
# Approximate bytes of a log-probability in a response.
_LOGPROB_BYTES: Final = 64
# Log-probabilities of a token where all of the vocabulary are requested: at least this many.
_WHOLE_VOCABULARY: Final = 1 << 10


class Choices(Protocol):
    """Format of a response's choices."""

    @property
    def kind(self) -> str:
        """The ``object`` of a whole response."""

    @property
    def chunk_kind(self) -> str:
        """The ``object`` of a stream's chunk."""

    @property
    def prompt_field(self) -> str:
        """Name of the field with the prompts."""

    @property
    def field_names(self) -> Mapping[str, str]:
        """Names of the fields of sampling parameters that are named otherwise."""

    def opening(self, index: int) -> str | None:
        """First delta of a choice in a stream, as JSON; None to send none."""

    def plain_delta(self, index: int, completion: CompletionOutput) -> str | None:
        """Delta with text only, as JSON; None if the completion has more."""

    def deltas(
        self, index: int, output: RequestOutput, completion: CompletionOutput
    ) -> list[dict[str, Any]]:
        """Deltas of a choice, each for a chunk; none if there is nothing to send yet."""

    def whole(
        self, index: int, output: RequestOutput, completion: CompletionOutput
    ) -> dict[str, Any]:
        """Choice of a whole response."""

    def of_answer(self, output: RequestOutput) -> dict[str, Any]:
        """Further fields of a whole response, and of a stream's first chunk."""


@dataclass(slots=True)
class Pace:
    """Buffers deltas for the stream interval; a choice's first and last are sent at once.

    Attributes:
        num_tokens: Stream interval: minimum tokens of a delta.
    """

    num_tokens: int
    _held: dict[tuple[int, int], CompletionOutput | None] = field(default_factory=dict)

    def due(self, place: int, deltas: Sequence[CompletionOutput]) -> Sequence[CompletionOutput]:
        """Deltas to send now, after the next ones of the prompt at index ``place``."""
        if self.num_tokens == 1:
            return deltas
        due = []
        for delta in deltas:
            choice = (place, delta.index)
            is_first = choice not in self._held
            held = self._held.get(choice)
            if held is not None:
                held.add(delta)
            self._held[choice] = whole = held or delta
            is_full = len(whole.token_ids) >= self.num_tokens
            if is_first or is_full or whole.finish_reason is not None:
                self._held[choice] = None
                due.append(whole)
        return due


@dataclass(slots=True)
class Progress:
    """Progress of a prompt.

    Attributes:
        time: Arrival of its last tokens, in seconds of a monotonic clock.
        num_tokens: New tokens of all its outputs.
        texts: Text of each output; kept only for the log.
    """

    time: float
    num_tokens: int = 0
    texts: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Job(ABC):
    """A validated request of a client, with its prompts and parameters.

    Attributes:
        context: Context of the server.
        body: Body of the request.
        params: Parameters of all its prompts.
        prompt_sizes: Approximate number of tokens of each prompt; at least one prompt.
        make_prompts: Creates the prompts, after admission.
        answer_id: The ``id`` of the response.
        model: The ``model`` of the response.
        lora_request: Adapter to use.
        arrival_time: Seconds of the clock of requests; ``created`` in responses is wall-clock time.
        usage: Token usage so far.
        finishes: Finish reasons of its choices.
        last: Last output of each prompt that has ended.
        progress: Progress of each prompt.
    """

    context: Context
    body: EngineBody
    params: SamplingParams | PoolingParams
    prompt_sizes: Sequence[int]
    make_prompts: Callable[[], Awaitable[list[Prompt]]]
    answer_id: str
    model: str
    lora_request: LoRARequest | None
    arrival_time: float = field(default_factory=request_time)
    created: int = field(default_factory=lambda: int(time.time()))
    usage: Usage = field(default_factory=Usage)
    finishes: list[str] = field(default_factory=list)
    last: dict[int, RequestOutput] = field(default_factory=dict)
    progress: dict[int, Progress] = field(default_factory=dict)

    def same_request(self) -> dict[str, Any]:
        """Return the arguments of a job for the same request with responses of another API."""
        required = (each.name for each in fields(Job) if each.default_factory is MISSING)
        return {name: getattr(self, name) for name in required}

    @property
    def num_prompts(self) -> int:
        """Number of prompts, at least one."""
        return len(self.prompt_sizes)

    @property
    def num_seqs(self) -> int:
        """Number of sequences that it reserves."""
        return self.num_prompts

    @property
    def streams(self) -> bool:
        """Whether its response is a stream."""
        return False

    @property
    @abstractmethod
    def prompt_field(self) -> str:
        """Name of the field with the prompts."""

    @property
    def field_names(self) -> Mapping[str, str]:
        """Names of the fields of parameters that are named otherwise, for errors."""
        return {}

    @property
    def media_type(self) -> str:
        """Content type of a whole response."""
        return "application/json"

    @property
    def asked(self) -> object:
        """Input of the client, for the log."""
        return getattr(self.body, self.prompt_field)

    @abstractmethod
    def answer(self) -> AsyncGenerator[bytes, None]:
        """Chunks of its response, one unless it streams."""

    def failure(self, error: ServerError, scope: Scope) -> bytes:
        """Event that ends a stream with an error."""
        return error_event(error, scope)

    @abstractmethod
    def _count(self, place: int, output: RequestOutput) -> None:
        """Update the usage from an output of the prompt at index ``place``."""

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Run it; see ``generate``.  Its timeout aborts unfinished prompts."""
        context = self.context
        # Ids in the engine differ from those of clients, which may be equal.
        engine_id = f"{self.answer_id}-{uuid.uuid4().hex[:8]}"
        names = prompt_ids(engine_id, self.num_prompts)
        prompts = dict(zip(names, self.prompt_sizes, strict=True))
        places = {name: place for place, name in enumerate(names)}
        with context.admission.place_for(self.num_seqs, prompts):
            running = context.jobs[engine_id] = Running(self.answer_id, names)
            loop = asyncio.get_running_loop()
            abort = partial(_start, loop, context, running)
            timer = None
            if self.body.timeout is not None:
                timer = loop.call_later(self.body.timeout, abort)
            try:
                prompts_made = await self.make_prompts()
                if running.is_aborted:  # again, once each prompt has its stream
                    loop.call_soon(abort)
                stream = generate(
                    context.client,
                    prompts_made,
                    self.params,
                    names,
                    lora_request=self.lora_request,
                    priority=self.body.priority,
                    arrival_time=self.arrival_time,
                )
                async with aclosing(stream) as outputs:
                    async for output in outputs:
                        place = places[output.request_id]
                        self._count(place, output)
                        yield place, output
            except (GeneratorExit, asyncio.CancelledError):
                context.metrics.prompts_ended("abort", self.num_prompts - len(self.last))
                raise
            except Exception as error:
                if isinstance(error, RequestError):
                    rename_fields(error, self.field_names)
                    error.param = error.param or self.prompt_field
                if server_error(error).status >= _SERVER_FAILED:
                    context.metrics.prompts_ended("error", self.num_prompts - len(self.last))
                raise
            finally:
                del context.jobs[engine_id]
                if timer is not None:
                    timer.cancel()

    def _shown_usage(self) -> dict[str, object]:
        return self.usage.shown(with_details=self.context.args.enable_prompt_tokens_details)


@dataclass(slots=True, kw_only=True)
class TokenJob(Job):
    """A request that is answered by new tokens.

    Attributes:
        num_equal: Number of equal choices per output.
    """

    params: SamplingParams
    num_equal: int = 1

    @property
    def num_seqs(self) -> int:
        """Number of sequences that it reserves."""
        return self.num_prompts * self.params.max_num_running_seqs

    @property
    def wants_tokens(self) -> bool:
        """Whether new tokens are requested; else the one that is generated is dropped."""
        return True

    def _count(self, place: int, output: RequestOutput) -> None:
        metrics, now, num_tokens = self.context.metrics, time.monotonic(), 0
        progress = self.progress.get(place)
        for completion in output.outputs:
            num_tokens += len(completion.token_ids)
            if completion.finish_reason is not None:
                check_end(completion, is_begun=progress is not None)
                self.finishes += [completion.finish_reason] * self.num_equal
        if self.wants_tokens:
            self.usage.completion_tokens += num_tokens * self.num_equal
        if progress is None:
            progress = self.progress[place] = Progress(now)
            self.usage.count_prompt(place, output)
            metrics.first_token_came(output)
        elif num_tokens:
            metrics.tokens_came(now - progress.time, output)
        progress.time = now
        progress.num_tokens += num_tokens
        if self.context.args.log_prompts:
            for completion in output.outputs:
                text = progress.texts.get(completion.index, "")
                progress.texts[completion.index] = text + completion.text
        if output.finished:
            self.last[place] = output
            if self.params.prediction is not None:
                self.usage.count_prediction(place, output)
            metrics.prompt_finished(self.params, output, progress.num_tokens)

    def _num_bytes(
        self, output: RequestOutput, completion: CompletionOutput, *, is_first: bool
    ) -> int:
        """Approximate size of the log-probabilities of a choice, or of its delta."""
        params = self.params
        num_logprobs = len(completion.logprobs or ()) * num_shown(params.logprobs)
        if is_first:
            num_logprobs += len(output.prompt_logprobs or ()) * num_shown(params.prompt_logprobs)
        return num_logprobs * _LOGPROB_BYTES


@dataclass(slots=True, kw_only=True)
class GenerationJob(TokenJob):
    """A completion or a chat.

    Attributes:
        choices: Format of its choices.
    """

    body: Body
    choices: Choices

    @property
    def wants_tokens(self) -> bool:
        """Whether new tokens are requested; see ``TokenJob``."""
        return self.choices.kind != "text_completion" or self.body.max_tokens != 0

    @property
    def streams(self) -> bool:
        """Whether its response is a stream."""
        return self.body.stream

    @property
    def prompt_field(self) -> str:
        """Name of the field with the prompts."""
        return self.choices.prompt_field

    @property
    def field_names(self) -> Mapping[str, str]:
        """Names of the fields of parameters that are named otherwise, for errors."""
        return self.choices.field_names

    def answer(self) -> AsyncGenerator[bytes, None]:
        """Chunks of its response, one unless it streams."""
        return self._stream() if self.body.stream else self._whole()

    async def _whole(self) -> AsyncGenerator[bytes, None]:
        """The single chunk of a whole response."""
        async with aclosing(self.outputs()) as outputs:
            answers = [answer async for answer in outputs]
        num_bytes = self.num_equal * sum(
            self._num_bytes(output, completion, is_first=True)
            for _, output in answers
            for completion in output.outputs
        )
        yield await self.context.for_body(partial(self._text, answers), num_bytes=num_bytes)

    def _text(self, answers: Sequence[tuple[int, RequestOutput]]) -> bytes:
        """Whole response of some outputs, each with the index of its prompt."""
        choices: list[dict[str, Any]] = []
        more: dict[str, Any] = {}
        for place, output in answers:
            more |= self.choices.of_answer(output)
            for completion in output.outputs:
                choices += [
                    self.choices.whole(index, output, completion)
                    for index in self._indices(place, completion.index)
                ]
        choices.sort(key=lambda choice: int(choice["index"]))
        return json.dumps(
            {
                "id": self.answer_id,
                "object": self.choices.kind,
                "created": self.created,
                "model": self.model,
                "choices": choices,
                "usage": self._shown_usage(),
                "system_fingerprint": None,
                **more,
            }
        ).encode()

    async def _stream(self) -> AsyncGenerator[bytes, None]:
        """Events of a stream: all that are pending in one chunk."""
        head = (
            f'data: {{"id":{json.dumps(self.answer_id)},"object":"{self.choices.chunk_kind}",'
            f'"created":{self.created},"model":{json.dumps(self.model)},"choices":['
        )
        options = self.body.stream_options or StreamOptions()
        is_forced = self.context.args.enable_force_include_usage
        has_usage = is_forced or options.include_usage
        is_continuous = is_forced or (has_usage and options.continuous_usage_stats)
        opened: set[int] = set()
        pace = Pace(self.body.stream_interval)
        usage: dict[str, object] = {}
        tail = _tail(usage)
        async with aclosing(self.outputs()) as outputs:
            async for place, output in outputs:
                if is_continuous:
                    usage = {"usage": self._shown_usage()}
                    tail = _tail(usage)
                events = ""
                for completion in pace.due(place, output.outputs):
                    for index in self._indices(place, completion.index):
                        is_first = index not in opened
                        if is_first:
                            opened.add(index)
                            opening = self.choices.opening(index)
                            if opening is not None:
                                more = self.choices.of_answer(output)
                                events += head + opening + _tail(more | usage)
                        plain = self.choices.plain_delta(index, completion)
                        if plain is not None:
                            events += head + plain + tail
                            continue
                        make = partial(
                            self._events, index, output, completion, head=head, tail=tail
                        )
                        num_bytes = self._num_bytes(output, completion, is_first=is_first)
                        events += await self.context.for_body(make, num_bytes=num_bytes)
                if events:
                    yield events.encode()
        if has_usage:
            yield (head + _tail({"usage": self._shown_usage()})).encode()

    def _events(
        self,
        index: int,
        output: RequestOutput,
        completion: CompletionOutput,
        *,
        head: str,
        tail: str,
    ) -> str:
        """Events of the next deltas of a choice."""
        deltas = self.choices.deltas(index, output, completion)
        return "".join(head + json.dumps(delta) + tail for delta in deltas)

    def _indices(self, place: int, number: int) -> range:
        """Choice indices of an output of the prompt at index ``place``."""
        first = (place * self.params.n + number) * self.num_equal
        return range(first, first + self.num_equal)


def num_shown(num_top: int | None) -> int:
    """Log-probabilities of a token: the requested number of the most likely, and its own."""
    if num_top is None:
        return 0
    return 1 + (_WHOLE_VOCABULARY if num_top < 0 else num_top)


def _start(loop: asyncio.AbstractEventLoop, context: Context, running: Running) -> None:
    loop.create_task(context.abort(running))  # completes without waiting


def _tail(more: Mapping[str, object]) -> str:
    """The end of an event, after its choices."""
    return "]" + "".join(f',"{name}":{json.dumps(more[name])}' for name in more) + "}\n\n"
