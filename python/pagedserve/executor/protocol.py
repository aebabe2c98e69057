"""``Executor``: the interface between an engine and the model; plain data in both directions.

An ``Executor`` owns the weights, the KV pools and every tensor, including those passed from one
step to the next.  Nothing here uses torch, so the engine does not either; a test double implements
the Protocol and is passed to the engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from pagedserve._core import InputBuffers, KVGroup, SchedulerOutputs
from pagedserve.cache.layers import WindowKind
from pagedserve.errors import StepError
from pagedserve.executor.memory import MemoryPlan
from pagedserve.inputs.encoder_prompts import EncoderDecoder, EncoderInput
from pagedserve.inputs.images import TEXT_ALONE, ImageRules
from pagedserve.inputs.prompt_images import PlacedImage, PromptImages
from pagedserve.pooling.rules import PoolingRules
from pagedserve.sampling.results import PositionLogprobs, SampledRows
from pagedserve.sampling.rows import PromptTargets, RowSampling

if TYPE_CHECKING:
    from pagedserve.cache.moves import BlockMoves

# Of rows.
_NOTHING: Final[Mapping[int, Any]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Properties of a model that an engine needs.

    Attributes:
        vocab_size: Rows of the embedding; token ids are below it.
        max_model_len: Maximum tokens of a sequence.
        eos_token_ids: Tokens that end a sequence.
        device_type: "cpu" or "cuda".
        backends: Readable line with the attention backend and the other kernels.
        pooling: Pooling configuration; None for a generative model.
        group_window: Widest sliding window of the layers, in tokens, or chunk size of chunked
            attention if none has one; None without both.
        group_kind: Which of the two: "window" or "chunked".
        images: Rules for images in prompts, or the reason why they are refused.
        sees_whole_prompts: Whether a prompt must be computed in one step: for bidirectional
            attention, or to pool the states of other tokens than the last.
        keeps_states: Whether layers keep a recurrent state of the sequence outside its blocks.
        encoder_decoder: Prompt format of an encoder-decoder; None for other models.
        dtype: Dtype of weights and hidden states, by its name in torch.
        file_bytes: Bytes of the files with the weights; 0 if they are not known.
        weight_bytes: Bytes of the loaded weights, of all ranks; 0 if they are not known.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    device_type: str
    backends: str
    pooling: PoolingRules | None = None
    group_window: int | None = None
    group_kind: WindowKind = "window"
    images: ImageRules | str = TEXT_ALONE
    sees_whole_prompts: bool = False
    keeps_states: bool = False
    encoder_decoder: EncoderDecoder | None = None
    dtype: str = "float32"
    file_bytes: int = 0
    weight_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Maximum contents of a step.

    Attributes:
        max_num_tokens: Tokens per step.
        max_num_rows: Rows per step.
        max_model_len: Tokens per sequence.
        group_window: Widest window, or chunk size, of layers with separate KV blocks; None if all
            layers share blocks.
        group_kind: Kind of the KV group of those layers.
        num_lookahead_slots: Draft tokens per row.
    """

    max_num_tokens: int
    max_num_rows: int
    max_model_len: int
    group_window: int | None = None
    group_kind: WindowKind = "window"
    num_lookahead_slots: int = 0

    @property
    def max_num_samples(self) -> int:
        """Maximum sampled tokens per step: one per row, and one per draft token."""
        return min(self.max_num_tokens, self.max_num_rows * (1 + self.num_lookahead_slots))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """Shape of the KV cache, and the limits of a step.

    Attributes:
        num_gpu_blocks: Blocks on the model's device.
        num_cpu_blocks: Blocks for swapped sequences.
        block_size: Tokens per block.
        limits: Limits of a step.
        groups: KV groups beside that of the layers that keep all keys and values.
    """

    num_gpu_blocks: int
    num_cpu_blocks: int
    block_size: int
    limits: StepLimits
    groups: tuple[KVGroup, ...] = ()

    @property
    def max_blocks_per_row(self) -> int:
        """Maximum length of a block table.

        A sequence has no more blocks than the pool, but tables keep those that a window has left.
        """
        longest = self.limits.max_model_len + self.limits.num_lookahead_slots
        num_blocks = -(-longest // self.block_size)
        has_window = self.limits.group_window is not None
        return num_blocks if has_window else min(num_blocks, self.num_gpu_blocks)


class HostBuffers(Protocol):
    """The arrays of a step in host memory, which the core fills."""

    @property
    def query_start(self) -> NDArray[np.int32]:
        """Start of each row in the step's tokens, ``[max_num_rows + 1]``."""

    @property
    def positions(self) -> NDArray[np.int64]:
        """Position of each token in its sequence, ``[max_num_tokens]``."""

    @property
    def sample_rows(self) -> NDArray[np.int32]:
        """Row of each sample, ``[max_num_samples]``."""

    @property
    def row_handles(self) -> NDArray[np.int64]:
        """The scheduler's handle of each row's sequence, ``[max_num_rows]``."""

    def writable(self) -> InputBuffers:
        """Buffers for the core to fill, once the device has copied the previous step."""


class ModelOutput(NamedTuple):
    """Results of a step.

    Attributes:
        sampled: Sampled tokens; undefined for a pooling model.
        prompt_logprobs: Log-probabilities of prompts, if any are required.
        pooled: Vectors of a pooling model, float32 ``[S, F]``.
        failed: Error of each row whose images or encoder input could not be computed, in one line.
            If there are any, the model did not run and nothing else is defined: the engine ends
            their requests, and repeats the step for the others.
        image_lookups: Images that the step looked up in the cache of features, and how many of them
            were found.
    """

    sampled: SampledRows
    prompt_logprobs: PositionLogprobs | None = None
    pooled: NDArray[np.float32] | None = None
    failed: Mapping[int, str] = _NOTHING
    image_lookups: tuple[int, int] = (0, 0)


class StepHandle(Protocol):
    """A launched step."""

    @property
    def is_async_safe(self) -> bool:
        """Whether the step needs one token per row only, available on the device by now.

        Only then may the next step be launched before ``results``.
        """

    def results(self) -> ModelOutput:
        """Wait for the step, and return its results."""


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Sizes of a step.

    Attributes:
        num_rows: Rows, R; 0 for a step that only moves blocks.
        num_batched_tokens: Tokens, T.
        num_samples: Sampled positions, S.
        max_num_blocks: Entries of a row of the block tables, B.
        max_num_cross_blocks: Entries of a row of the tables of the last KV group beside the first,
            which is that of cross attention if there is one.
    """

    num_rows: int
    num_batched_tokens: int
    num_samples: int
    max_num_blocks: int
    max_num_cross_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """Everything that an executor needs for a step, besides the arrays in its buffers.

    Attributes:
        sizes: Sizes of the step.
        moves: Moves in the pool of each KV group, the first group's first, which precede the model;
            empty without any.
        adapters: Adapters to load before the model runs, as (ordinal, slot).
        rows: Sampling parameters of the S samples.
        prompts: Positions that need log-probabilities; None for none.
        images: Images of the rows' prompts, by row; those with tokens in the step are encoded.
        encoder_inputs: Encoder inputs of the prompts that start in the step, by row.
        after: The step before this one, if the core does not know its tokens yet: an input of
            ``-1 - i`` represents its token i.
    """

    sizes: StepSizes
    moves: "Sequence[BlockMoves]"
    adapters: Sequence[tuple[int, int]] = ()
    rows: Sequence[RowSampling] = ()
    prompts: PromptTargets | None = None
    images: Mapping[int, PromptImages] = field(default_factory=dict)
    encoder_inputs: Mapping[int, EncoderInput] = field(default_factory=dict)
    after: StepHandle | None = None

    def check(self) -> None:
        """Check that each sample has sampling parameters.

        Raises:
            StepError: The numbers of rows and samples differ.
        """
        if self.sizes.num_rows and len(self.rows) != self.sizes.num_samples:
            raise StepError(
                f"{len(self.rows)} sampling parameters for {self.sizes.num_samples} samples"
            )

    @classmethod
    def of(
        cls,
        scheduled: SchedulerOutputs,
        rows: Sequence[RowSampling],
        *,
        prompts: PromptTargets | None = None,
        images: Mapping[int, PromptImages] = _NOTHING,
        encoder_inputs: Mapping[int, EncoderInput] = _NOTHING,
        after: StepHandle | None = None,
    ) -> Self:
        """Create the input of a scheduled step; see the attributes."""
        return cls(
            sizes=StepSizes(
                num_rows=scheduled.num_rows,
                num_batched_tokens=scheduled.num_batched_tokens,
                num_samples=scheduled.num_samples,
                max_num_blocks=scheduled.max_num_blocks,
                max_num_cross_blocks=scheduled.table_widths[-1] if scheduled.table_widths else 0,
            ),
            moves=scheduled.moves if scheduled.has_moves else (),
            adapters=scheduled.adapters_to_load,
            rows=rows,
            prompts=prompts,
            images=images,
            encoder_inputs=encoder_inputs,
            after=after,
        )


class Adapter(Protocol):
    """An adapter whose weights stay in host memory while this object is referenced."""

    @property
    def ordinal(self) -> int:
        """Number of its contents, from 1 on: equal contents share one, others never get it."""


class Executor(Protocol):
    """A loaded model with everything that runs it."""

    @property
    def model_info(self) -> ModelInfo:
        """Properties of the model."""

    def determine_num_blocks(self, limits: StepLimits) -> MemoryPlan:
        """Compute the number of KV blocks and the memory plan.

        Raises:
            ConfigError: More than is free, or too little to be useful.
        """

    def init_cache(self, shape: CacheShape) -> None:
        """Allocate KV pools and step buffers; called once, before the first step."""

    def load_adapter(self, name: str, path: str) -> Adapter:
        """Load the adapter of a directory into host memory; thread-safe, callable during a step.

        Raises:
            RequestError: Its files are invalid; the message lists what is accepted.
        """

    def drop_adapter(self, ordinal: int) -> None:
        """Evict an adapter from host memory once it is no longer referenced."""

    def image_positions(
        self, token_ids: Sequence[int], images: Sequence[PlacedImage]
    ) -> NDArray[np.int64] | None:
        """Positions ``[3, P]`` of a prompt of P tokens, for models with 3D positions.

        Thread-safe, and callable during a step.
        """

    def check(self) -> None:
        """Check that steps can be run; thread-safe.

        Raises:
            ExecutorDeadError: A rank has died.
        """

    def restart(self) -> None:
        """Reload everything that died; pools and their contents are lost."""

    def shutdown(self) -> None:
        """Stop its processes and free weights and pools; no step may be running."""

    @property
    def buffers(self) -> HostBuffers:
        """Arrays that the core fills before ``launch``; available after ``init_cache``."""

    def launch(self, step: StepInput) -> StepHandle:
        """Launch one step, whose arrays the core has written to the buffers.

        On a GPU this returns once everything is queued, on the CPU once the model has run.

        Raises:
            StepError: The numbers of rows and samples differ.
        """
