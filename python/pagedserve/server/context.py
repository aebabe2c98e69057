"""State shared by the routes: engine, model names, adapters, limits and draining."""

import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

from pagedserve.decisions.calibration import Calibration
from pagedserve.engine.client import EngineClient
from pagedserve.engine.lanes import Lanes
from pagedserve.inputs.speech import SpeechRules
from pagedserve.pooling.rules import PoolingRules
from pagedserve.sampling_params import SamplingParams
from pagedserve.server.http.bounds import SMALL_BODY_BYTES
from pagedserve.server.http.errors import ServerError, UnavailableError
from pagedserve.server.limits import Admission
from pagedserve.server.metrics import Metrics
from pagedserve.server.models.adapters import ServedAdapters
from pagedserve.server.options import LoraModule, ServerArgs
from pagedserve.server.protocol import EngineBody
from pagedserve.server.responses.store import ResponseStore
from pagedserve.server.tokenization import Tokenization

if TYPE_CHECKING:
    from pagedserve.server.http.tracing import Tracer

T = TypeVar("T")

# The engine's thread gives the event loop the interpreter within this many seconds.  The loop gives
# it up at each call of the socket: with 0.5 ms, hundreds of requests a second beside a model of
# short steps made it wait for up to 300 ms a round, with 0.05 ms for 80.
SWITCH_SECONDS: Final = 50e-6

# Tag that Ollama's clients add to names without one.
_LATEST: Final = ":latest"

_UNCALIBRATED: Final = Calibration()


@dataclass(slots=True)
class Running:
    """A response in progress.

    Attributes:
        answer_id: Id of the response.
        names: Request ids of its prompts in the engine.
        is_aborted: Whether an abort was requested.
    """

    answer_id: str
    names: list[str]
    is_aborted: bool = False


@dataclass(slots=True, kw_only=True)
class Context:
    """State of a running server.

    Attributes:
        client: The engine.
        args: Options of the server.
        default_params: Default sampling parameters; known before the model is loaded.
        admission: Admission control.
        metrics: Metrics of requests.
        adapters: Adapters served under further names.
        root: Hub id of the model; None for files of this machine.
        tracer: Creates a span per request; None disables tracing.
        created: Start of the server, seconds of the wall clock.
        is_draining: Whether new requests are refused.
        num_open: Number of HTTP requests in progress.
        num_open_body_bytes: Bytes of bodies that are incomplete or not parsed.
        chat_template: Overrides the model's chat template.
        text: Converts texts and conversations of requests to tokens, and back.
        jobs: Responses in progress, by their ids in the engine.
        responses: Stored responses of the Responses API.
        calibration: Temperatures of typed decisions.
    """

    client: EngineClient
    args: ServerArgs
    default_params: Future[SamplingParams]
    admission: Admission
    metrics: Metrics
    adapters: ServedAdapters
    root: str | None = None
    tracer: "Tracer | None" = None
    created: int = field(default_factory=lambda: int(time.time()))
    is_draining: bool = False
    num_open: int = 0
    num_open_body_bytes: int = 0
    chat_template: InitVar[str | None] = None
    text: Tokenization = field(init=False)
    jobs: dict[str, Running] = field(default_factory=dict)
    responses: ResponseStore = field(init=False)
    calibration: Calibration = _UNCALIBRATED
    _lanes: Lanes = field(default_factory=lambda: Lanes("pagedserve-server"), repr=False)

    def __post_init__(self, chat_template: str | None) -> None:
        self.text = Tokenization(
            client=self.client, args=self.args, chat_template=chat_template, lanes=self._lanes
        )
        self.responses = ResponseStore(self.args.max_stored_response_bytes)

    async def open(self, max_num_seqs: int) -> None:
        """Accept requests, with the sizes of the loaded model, and load the adapters.

        Threads of the process take turns by ``SWITCH_SECONDS`` from now on.

        Args:
            max_num_seqs: Maximum number of running sequences.

        Raises:
            RequestError: An adapter, or a default variable of the chat template, is invalid.
            ServerError: The name of an adapter is taken.
        """
        model = await self.client.get_model_config()
        self.text.max_model_len = model.max_model_len
        self.text.vocab_size = model.vocab_size
        self.text.check_defaults()
        for text in self.args.lora_modules:
            await self.adapters.load(LoraModule.parse(text))
        sys.setswitchinterval(SWITCH_SECONDS)
        self.admission.max_num_seqs = max_num_seqs

    async def check_ready(self) -> None:
        """Check that requests are accepted.

        Raises:
            UnavailableError: The server starts or ends.
            ServerError: 503, the engine has died.
        """
        if self.is_draining:
            raise UnavailableError("the server is shutting down", retry_after=5)
        if self.client.errored:
            raise ServerError(503, str(self.client.dead_error))
        if not (self.client.is_running and self.admission.max_num_seqs):
            raise UnavailableError("the model is being loaded", retry_after=5)

    async def abort(self, running: Running) -> None:
        """Abort a response; one whose prompts are still being prepared ends after that."""
        running.is_aborted = True
        await self.client.abort(running.names)

    async def check_generates(self) -> None:
        """Check that the model is a generative model.

        Raises:
            ServerError: 400, it is a pooling model.
        """
        if (await self.client.get_model_config()).pooling is not None:
            raise ServerError(
                400,
                "the model pools, and makes no text; accepted are embeddings, classifications, "
                "scores and rankings",
            )

    async def speech_rules(self) -> SpeechRules:
        """Speech tokens of the model.

        Raises:
            ServerError: 400, it does not accept audio.
        """
        known = (await self.client.get_model_config()).encoder_decoder
        if known is None or known.speech is None:
            raise ServerError(400, "the model does not accept audio; serve a model such as Whisper")
        return known.speech

    async def pooling_rules(self) -> PoolingRules:
        """Pooling configuration of the model.

        Raises:
            ServerError: 400, it is a generative model.
        """
        rules = (await self.client.get_model_config()).pooling
        if rules is None:
            raise ServerError(
                400,
                "the model generates; accepted are completions and chats, or a server with "
                "--runner pooling",
            )
        return rules

    async def aside(self, make: Callable[[], T], *, cost: int) -> T:
        """Run a function outside the event loop; ``cost`` is as in ``Lanes``."""
        return await self._lanes.run(make, cost=cost, group=object())

    async def for_body(self, make: Callable[[], T], *, num_bytes: int) -> T:
        """Run a function of a body.

        For a small body it takes less than a thread switch, and runs in the event loop; for others
        as by ``aside``.
        """
        return make() if num_bytes <= SMALL_BODY_BYTES else await self.aside(make, cost=num_bytes)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model; responses have the first."""
        return self.adapters.base_names

    @property
    def all_names(self) -> list[str]:
        """Names of the model, and of the adapters."""
        return [*self.names, *self.adapters.names]

    def model_name(self, asked: str | None) -> str:
        """Return the model name for the response, without the tag that Ollama's clients add.

        Raises:
            ServerError: 404, unknown model.
        """

        def is_known(name: str) -> bool:
            return name in self.names or self.adapters.get(name) is not None

        if asked is not None and not is_known(asked):
            bare = asked.removesuffix(_LATEST)
            if is_known(bare):
                return bare
            raise ServerError(
                404,
                f"The model `{asked}` does not exist; this server has `{self.names[0]}` "
                "(v1/models lists all).",
                param="model",
            )
        return asked or self.names[0]

    async def model_for(self, body: EngineBody) -> str:
        """Check what all requests for new tokens have, and return the name of their model.

        Raises:
            RequestError: Fields are unknown, or not supported.
            ServerError: Unknown model, still loading, or a pooling model.
        """
        await self.check_ready()
        model = self.model_name(body.model)
        await self.check_generates()
        body.check_fields(allows_unknown=self.args.allow_unknown_fields)
        return model


def make_context(
    client: EngineClient,
    names: tuple[str, ...],
    args: ServerArgs,
    *,
    default_params: Future[SamplingParams],
    root: str | None = None,
    tracer: "Tracer | None" = None,
    chat_template: str | None = None,
    calibration: Calibration = _UNCALIBRATED,
) -> Context:
    """Create the state of a server, which ``Context.open`` opens; arguments are its attributes."""
    admission = Admission(client, args.max_num_queued_reqs, args.max_num_queued_tokens)
    return Context(
        client=client,
        args=args,
        default_params=default_params,
        admission=admission,
        metrics=Metrics(client, names[0], admission),
        adapters=ServedAdapters(client, names),
        root=root,
        tracer=tracer,
        chat_template=chat_template,
        calibration=calibration,
    )
