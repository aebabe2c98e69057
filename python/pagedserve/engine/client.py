"""``EngineClient``: what a server may ask of an engine, wherever that runs."""

from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from pagedserve.engine.stats import EngineSnapshot
from pagedserve.executor.protocol import ModelInfo
from pagedserve.inputs import Prompt
from pagedserve.lora.request import LoRARequest
from pagedserve.outputs import RequestOutput
from pagedserve.pooling_params import PoolingParams
from pagedserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class EngineClient(Protocol):
    """Requests in, streams of outputs out; every method may be called while others run."""

    @property
    def is_running(self) -> bool:
        """Whether requests are taken: loaded, not dead, not shut down."""

    @property
    def errored(self) -> bool:
        """Whether the engine has died."""

    @property
    def dead_error(self) -> BaseException:
        """Why the engine has died, or that it runs no more."""

    def generate(
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
        """Run a request.

        Args:
            prompt: Text or token ids.
            sampling_params: How to continue it, where ``output_kind`` says what comes; or how to
                pool it.
            request_id: Of no other unfinished request.
            lora_request: The adapter to answer with; its files are read beside the steps.
            priority: Smaller goes first, where the scheduler's policy asks for it.
            arrival_time: Seconds of the wall clock; None is now.
            output_token_ids: Tokens that another engine made of it, behind which it goes on.

        Yields:
            Outputs up to the last.  Who leaves before it, by closing or cancelling, aborts the
            request.

        Raises:
            RequestError: A request that cannot be run; from the first ``anext``.
            EngineDeadError: The engine has died or is shut down.
        """

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; their streams get a last output with the finish reason "abort"."""

    def has_begun(self, request_id: str) -> bool:
        """Whether a step has taken an unfinished request up."""

    async def check_health(self) -> None:
        """Look whether the engine gets on.

        Raises:
            EngineDeadError: It has died or is shut down.
            EngineStalledError: Requests wait, and no step has ended for too long.
        """

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter into host memory before a request needs it; True.

        Raises:
            RequestError: What is wrong with it, and what is accepted.
        """

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter, with which running requests end; whether there was one."""

    async def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """The model's tokenizer."""

    async def get_model_config(self) -> ModelInfo:
        """What the model is."""

    async def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False, and nothing is forgotten, while a request runs."""

    def snapshot(self) -> EngineSnapshot:
        """Counts and gauges of the engine as they stand."""


class ServedEngine(EngineClient, Protocol):
    """An engine that a server starts with and ends with.

    Attributes:
        closing_seconds: What ``shutdown`` may take.
    """

    closing_seconds: float

    @property
    def is_loading(self) -> bool:
        """Whether the engine is still being made."""

    @property
    def max_num_seqs(self) -> int:
        """Sequences that run at once."""

    def wait_until_ready(self) -> None:
        """Wait until requests are taken.

        Raises:
            BaseException: What kept the engine from being made.
        """

    def shutdown(self) -> None:
        """Stop; streams that have not ended end with "abort"."""
