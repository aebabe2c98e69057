"""What an engine asks of whatever runs the model: plain data in, handles and plain data out.

Whoever implements ``Executor`` owns the weights, the KV pools and every tensor: those that one step
leaves for the next one too.  Nothing here knows torch, so the engine does not either; a test double
implements the Protocol and is passed to the engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pagedserve._core import InputBuffers, SchedulerOutputs, WindowGroup
from pagedserve.executor.memory import MemoryPlan
from pagedserve.images import TEXT_ALONE, ImageRules
from pagedserve.models.encoder_prompts import EncoderDecoder, EncoderInput
from pagedserve.models.prompt_images import PlacedImage, PromptImages
from pagedserve.pooling.rules import PoolingRules
from pagedserve.sampling.results import PositionLogprobs, SampledRows
from pagedserve.sampling.rows import PromptTargets, RowSampling


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What an engine needs to know of a model.

    Attributes:
        vocab_size: Rows of the embedding; token ids are below it.
        max_model_len: Most tokens of a sequence.
        eos_token_ids: Tokens that end a sequence.
        device_type: "cpu" or "cuda".
        backends: One line for people: who computes attention and everything else.
        pooling: How it makes one vector of a prompt; None for a model that generates.
        sliding_window: Tokens that a query sees, itself included, where that is so in every layer.
        group_window: The widest window of the layers that see less than others do; None where all
            see alike.
        images: How prompts have images, or why they may have none.
        sees_whole_prompts: Whether a prompt must be computed in one step: by an encoder, whose
            tokens see those behind them, or to pool the states of other tokens than the last.
        keeps_states: Whether layers keep a state of the whole sequence, which no block has.
        encoder_decoder: How prompts begin, where an encoder reads one and a decoder goes on.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    device_type: str
    backends: str
    pooling: PoolingRules | None = None
    sliding_window: int | None = None
    group_window: int | None = None
    images: ImageRules | str = TEXT_ALONE
    sees_whole_prompts: bool = False
    keeps_states: bool = False
    encoder_decoder: EncoderDecoder | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The most that a step may hold.

    Attributes:
        max_num_tokens: Tokens of a step.
        max_num_rows: Rows of a step.
        max_model_len: Tokens of a sequence.
        window: The newest of them whose keys are kept; None keeps all.
        group_window: Tokens that a query sees in layers that have KV blocks of their own; None
            where all layers share.
        num_lookahead_slots: Drafts of a row.
    """

    max_num_tokens: int
    max_num_rows: int
    max_model_len: int
    window: int | None = None
    group_window: int | None = None
    num_lookahead_slots: int = 0

    @property
    def max_num_samples(self) -> int:
        """Sampled tokens of a step: one a row, and one a draft."""
        return min(self.max_num_tokens, self.max_num_rows * (1 + self.num_lookahead_slots))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """The KV cache, and the largest step that is to run over it.

    Attributes:
        num_gpu_blocks: Blocks where the model computes.
        num_cpu_blocks: Blocks for swapped sequences.
        block_size: Tokens of a block.
        limits: Of a step.
        num_state_slots: Places for what layers keep of a sequence beside keys and values.
        num_cpu_state_slots: Likewise for swapped sequences.
        window_group: Blocks of their own for layers with a window; None where all share.
    """

    num_gpu_blocks: int
    num_cpu_blocks: int
    block_size: int
    limits: StepLimits
    num_state_slots: int = 0
    num_cpu_state_slots: int = 0
    window_group: WindowGroup | None = None


class HostBuffers(Protocol):
    """The arrays of a step in host memory, which the core fills."""

    @property
    def query_start(self) -> NDArray[np.int32]:
        """Where each row begins in the step's tokens, ``[max_num_rows + 1]``."""

    @property
    def positions(self) -> NDArray[np.int64]:
        """Place of each token in its sequence, ``[max_num_tokens]``."""

    @property
    def sample_rows(self) -> NDArray[np.int32]:
        """The row of each sample, ``[max_num_rows]``."""

    @property
    def row_handles(self) -> NDArray[np.int64]:
        """The scheduler's handle of each row's sequence, ``[max_num_rows]``."""

    def writable(self) -> InputBuffers:
        """What the core fills, once the device has its copy of the step before."""


class ModelOutput(NamedTuple):
    """What a step gave: its samples, and what was asked about prompts.

    Where the model pools, ``pooled`` float32 ``[S, F]`` is what it gave, and tokens mean nothing.
    """

    sampled: SampledRows
    prompt_logprobs: PositionLogprobs | None
    pooled: NDArray[np.float32] | None = None


class StepHandle(Protocol):
    """A step that was launched."""

    @property
    def is_async_safe(self) -> bool:
        """Whether one token a row, known on the device by now, is all that is wanted of it.

        Only then may the next step be launched before ``results``.
        """

    def results(self) -> ModelOutput:
        """Wait for the step."""


class Adapter(Protocol):
    """An adapter whose weights are in host memory for as long as somebody holds this."""

    @property
    def ordinal(self) -> int:
        """Of its contents, from 1 on: equal contents have one, others never get it."""


class Executor(Protocol):
    """A loaded model and all that runs it."""

    @property
    def model_info(self) -> ModelInfo:
        """What the model is."""

    def determine_num_blocks(self, limits: StepLimits) -> MemoryPlan:
        """How many KV blocks there are to be, and where the memory goes.

        Raises:
            ConfigError: More than is free, or too little to be of use.
        """

    def init_cache(self, shape: CacheShape) -> None:
        """Allocate KV pools and step buffers; called once, before the first step."""

    def load_adapter(self, name: str, path: str) -> Adapter:
        """Have the adapter of a directory in host memory; any thread may ask, beside a step.

        Raises:
            RequestError: What is wrong with its files, and what is accepted.
        """

    def drop_adapter(self, ordinal: int) -> None:
        """Keep an adapter in host memory no longer than somebody holds it."""

    def image_positions(
        self, token_ids: Sequence[int], images: Sequence[PlacedImage]
    ) -> NDArray[np.int64] | None:
        """Positions ``[3, P]`` of a prompt of P tokens, where a model counts in three dimensions.

        Any thread may ask, beside a step.
        """

    def encode_images(self, images: Sequence[PlacedImage]) -> None:
        """Have the features of images for the step that is launched next.

        Raises:
            Exception: Whatever a model makes of them.
        """

    def encode_prompts(self, prompts: Mapping[int, EncoderInput]) -> None:
        """Have the encoder's states of prompts, by row, for the step that is launched next."""

    def check(self) -> None:
        """Whether steps can be run; any thread may ask.

        Raises:
            ExecutorDeadError: A process that computes has died.
        """

    def restart(self) -> None:
        """Load all that died anew; pools and their contents are lost."""

    def shutdown(self) -> None:
        """End the processes that it has started; nothing can be run afterwards."""

    @property
    def buffers(self) -> HostBuffers:
        """The arrays that the core fills before ``launch``; there from ``init_cache`` on."""

    def launch(
        self,
        scheduled: SchedulerOutputs,
        rows: Sequence[RowSampling],
        prompts: PromptTargets | None = None,
        after: StepHandle | None = None,
        images: Mapping[int, PromptImages] | None = None,
    ) -> StepHandle:
        """Begin one step, whose inputs the core has written to the buffers.

        On a GPU this returns once everything is queued, on the CPU once the model has run.

        Args:
            scheduled: The step's decisions; its block moves, and the adapters that it brings into
                slots, come before the model.
            rows: Parameters of its samples, S of them.
            prompts: Positions whose log-probabilities are wanted besides.
            after: The step before, where its tokens are not yet known to the core: an input of
                ``-1 - i`` stands for token i of it.
            images: Of the prompts of rows, by row; those with tokens in the step are encoded.

        Raises:
            StepError: Rows are not as many as the step's samples.
        """
