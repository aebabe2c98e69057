"""The scheduler core: every decision about sequences and KV blocks, written in Rust.

Handles (sequence groups, sequences) are opaque integers.  A handle dies with what it
names and is never given out again, so a late call raises ``StaleHandleError`` instead
of touching somebody else's blocks.
"""

from collections.abc import Sequence
from os import PathLike
from typing import Final, Literal, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BlockSpaceManager",
    "CacheConfig",
    "CachedBlockAllocator",
    "DecoderLayer",
    "GroupStats",
    "InputBuffers",
    "LRUEvictor",
    "PackedWeights",
    "Prefix",
    "ScheduledSequenceGroup",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerOutputs",
    "SequenceGroupMetadata",
    "UncachedBlockAllocator",
    "__version__",
    "advise_huge_pages",
    "copy_blocks_cpu",
    "cpu_instruction_sets",
    "cpu_instructions",
    "has_torch_threads",
    "likeliest_cpu",
    "paged_attention_cpu",
    "rms_norm_cpu",
    "use_cpu_instructions",
]

__version__: Final[str]

_PreemptionMode: TypeAlias = Literal["recompute", "swap"]
_Policy: TypeAlias = Literal["fcfs", "priority"]
_VictimPolicy: TypeAlias = Literal["last", "least_work"]
_Refusal: TypeAlias = Literal[
    "no_blocks", "no_tokens", "no_sequences", "no_adapter_slot", "delayed"
]

_AllocStatus: TypeAlias = Literal["ok", "later", "never"]

_DType: TypeAlias = Literal["float32", "bfloat16", "float16"]
_Gate: TypeAlias = Literal["silu", "gelu_tanh"]
_InstructionSet: TypeAlias = Literal["portable", "avx2", "avx512", "avx512_bf16"]

@final
class CacheConfig:
    """The KV blocks of both tiers; docs/options.md says what each option gives."""

    def __new__(
        cls,
        *,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int = 0,
        watermark: float = 0.01,
        enable_prefix_caching: bool = False,
        sliding_window: int | None = None,
        count_cached_blocks: bool = True,
        charge_cached_tokens: bool = False,
        share_partial_blocks: bool = False,
        share_generated_blocks: bool = True,
        swap_in_cached_blocks: bool = False,
        evict_blank_blocks_in_order: bool = False,
        exact_append_demand: bool = True,
    ) -> CacheConfig: ...
    @staticmethod
    def classic(
        *,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int = 0,
        watermark: float = 0.01,
        enable_prefix_caching: bool = False,
        sliding_window: int | None = None,
    ) -> CacheConfig:
        """The decisions of vLLM 0.6.2's block manager."""
    @property
    def block_size(self) -> int: ...
    @property
    def num_gpu_blocks(self) -> int: ...
    @property
    def num_cpu_blocks(self) -> int: ...
    @property
    def watermark(self) -> float: ...
    @property
    def enable_prefix_caching(self) -> bool: ...
    @property
    def sliding_window(self) -> int | None: ...
    @property
    def count_cached_blocks(self) -> bool: ...
    @property
    def charge_cached_tokens(self) -> bool: ...
    @property
    def share_partial_blocks(self) -> bool: ...
    @property
    def share_generated_blocks(self) -> bool: ...
    @property
    def swap_in_cached_blocks(self) -> bool: ...
    @property
    def evict_blank_blocks_in_order(self) -> bool: ...
    @property
    def exact_append_demand(self) -> bool: ...

@final
class SchedulerConfig:
    """The limits and choices of the scheduler; docs/options.md says what each option gives."""

    def __new__(
        cls,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        preemption_mode: _PreemptionMode | None = None,
        enable_chunked_prefill: bool = False,
        policy: _Policy = "fcfs",
        delay_factor: float = 0.0,
        num_lookahead_slots: int = 0,
        max_loras: int | None = None,
        max_num_bypasses: int | None = None,  # 64 with chunked prefill, else 0
        victim_policy: _VictimPolicy = "least_work",
        admit_after_preemption: bool = False,
        reverse_swapped_order: bool = False,
        whole_block_chunks: bool = False,
        limit_chunked_prompts: bool = True,
    ) -> SchedulerConfig: ...
    @staticmethod
    def classic(
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        preemption_mode: _PreemptionMode | None = None,
        enable_chunked_prefill: bool = False,
        policy: _Policy = "fcfs",
        delay_factor: float = 0.0,
        num_lookahead_slots: int = 0,
        max_loras: int | None = None,
    ) -> SchedulerConfig:
        """The decisions of vLLM 0.6.2's scheduler, its faults excepted."""
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_num_batched_tokens(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def preemption_mode(self) -> _PreemptionMode | None: ...
    @property
    def enable_chunked_prefill(self) -> bool: ...
    @property
    def policy(self) -> _Policy: ...
    @property
    def delay_factor(self) -> float: ...
    @property
    def num_lookahead_slots(self) -> int: ...
    @property
    def max_loras(self) -> int | None: ...
    @property
    def max_num_bypasses(self) -> int: ...
    @property
    def victim_policy(self) -> _VictimPolicy: ...
    @property
    def admit_after_preemption(self) -> bool: ...
    @property
    def reverse_swapped_order(self) -> bool: ...
    @property
    def whole_block_chunks(self) -> bool: ...
    @property
    def limit_chunked_prompts(self) -> bool: ...

@final
class InputBuffers:
    """The arrays that ``Scheduler.prepare_inputs`` fills in place.

    All one-dimensional, C-contiguous, writable; checked here once, never coerced.
    """

    def __new__(
        cls,
        *,
        token_ids: NDArray[np.int32],  # [>= T]
        positions: NDArray[np.int64],  # [>= T]
        slot_mapping: NDArray[np.int64],  # [>= T]
        query_start: NDArray[np.int32],  # [>= R + 1]
        seq_lens: NDArray[np.int32],  # [>= R]
        block_tables: NDArray[np.int32],  # [>= R * B], used as [R, B] row-major
        sample_index: NDArray[np.int32],  # [>= S]
        sample_rows: NDArray[np.int32],  # [>= S]
        row_handles: NDArray[np.int64],  # [>= R]
    ) -> InputBuffers: ...

@final
class ScheduledSequenceGroup:
    @property
    def group(self) -> int: ...
    @property
    def token_chunk_size(self) -> int: ...
    @property
    def is_prefill(self) -> bool: ...
    @property
    def is_sampled(self) -> bool: ...
    @property
    def num_rows(self) -> int: ...

@final
class SchedulerOutputs:
    """The decisions of one step, frozen."""

    @property
    def step_id(self) -> int: ...
    @property
    def num_rows(self) -> int: ...  # R
    @property
    def num_batched_tokens(self) -> int: ...  # T
    @property
    def num_samples(self) -> int: ...  # S
    @property
    def max_num_blocks(self) -> int: ...  # B, the longest block table of a row
    @property
    def num_prefill_groups(self) -> int: ...
    @property
    def num_prefill_tokens(self) -> int: ...
    @property
    def scheduled_seq_groups(self) -> list[ScheduledSequenceGroup]: ...
    @property
    def blocks_to_swap_out(self) -> NDArray[np.int64]: ...  # [n, 2] (gpu, cpu)
    @property
    def blocks_to_swap_in(self) -> NDArray[np.int64]: ...  # [n, 2] (cpu, gpu)
    @property
    def blocks_to_copy(self) -> NDArray[np.int64]: ...  # [n, 2] (source, destination)
    @property
    def has_moves(self) -> bool: ...
    @property
    def ignored_seq_groups(
        self,
    ) -> list[tuple[int, str, GroupStats]]: ...  # handle (now dead), reason
    @property
    def preempted(self) -> list[tuple[int, _PreemptionMode]]: ...
    @property
    def refused(self) -> list[tuple[int, _Refusal]]: ...  # looked at, and did not run
    @property
    def swapped_in(self) -> list[int]: ...
    @property
    def num_prefill_rows(self) -> int: ...
    @property
    def num_lookahead_slots(self) -> int: ...
    @property
    def running_queue_size(self) -> int: ...
    @property
    def is_empty(self) -> bool: ...  # nothing to execute, and no update is awaited

@final
class GroupStats:
    """What a sequence group has been through."""

    @property
    def num_preemptions(self) -> int: ...  # by recompute or by swap
    @property
    def num_recomputed_tokens(self) -> int: ...  # computed and given up
    @property
    def num_cached_tokens(
        self,
    ) -> int: ...  # of the prompt, when first admitted

@final
class Scheduler:
    def __new__(
        cls,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        *,
        log: PathLike[str] | str | None = None,
    ) -> Scheduler: ...
    def flush_log(self) -> None: ...
    @property
    def log_error(self) -> str | None: ...
    def add_seq_group(
        self,
        token_ids: NDArray[np.int32],
        *,
        arrival_time: float,
        max_num_running_seqs: int = 1,
        priority: int = 0,
        adapter: int = 0,
        salt: int = 0,
        num_encoder_tokens: int = 0,
    ) -> tuple[int, int]: ...
    def abort(self, group: int) -> GroupStats | None: ...  # None: it has ended already
    def schedule(self, now: float) -> SchedulerOutputs: ...
    def prepare_inputs(self, buffers: InputBuffers) -> None: ...
    def update(
        self,
        step_id: int,
        parent_rows: NDArray[np.int32],  # [K], not decreasing
        token_start: NDArray[np.int32],  # [K + 1]
        tokens: NDArray[np.int32],  # [token_start[K]]
        finish: NDArray[np.uint8],  # [K], 0 = lives on
    ) -> tuple[NDArray[np.int64], list[tuple[int, GroupStats]]]:
        """Apply the results of the open step.

        Returns:
            The handle of each output's sequence, ``[K]`` (that of a finished one is dead), and the
            groups that ended with what they had been through.
        """
    def update_async(self, step_id: int) -> bool:
        """End the open step before its tokens are known.

        Every sampled row goes on with one token.  Until ``resolve_tokens`` names it, the next
        step's ``token_ids`` have ``-1 - i`` in its place, ``i`` the number of the sample.  What
        ends with its token is aborted once that is known.

        Returns:
            False, and the step stays open, where a sampled group may have several sequences or a
            sequence is at the model's length.

        Raises:
            StepError: Not the open step, or the tokens of the step before are missing.
        """
    def resolve_tokens(self, step_id: int, tokens: NDArray[np.int32]) -> None:
        """Name the tokens of the step that ``update_async`` ended, one a sample, ``[S]``."""
    def abandon(self, step_id: int) -> None: ...  # the open step, and an unresolved one
    def token_ids(self, seq: int) -> NDArray[np.int32]: ...
    def block_table(self, seq: int) -> NDArray[np.int32]: ...
    def cross_block_table(self, group: int) -> NDArray[np.int32]: ...
    def common_computed_blocks(self, group: int) -> NDArray[np.int32]: ...
    def seq_group_metadata(self, *, delta: bool = False) -> list[SequenceGroupMetadata]:
        """The scheduled groups of the last step, in order.

        Args:
            delta: Only the token ids of the step, and of groups that decode only the blocks
                that the step writes, for a runner that keeps the rest.
        """
    def seqs_of(self, group: int) -> NDArray[np.int64]: ...
    def group_stats(self, group: int) -> GroupStats: ...
    def prompt_refusal(self, num_tokens: int) -> str | None:
        """Why no prompt of that many tokens can ever run here to a new token, if so.

        Returns:
            A sentence without its subject, such as "has 40 tokens; max_model_len is 32, so at most
            31 leave room for a new one"; None if it can.
        """
    def reset_prefix_cache(self) -> bool: ...
    def check(self) -> None: ...
    @property
    def waiting(self) -> list[int]: ...
    @property
    def running(self) -> list[int]: ...
    @property
    def swapped(self) -> list[int]: ...
    @property
    def has_unfinished(self) -> bool: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_swapped(self) -> int: ...
    @property
    def num_free_gpu_blocks(self) -> int: ...
    @property
    def num_free_cpu_blocks(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def num_recomputed_tokens(self) -> int: ...
    @property
    def num_looked_up_tokens(self) -> int: ...  # of sequences admitted with prefix caching on
    @property
    def num_cached_tokens(self) -> int: ...  # those of them that the cache had
    @property
    def queue_seconds(self) -> float: ...

@final
class SequenceGroupMetadata:
    """One scheduled group, as a model runner of the classic kind wants it; keys are handles."""

    @property
    def group(self) -> int: ...
    @property
    def is_prompt(self) -> bool: ...
    @property
    def do_sample(self) -> bool: ...
    @property
    def token_chunk_size(self) -> int: ...
    @property
    def is_delta(self) -> bool: ...
    @property
    def adapter(self) -> int: ...
    @property
    def token_ids(self) -> dict[int, NDArray[np.int32]]: ...
    @property
    def num_computed_tokens(self) -> dict[int, int]: ...
    @property
    def block_tables(self) -> dict[int, NDArray[np.int32]]: ...
    @property
    def cross_block_table(self) -> NDArray[np.int32]: ...
    @property
    def computed_block_nums(self) -> NDArray[np.int32]: ...

@final
class UncachedBlockAllocator:
    """Blocks without memory of their contents; numbers that are not used are refused."""

    def __new__(cls, num_blocks: int) -> UncachedBlockAllocator: ...
    def allocate(self) -> int | None: ...
    def fork(self, block: int) -> None: ...
    def free(self, block: int) -> None: ...
    def ref_count(self, block: int) -> int: ...
    @property
    def num_free(self) -> int: ...
    @property
    def num_total(self) -> int: ...

@final
class Prefix:
    """A prefix of whole blocks; made by ``root``, ``register`` and ``prefix_of``."""

    @staticmethod
    def root(*, adapter: int = 0, salt: int = 0) -> Prefix: ...

@final
class CachedBlockAllocator:
    """Blocks that keep their contents until the room is needed.

    ``find`` compares every token and the identity of what comes before, so a hit is never
    another prefix's block.  Found blocks are taken with ``acquire``, new ones with ``allocate``.
    """

    def __new__(cls, num_blocks: int, block_size: int) -> CachedBlockAllocator: ...
    def allocate(self, num_prefix_tokens: int = 0) -> int | None: ...
    def find(self, before: Prefix, token_ids: NDArray[np.int32]) -> int | None: ...
    def acquire(self, block: int) -> None: ...
    def register(self, block: int, before: Prefix, token_ids: NDArray[np.int32]) -> Prefix: ...
    def prefix_of(self, block: int) -> Prefix | None: ...
    def fork(self, block: int) -> None: ...
    def free(self, block: int, *, last_access: int = 0) -> None: ...
    def mark_computed(self, block: int) -> None: ...
    def is_computed(self, block: int) -> bool: ...
    def ref_count(self, block: int) -> int: ...
    def reset(self) -> bool: ...
    @property
    def num_free(self) -> int: ...
    @property
    def num_cached(self) -> int: ...
    @property
    def num_total(self) -> int: ...

@final
class LRUEvictor:
    """Oldest access first, among equals the longest prefix, then the first added."""

    def __new__(cls) -> LRUEvictor: ...
    def add(self, block: int, last_access: int, num_hashed_tokens: int) -> None: ...
    def remove(self, block: int) -> None: ...
    def evict(self) -> int | None: ...
    def __contains__(self, block: int, /) -> bool: ...
    def __len__(self, /) -> int: ...

@final
class BlockSpaceManager:
    """Block tables of groups that another scheduler schedules; acts out of turn are refused."""

    def __new__(
        cls, cache_config: CacheConfig, *, num_lookahead_slots: int = 0
    ) -> BlockSpaceManager: ...
    def add_seq_group(
        self,
        token_ids: NDArray[np.int32],
        *,
        max_num_running_seqs: int = 1,
        adapter: int = 0,
        salt: int = 0,
        num_encoder_tokens: int = 0,
    ) -> tuple[int, int]: ...
    def begin_step(self) -> None: ...
    def can_allocate(self, group: int) -> _AllocStatus: ...
    def allocate(self, group: int) -> None: ...
    def append_token(self, seq: int, token_id: int) -> None: ...
    def mark_computed(self, seq: int, num_tokens: int) -> None: ...
    def can_append_slots(self, group: int) -> bool: ...
    def append_slots(self, group: int) -> NDArray[np.int64]: ...
    def fork(self, seq: int) -> int: ...
    def can_swap_out(self, group: int) -> bool: ...
    def swap_out(self, group: int) -> NDArray[np.int64]: ...
    def can_swap_in(self, group: int) -> _AllocStatus: ...
    def swap_in(self, group: int) -> NDArray[np.int64]: ...
    def free(self, seq: int) -> None: ...
    def reset_prefix_cache(self) -> bool: ...
    def num_computed_tokens(self, seq: int) -> int: ...
    def last_access(self, seq: int) -> int: ...
    def block_table(self, seq: int) -> NDArray[np.int32]: ...
    def cross_block_table(self, group: int) -> NDArray[np.int32]: ...
    def common_computed_blocks(self, group: int) -> NDArray[np.int32]: ...
    @property
    def num_free_gpu_blocks(self) -> int: ...
    @property
    def num_free_cpu_blocks(self) -> int: ...
    @property
    def watermark_blocks(self) -> int: ...

@final
class PackedWeights:
    """The weights of a linear layer in the layout of `rust/cpu/src/linear.rs`.

    The array must not be written any more.
    """

    def __new__(
        cls,
        panels: NDArray[np.uint32 | np.int8],  # [ceil(N / 64) * units of K * 64]; int8: K of them
        *,
        dtype: _DType,  # of rows, and of weights that are not int8
        in_features: int,  # K
        out_features: int,  # N
        scales: NDArray[np.float32] | None = None,  # [N]: the panels are int8, multiples of these
        bias: NDArray[np.float32] | None = None,  # [N]
        gate: _Gate | None = None,
    ) -> PackedWeights: ...
    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...
    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights, scales among them."""
    def multiply(
        self,
        *,
        num_rows: int,
        x: int,  # address of [rows, K]
        x_stride: int,  # elements from a row to the next
        output: int,  # address of [rows, N], or [rows, N / 2] of a gated layer
        output_stride: int,
        output_dtype: _DType,
        adds: bool = False,  # adds to the output instead of writing it
        num_threads: int = 1,
        instructions: _InstructionSet | None = None,
    ) -> None:
        """Multiply rows with the weights; addresses and strides must be those of live memory.

        Raises:
            StepError: for arguments that do not fit each other.
        """

    def gather(
        self,
        features: NDArray[np.int32],  # [T], each below N
        output: int,  # address of [T, K]
        num_threads: int = 1,
    ) -> None:
        """Copy the weights of some features, as numbers of the dtype.

        Raises:
            StepError: for a feature that does not exist.
        """

@final
class DecoderLayer:
    """A decoder layer of Llama's kind; `rust/cpu/src/layer.rs` says what it computes."""

    def __new__(
        cls,
        *,
        dtype: _DType,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        epsilon: float,  # of all norms
        scale: float,  # of the scores
        attention_norm: NDArray[np.float32],
        mlp_norm: NDArray[np.float32],
        qkv: PackedWeights,
        output: PackedWeights,
        gate_up: PackedWeights,
        down: PackedWeights,
        softcap: float | None = None,
        attention_output_norm: NDArray[np.float32] | None = None,
        mlp_output_norm: NDArray[np.float32] | None = None,
        query_norm: NDArray[np.float32] | None = None,  # [head_size]
        key_norm: NDArray[np.float32] | None = None,  # [head_size]
    ) -> DecoderLayer: ...
    def forward(
        self,
        hidden: int,  # address of [T, F], changed in place
        cosines: int,  # address of [T, rotary_size]
        sines: int,
        rotary_size: int,
        pool: int,
        num_blocks: int,
        block_size: int,
        block_tables: NDArray[np.int32],  # [R * B]
        query_start: NDArray[np.int32],  # [R + 1]
        seq_lens: NDArray[np.int32],  # [R]
        slot_mapping: NDArray[np.int64],  # [T]
        window: int | None = None,
        num_threads: int = 1,
        instructions: _InstructionSet | None = None,
    ) -> None:
        """Compute the layer for a step; addresses must be those of live, contiguous tensors.

        Raises:
            StepError: for arguments that do not fit each other.
        """

def copy_blocks_cpu(
    *,
    # Of each layer: address and blocks of the sources, of the destinations, bytes of a block.
    layers: Sequence[tuple[int, int, int, int, int]],
    pairs: NDArray[np.int64],  # [n, 2], source and destination
    num_threads: int = 1,
) -> None:
    """Copy blocks in every layer; all sources are read before a destination is written.

    Raises:
        StepError: for a block that a pool does not have, or pairs that are not contiguous.
    """

def likeliest_cpu(
    *,
    logits: int,  # address of float32 [rows, vocab_size]
    vocab_size: int,
    num: int,
    ids: NDArray[np.int64],  # [rows * num], written
    values: NDArray[np.float32],  # [rows * num], written
    num_threads: int = 1,
    instructions: _InstructionSet | None = None,
) -> None:
    """Find the largest logits of each row, largest first, of equals the smaller id first.

    The first value of a row that holds NaN is NaN, and what else is found in it means nothing.

    Raises:
        StepError: for arguments that do not fit each other.
    """

def rms_norm_cpu(
    *,
    dtype: _DType,
    num_rows: int,
    x: int,  # address of [rows, features]
    output: int,
    weight: NDArray[np.float32],  # [features]
    epsilon: float,
    num_threads: int = 1,
    instructions: _InstructionSet | None = None,
) -> None:
    """Divide rows by the root of their mean square and multiply them with a weight.

    Raises:
        StepError: for arguments that do not fit each other.
    """

def advise_huge_pages(address: int, num_bytes: int) -> None:
    """Ask for huge pages behind a range of memory; a system without them goes on as before."""

def cpu_instruction_sets() -> list[_InstructionSet]:
    """The vector instructions that this CPU has and `paged_attention_cpu` uses, the best last."""

def cpu_instructions() -> _InstructionSet:
    """The vector instructions that this process uses."""

def use_cpu_instructions(name: str | None) -> None:
    """Use these vector instructions in this process; None is the best of this CPU.

    Raises:
        ConfigError: if this CPU does not have them.
    """

def has_torch_threads() -> bool:
    """Whether torch is loaded and `paged_attention_cpu` can use its OpenMP threads."""

def paged_attention_cpu(
    *,
    dtype: _DType,  # of queries, keys, values, pool and output
    query: int,
    query_strides: tuple[int, int],
    key: int,
    key_strides: tuple[int, int],
    value: int,
    value_strides: tuple[int, int],
    pool: int,
    output: int,
    num_heads: int,
    num_kv_heads: int,
    key_size: int,
    value_size: int,
    num_blocks: int,
    block_size: int,
    block_tables: NDArray[np.int32],  # [R * B], of shape [R, B] flattened
    query_start: NDArray[np.int32],  # [R + 1]
    seq_lens: NDArray[np.int32],  # [R]
    slot_mapping: NDArray[np.int64],  # [T]
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: NDArray[np.float32] | None = None,  # [H]
    alibi: NDArray[np.float32] | None = None,  # [H]
    num_threads: int = 1,
    instructions: _InstructionSet | None = None,
) -> None:
    """Write one step's keys and values into a pool, then attend: one layer, a whole flat batch.

    What is computed is ``write_cache`` and ``paged_attention`` of pagedserve.kernels.reference,
    but the pool has a layout of its own: a contiguous tensor of ``num_blocks`` blocks, each of
    ``block_size * num_kv_heads * (key_size + value_size)`` elements, that only this function
    reads and writes.  Whole blocks may be copied between pools.

    The tensors come as addresses (``Tensor.data_ptr()``), which nothing can check: a wrong one
    ends the process.  The lock of the interpreter is held.

    Args:
        dtype: how numbers are stored; they are computed in float32.
        query: ``[T, H, D]``; the last dimension is contiguous here and below.
        query_strides: elements from a token to the next, and from a head to the next.
        key: ``[T, Hkv, D]``.
        key_strides: as those of the query.
        value: ``[T, Hkv, Dv]``.
        value_strides: as those of the query.
        pool: written in place.
        output: ``[T, H, Dv]``, contiguous; every element is written.
        num_heads: H.
        num_kv_heads: Hkv.
        key_size: D.
        value_size: Dv.
        num_blocks: blocks of the pool.
        block_size: tokens of a block; multiples of 16 are fast.
        block_tables: block ids; entries past a row's last block, or before its window, mean
            nothing.
        query_start: row boundaries in T.
        seq_lens: keys of each row, its queries' own included.
        slot_mapping: where each token's key and value go; -1 means that they are not written.
        scale: factor of the scores.
        window: a query sees only keys with position > its own - window.
        softcap: scores become ``softcap * tanh(scores / softcap)``, before the mask.
        sinks: one more score a head, which takes weight and has no value.
        alibi: slopes; a score gets its head's slope times (the key's position minus the query's),
            after the cap.
        num_threads: of torch's threads, where `has_torch_threads`; else one is used.
        instructions: None for the best that the CPU has.

    Raises:
        StepError: for arguments that do not fit each other or an id outside of the pool;
            nothing was read or written.
    """
