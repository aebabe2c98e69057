# The scheduler core.  Docstrings are written in rust/py, and `make stubs` copies them here.

from collections.abc import Sequence
from os import PathLike
from typing import Final, Literal, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from pagedserve._core import cpu

__all__ = [
    "BlockMoves",
    "BlockSpaceManager",
    "CacheChoices",
    "CacheConfig",
    "CachedBlockAllocator",
    "GroupStats",
    "InputBuffers",
    "KVGroup",
    "LRUEvictor",
    "Prefix",
    "ScheduledSequenceGroup",
    "Scheduler",
    "SchedulerChoices",
    "SchedulerConfig",
    "SchedulerOutputs",
    "SequenceGroupMetadata",
    "TokenLookup",
    "UncachedBlockAllocator",
    "__version__",
    "cpu",
]

__version__: Final[str]

_PreemptionMode: TypeAlias = Literal["recompute", "swap"]
_KVKind: TypeAlias = Literal["window", "chunked", "state", "cross"]
_Policy: TypeAlias = Literal["fcfs", "priority"]
_VictimPolicy: TypeAlias = Literal["last", "least_work"]
_Refusal: TypeAlias = Literal[
    "no_blocks", "no_tokens", "no_sequences", "no_adapter_slot", "delayed"
]

_AllocStatus: TypeAlias = Literal["ok", "later", "never"]

@final
class CacheChoices:
    """Block decisions whose default differs from vLLM 0.6.2.

    docs/options.md gives the effect of each. An argument that is missing or None takes the default
    named here.

    Args:
        count_cached_blocks: Subtract blocks shared with running requests from the
            demand of an admission; True.
        charge_cached_tokens: Charge cached tokens to the token budget and compute them again;
            False.
        share_partial_blocks: Share the last, partly filled block of identical prompts; False.
        share_generated_blocks: Share blocks of generated tokens with later prompts; True.
        swap_in_cached_blocks: Also move blocks that the other tier still holds; False.
        evict_blank_blocks_in_order: Evict free blocks without contents in turn with the cached
            ones, instead of first; False.
        exact_append_demand: Ask the pool for the blocks that a step takes, instead of one for each
            sequence; True.
    """

    def __new__(
        cls,
        *,
        count_cached_blocks: bool | None = None,
        charge_cached_tokens: bool | None = None,
        share_partial_blocks: bool | None = None,
        share_generated_blocks: bool | None = None,
        swap_in_cached_blocks: bool | None = None,
        evict_blank_blocks_in_order: bool | None = None,
        exact_append_demand: bool | None = None,
    ) -> CacheChoices: ...
    @staticmethod
    def classic() -> CacheChoices:
        """Return the choices of vLLM 0.6.2."""
    @property
    def count_cached_blocks(self) -> bool:
        """Value of the argument, or its default; see the class."""
    @property
    def charge_cached_tokens(self) -> bool:
        """Value of the argument, or its default; see the class."""
    @property
    def share_partial_blocks(self) -> bool:
        """Value of the argument, or its default; see the class."""
    @property
    def share_generated_blocks(self) -> bool:
        """Value of the argument, or its default; see the class."""
    @property
    def swap_in_cached_blocks(self) -> bool:
        """Value of the argument, or its default; see the class."""
    @property
    def evict_blank_blocks_in_order(self) -> bool:
        """Value of the argument, or its default; see the class."""
    @property
    def exact_append_demand(self) -> bool:
        """Value of the argument, or its default; see the class."""

@final
class KVGroup:
    """Layers that keep something else of a sequence than all its keys and values.

    With "window" they keep those of the newest tokens, and of sink tokens at the start: a sequence
    has at most the blocks that its window and its sink tokens span, and those that a step adds.
    With "chunked" they keep those of the current chunk of positions, as in Llama 4.  With "state" a
    block is the state of one sequence, as recurrences have.  With "cross" they keep those of an
    encoder's output, in blocks of the first group's pool.

    Args:
        kind: "window", "chunked", "state" or "cross".
        window: Largest number of tokens that a query attends to, itself included, at least 1: for
            "window" in the layer with the largest window, for "chunked" the size of a chunk.
        num_sink_tokens: First tokens of a sequence, which every query attends to beside its window;
            0, the default, keeps none; for "window" alone.
        num_gpu_blocks: Blocks of the group's pool on the device: for "window" and "chunked" at
            least ``num_gpu_blocks_for`` one sequence, for "state" at least ``max_num_seqs``, for
            "cross" none.
        num_cpu_blocks: Blocks of the pool in host memory for swapped groups; 0, the default, turns
            swapping off.

    Raises:
        ``ConfigError``: An unknown kind, a window that does not belong to it, or numbers out of
            range.
    """

    def __new__(
        cls,
        kind: _KVKind,
        *,
        window: int | None = None,
        num_sink_tokens: int | None = None,
        num_gpu_blocks: int | None = None,
        num_cpu_blocks: int | None = None,
    ) -> KVGroup: ...
    @staticmethod
    def num_gpu_blocks_for(
        scheduler_config: SchedulerConfig,
        *,
        window: int,
        block_size: int,
        num_seqs: int = 1,
        num_sink_tokens: int = 0,
    ) -> int:
        """Return the largest number of device blocks that ``num_seqs`` sequences use.

        It counts the blocks of a window, or of chunks of as many tokens, that each keeps between
        steps, and those that the tokens of a step add.

        Args:
            scheduler_config: Limits of the scheduler.
            window: See the class.
            block_size: Tokens a block holds, at least 1.
            num_seqs: Number of sequences; the result for 1 is the least that a scheduler accepts.
            num_sink_tokens: See the class.
        """
    def __getnewargs_ex__(self) -> tuple[tuple[str], dict[str, int | None]]: ...
    @property
    def kind(self) -> _KVKind:
        """Kind of the group: "window", "chunked", "state" or "cross"."""
    @property
    def window(self) -> int | None:
        """Tokens that a query attends to at most, itself included; None for "state" and "cross"."""
    @property
    def num_sink_tokens(self) -> int:
        """First tokens of a sequence that are kept beside a window; 0 for another kind."""
    @property
    def num_gpu_blocks(self) -> int:
        """Value of the argument, or its default; see the class."""
    @property
    def num_cpu_blocks(self) -> int:
        """Value of the argument, or its default; see the class."""

@final
class CacheConfig:
    """KV blocks of both tiers: device and host.

    An argument that is missing or None takes the default named here.

    Args:
        block_size: Tokens a block holds, at least 1.
        num_gpu_blocks: Blocks on the device, at least 1.
        num_cpu_blocks: Blocks in host memory for swapped groups; 0, the default, turns swapping
            off.
        watermark: Fraction of the device blocks kept free when a new group is admitted, from 0
            to below 1; 0.01.
        enable_prefix_caching: Keep the contents of blocks for later prompts that begin with the
            same tokens; False.
        sliding_window: Tokens that the layers of the first group keep, if not all; None.  A
            sequence then overwrites its oldest blocks, as with vLLM 0.6.2, which excludes prefix
            caching; a group with a window does not.
        groups: A ``KVGroup`` for each group of layers beside those that keep all keys and values,
            which are the first group; none.
        choices: A ``CacheChoices``; all defaults.

    Raises:
        ``ConfigError``: Numbers out of range, or groups that exclude each other.
    """

    def __new__(
        cls,
        *,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int | None = None,
        watermark: float | None = None,
        enable_prefix_caching: bool | None = None,
        sliding_window: int | None = None,
        groups: Sequence[KVGroup] | None = None,
        choices: CacheChoices | None = None,
    ) -> CacheConfig: ...
    @staticmethod
    def classic(
        *,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int | None = None,
        watermark: float | None = None,
        enable_prefix_caching: bool | None = None,
        sliding_window: int | None = None,
    ) -> CacheConfig:
        """Return the configuration of vLLM 0.6.2's block manager, without its faults.

        Args:
            block_size: See the class.
            num_gpu_blocks: See the class.
            num_cpu_blocks: See the class.
            watermark: See the class.
            enable_prefix_caching: See the class.
            sliding_window: See the class.
        """
    @property
    def block_size(self) -> int:
        """Value of the argument, or its default; see the class."""
    @property
    def num_gpu_blocks(self) -> int:
        """Value of the argument, or its default; see the class."""
    @property
    def num_cpu_blocks(self) -> int:
        """Value of the argument, or its default; see the class."""
    @property
    def watermark(self) -> float:
        """Value of the argument, or its default; see the class."""
    @property
    def enable_prefix_caching(self) -> bool:
        """Value of the argument, or its default; see the class."""
    @property
    def sliding_window(self) -> int | None:
        """Value of the argument, or its default; see the class."""
    @property
    def groups(self) -> list[KVGroup]:
        """Groups beside the first, in order; see the class."""
    @property
    def choices(self) -> CacheChoices:
        """Value of the argument, or its default; see the class."""

@final
class SchedulerChoices:
    """Order and admission decisions whose default differs from vLLM 0.6.2.

    docs/options.md gives the effect of each. An argument that is missing or None takes the default
    named here.

    Args:
        admit_after_preemption: Admit prompts in a step that preempts a group; False.
        reverse_swapped_order: Swap in groups that were swapped out in one step in reverse
            order; False.
        whole_block_chunks: Cut a chunk at a block boundary where prefix caching is on; False.
        limit_chunked_prompts: Also refuse a prompt longer than max_model_len with chunked
            prefill; True.
        drain_adapters: Once max_num_seqs requests were admitted before one that waits for its
            adapter's slot, admit none for the adapter that has had its slot longest; True.
    """

    def __new__(
        cls,
        *,
        admit_after_preemption: bool | None = None,
        reverse_swapped_order: bool | None = None,
        whole_block_chunks: bool | None = None,
        limit_chunked_prompts: bool | None = None,
        drain_adapters: bool | None = None,
    ) -> SchedulerChoices: ...
    @staticmethod
    def classic() -> SchedulerChoices:
        """Return the choices of vLLM 0.6.2."""
    @property
    def admit_after_preemption(self) -> bool:
        """Value of the argument, or its default; see the class."""
    @property
    def reverse_swapped_order(self) -> bool:
        """Value of the argument, or its default; see the class."""
    @property
    def whole_block_chunks(self) -> bool:
        """Value of the argument, or its default; see the class."""
    @property
    def limit_chunked_prompts(self) -> bool:
        """Value of the argument, or its default; see the class."""
    @property
    def drain_adapters(self) -> bool:
        """Value of the argument, or its default; see the class."""

@final
class SchedulerConfig:
    """Limits and options of the scheduler.

    docs/options.md gives the effect of each. An argument that is missing or None takes the default
    named here.

    Args:
        max_model_len: Maximum number of tokens of a sequence, prompt and output together.
        max_num_seqs: Maximum number of running sequences; 256.
        max_num_batched_tokens: Maximum number of tokens of one step; 512 with chunked prefill, else
            2048 or max_model_len, whichever is larger; at least max_num_seqs.
        preemption_mode: "recompute" or "swap"; None recomputes groups of one sequence and
            swaps groups of several.
        enable_chunked_prefill: Cut prompts into chunks that share steps with decodes; False.
        policy: Order of service: "fcfs", the default, or "priority".
        delay_factor: Delay prompts until the oldest has waited this many times the duration of the
            last prompt step; 0 does not delay.
        num_lookahead_slots: Slots of a decoding sequence after its next token; 0.
        max_loras: Number of adapter slots on the device, and so of adapters in one step; None
            without adapters.
        max_num_bypasses: Maximum number of groups admitted ahead of the head of a queue while it
            does not fit in memory; 64 with chunked prefill, else 0.
        victim_policy: Which group is preempted: "least_work", the default, or "last".
        choices: A ``SchedulerChoices``; all defaults.

    Raises:
        ``ConfigError``: Numbers out of range, or limits that contradict each other.
    """

    def __new__(
        cls,
        *,
        max_model_len: int,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        preemption_mode: _PreemptionMode | None = None,
        enable_chunked_prefill: bool | None = None,
        policy: _Policy | None = None,
        delay_factor: float | None = None,
        num_lookahead_slots: int | None = None,
        max_loras: int | None = None,
        max_num_bypasses: int | None = None,
        victim_policy: _VictimPolicy | None = None,
        choices: SchedulerChoices | None = None,
    ) -> SchedulerConfig: ...
    @staticmethod
    def classic(
        *,
        max_model_len: int,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        preemption_mode: _PreemptionMode | None = None,
        enable_chunked_prefill: bool | None = None,
        policy: _Policy | None = None,
        delay_factor: float | None = None,
        num_lookahead_slots: int | None = None,
        max_loras: int | None = None,
    ) -> SchedulerConfig:
        """Return the configuration of vLLM 0.6.2's scheduler, without its faults.

        Args:
            max_model_len: See the class.
            max_num_seqs: See the class.
            max_num_batched_tokens: See the class.
            preemption_mode: See the class.
            enable_chunked_prefill: See the class.
            policy: See the class.
            delay_factor: See the class.
            num_lookahead_slots: See the class.
            max_loras: See the class.
        """
    @property
    def max_num_seqs(self) -> int:
        """Value of the argument, or its default; see the class."""
    @property
    def max_num_batched_tokens(self) -> int:
        """Value of the argument, or its default; see the class."""
    @property
    def max_model_len(self) -> int:
        """Value of the argument, or its default; see the class."""
    @property
    def preemption_mode(self) -> _PreemptionMode | None:
        """Preemption mode: "recompute", "swap" or None; see the class."""
    @property
    def enable_chunked_prefill(self) -> bool:
        """Value of the argument, or its default; see the class."""
    @property
    def policy(self) -> _Policy:
        """Scheduling policy: "fcfs" or "priority"; see the class."""
    @property
    def delay_factor(self) -> float:
        """Value of the argument, or its default; see the class."""
    @property
    def num_lookahead_slots(self) -> int:
        """Value of the argument, or its default; see the class."""
    @property
    def max_loras(self) -> int | None:
        """Value of the argument, or its default; see the class."""
    @property
    def max_num_bypasses(self) -> int:
        """Value of the argument, or its default; see the class."""
    @property
    def victim_policy(self) -> _VictimPolicy:
        """Victim policy: "last" or "least_work"; see the class."""
    @property
    def choices(self) -> SchedulerChoices:
        """Value of the argument, or its default; see the class."""

@final
class InputBuffers:
    """Arrays that `Scheduler.prepare_inputs` fills in place.

    All are one-dimensional, C-contiguous, writable and of exactly these types; checked here
    once, never coerced.  Each may be longer than a step needs: R rows, T tokens, S samples,
    B blocks in the longest table, C in the longest of an encoder.

    Args:
        token_ids: Input tokens, int32 ``[T]``, rows packed one after another.
        positions: Position of each token in its sequence, int64 ``[T]``.
        slot_mapping: Slot of each token's keys and values, int64 ``[T]``: block * block
            size + offset, or -1 if they are already in the cache.
        query_start: Row boundaries in T, int32 ``[R + 1]``.
        seq_lens: Number of keys visible to the last token of each row, int32 ``[R]``.
        block_tables: Physical blocks, int32 ``[R * B]``, row-major, padded with 0.
        sample_index: Positions in T whose logits are sampled from, int32 ``[S]``,
            ascending.
        sample_rows: Row of each sample, int32 ``[S]``.
        row_handles: Handle of each row's sequence, int64 ``[R]``.
        adapter_slots: Adapter slot of each row, int32 ``[R]``, -1 for the base model; None,
            the default, for a scheduler without ``max_loras``.
        cross_lens: Tokens of the output of each row's encoder, int32 ``[R]``; None, the
            default, for decoder-only models.
        group_tables: Blocks of each KV group beside the first, int32 ``[R * W]`` with W
            from ``SchedulerOutputs.table_widths``, laid out as ``block_tables``, 0 for
            blocks that no query sees.  A row of a group of states has one entry; where its
            first position is 0 it begins with a fresh state.
        group_slots: Slots of keys and values in each of these groups, int64 ``[T]``; empty
            for a kind other than "window".

    Raises:
        ``StepError``: An array of another dtype or shape, by name.
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
        adapter_slots: NDArray[np.int32] | None = None,  # [>= R]
        cross_lens: NDArray[np.int32] | None = None,  # [>= R]
        group_tables: Sequence[NDArray[np.int32]] | NDArray[np.int32] = ...,  # [>= R * W] each
        group_slots: Sequence[NDArray[np.int64]] | NDArray[np.int64] = ...,  # [>= T] each, or empty
    ) -> InputBuffers: ...

@final
class ScheduledSequenceGroup:
    """Scheduled group of one step."""

    @property
    def group(self) -> int:
        """Handle of the group."""
    @property
    def token_chunk_size(self) -> int:
        """Number of tokens computed: for a prefill in all its rows, for a decode in each."""
    @property
    def is_prefill(self) -> bool:
        """Whether the group computed or recomputed its prompt before this step."""
    @property
    def is_sampled(self) -> bool:
        """Whether its next tokens are sampled: False for a chunk that stops before the end."""
    @property
    def num_rows(self) -> int:
        """Number of rows of the group."""

@final
class BlockMoves:
    """Moves of the blocks of one pool, to be made in this order before the rows run."""

    @property
    def swap_out(self) -> NDArray[np.int64]:
        """Moves to the host, int64 ``[n, 2]`` (device, host)."""
    @property
    def swap_in(self) -> NDArray[np.int64]:
        """Moves from the host, int64 ``[n, 2]`` (host, device)."""
    @property
    def copy(self) -> NDArray[np.int64]:
        """Copies on the device, int64 ``[n, 2]`` (source, destination)."""

@final
class SchedulerOutputs:
    """Decisions of one step."""

    @property
    def step_id(self) -> int:
        """Id of the step for `update` and `abandon`; counts up from 0."""
    @property
    def num_rows(self) -> int:
        """Number of rows R: sequences that run."""
    @property
    def num_batched_tokens(self) -> int:
        """Number of tokens T computed in all rows."""
    @property
    def num_samples(self) -> int:
        """Number of samples S: rows whose next token is sampled."""
    @property
    def max_num_blocks(self) -> int:
        """Width B: blocks of the longest block table of a row in the first KV group."""
    @property
    def table_widths(self) -> list[int]:
        """Entries of the longest table of a row in each KV group beside the first."""
    @property
    def num_prefill_groups(self) -> int:
        """Number of leading groups that compute or recompute their prompt."""
    @property
    def num_prefill_tokens(self) -> int:
        """Number of tokens of the prefill groups."""
    @property
    def scheduled_seq_groups(self) -> list[ScheduledSequenceGroup]:
        """Groups that run, prefills first; the rows of a group are adjacent, in this order."""
    @property
    def moves(self) -> list[BlockMoves]:
        """Moves in the pool of each KV group, the first group's first.

        A group without a separate pool moves in the first, and its entry is empty.
        """
    @property
    def blocks_to_swap_out(self) -> NDArray[np.int64]:
        """Moves to the host in the first KV group, int64 ``[n, 2]`` (device, host)."""
    @property
    def blocks_to_swap_in(self) -> NDArray[np.int64]:
        """Moves from the host in the first KV group, int64 ``[n, 2]`` (host, device)."""
    @property
    def blocks_to_copy(self) -> NDArray[np.int64]:
        """Copies on the device in the first KV group, int64 ``[n, 2]`` (source, destination)."""
    @property
    def adapters_to_load(self) -> list[tuple[int, int]]:
        """Adapters to load before the rows run, as ``(adapter, slot)``.

        The previous content of a slot is no longer needed once the earlier steps have run.
        """
    @property
    def has_moves(self) -> bool:
        """Whether blocks must be moved before the rows run."""
    @property
    def ignored_seq_groups(self) -> list[tuple[int, str, GroupStats]]:
        """Groups that the scheduler ended: handle (now dead), reason, statistics."""
    @property
    def preempted(self) -> list[tuple[int, _PreemptionMode]]:
        """Groups preempted in this step, each with "recompute" or "swap"."""
    @property
    def refused(self) -> list[tuple[int, _Refusal]]:
        """Groups that were considered and did not run, each with the reason."""
    @property
    def num_drafts(self) -> int:
        """Number of draft tokens added by `Scheduler.propose`, included in T and S."""
    @property
    def swapped_in(self) -> list[int]:
        """Groups swapped in from the host."""
    @property
    def num_prefill_rows(self) -> int:
        """Number of leading rows that belong to prefill groups."""
    @property
    def num_lookahead_slots(self) -> int:
        """Number of slots of every decoding sequence after its next token."""
    @property
    def running_queue_size(self) -> int:
        """Number of groups in the running queue after the decisions."""
    @property
    def is_empty(self) -> bool:
        """Whether the step has nothing to execute; then no step is open."""

@final
class GroupStats:
    """Statistics of a group."""

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions, by recompute or by swap."""
    @property
    def num_recomputed_tokens(self) -> int:
        """Number of tokens computed and discarded, by recompute or by an abandoned step."""
    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens found in the prefix cache at the first admission."""

@final
class Scheduler:
    """Scheduler of sequences and their KV blocks, step by step.

    Requests come in with `add_seq_group`.  A step is `schedule`, `prepare_inputs`, the model, and
    `update` with the sampled tokens; `abandon` replaces `update` if the model failed.
    Between `schedule` and the end of its step the step is *open*, unless it was empty.

    Groups (the sequences of a request) and sequences are named by handles, opaque integers.  A
    handle dies with the object it names and is never reused; a late call with one raises
    ``StaleHandleError``.  A call that raises has changed nothing.  Equal calls lead to equal
    decisions: the clock is an argument.

    Any thread may call; a call waits while another thread computes.  Calls that take more than
    some 20 us run without the GIL.

    Args:
        scheduler_config: Limits and choices.
        cache_config: KV blocks.
        log: File of the decision log, one JSON line per step, which
            ``python -m pagedserve.replay`` replays.  In a directory the log is written to several
            files of ``log_max_bytes`` in total; the oldest are deleted.
        log_max_bytes: Bytes of all logs in that directory; a file has a sixteenth of them.

    Raises:
        ``ConfigError``: Configurations that contradict each other.
        ``OSError``: A log that cannot be written.

    Example:
        >>> import numpy as np
        >>> from pagedserve.scheduler import CacheConfig, InputBuffers, Scheduler, SchedulerConfig
        >>> scheduler = Scheduler(
        ...     SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=32),
        ...     CacheConfig(block_size=4, num_gpu_blocks=32),
        ... )
        >>> prompt = np.array([11, 12, 13], np.int32)
        >>> group, seq = scheduler.add_seq_group(prompt, arrival_time=0.0)
        >>> step = scheduler.schedule(0.0)
        >>> step.num_rows, step.num_batched_tokens, step.num_samples
        (1, 3, 1)
        >>> arrays = {
        ...     "token_ids": np.zeros(64, np.int32),
        ...     "positions": np.zeros(64, np.int64),
        ...     "slot_mapping": np.zeros(64, np.int64),
        ...     "query_start": np.zeros(5, np.int32),
        ...     "seq_lens": np.zeros(4, np.int32),
        ...     "block_tables": np.zeros(4 * 8, np.int32),
        ...     "sample_index": np.zeros(4, np.int32),
        ...     "sample_rows": np.zeros(4, np.int32),
        ...     "row_handles": np.zeros(4, np.int64),
        ... }
        >>> scheduler.prepare_inputs(InputBuffers(**arrays))
        >>> arrays["token_ids"][: step.num_batched_tokens].tolist()
        [11, 12, 13]
        >>> rows = arrays["sample_rows"][: step.num_samples]
        >>> token_start, tokens = np.array([0, 1], np.int32), np.array([7], np.int32)
        >>> finish = np.array([0], np.uint8)
        >>> handles, ended = scheduler.update(step.step_id, rows, token_start, tokens, finish)
        >>> handles.tolist() == [seq], ended
        (True, [])
        >>> scheduler.token_ids(seq).tolist()
        [11, 12, 13, 7]
    """

    def __new__(
        cls,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        *,
        log: PathLike[str] | str | None = None,
        log_max_bytes: int = ...,
    ) -> Scheduler: ...
    def flush_log(self) -> None:
        """Flush the decision log to its file, events since the last step included."""
    @property
    def log_error(self) -> str | None:
        """Error that ended the decision log, such as a full disk; None without one."""
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
        can_regrow: bool = False,
        branches: Sequence[NDArray[np.int32]] = ...,
        request_id: str = "",
    ) -> tuple[int, int]:
        """Queue a request.

        Args:
            token_ids: Prompt, int32 ``[L]`` with at least one token; copied.
            arrival_time: Time in seconds of the caller's clock.
            max_num_running_seqs: Maximum number of live sequences: parallel samples or beams.
            priority: Priority, smallest first; used only by the priority policy.
            adapter: Adapter id, 0 for none; it takes one of ``max_loras`` slots.
            salt: Cache salt; prefixes are shared only between equal adapters and salts.  With
                prefix caching a request with an encoder needs one that identifies the encoder's
                input.
            num_encoder_tokens: Tokens of the encoder's output, for cross attention; 0 for a
                decoder-only model.
            can_regrow: Whether forks may replace ended sequences, as in beam search; the group then
                keeps its whole budget of sequences.
            branches: Token ids that continue the prompt, int32 ``[B]`` each, one array for each
                sequence that the group starts with; empty for one sequence of the prompt alone.
                The sequences share the full blocks of what they have in common, which is computed
                once, and are sampled in one step.
            request_id: Name of the request in the decision log; no effect on decisions.

        Returns:
            Handles of the group and of its first sequence; `seqs_of` returns the others.

        Raises:
            ``RequestError``: An empty prompt, a negative token, an arrival time that is no time,
                more sequences than may run, an adapter where none are configured, or an encoder
                without a salt where prefixes are shared.
        """
    def abort(self, group: int) -> GroupStats | None:
        """Abort a group in any state.

        Its blocks are freed at once, or at the end of the open step.  `update` accepts results with
        or without its rows of the open step.

        Returns:
            Statistics of the group; None if it has already ended.
        """
    def schedule(self, now: float) -> SchedulerOutputs:
        """Decide the next step, and open it unless it is empty.

        Args:
            now: Time in seconds of the caller's clock, not before that of the last call.

        Returns:
            Decisions of the step.  If ``is_empty``, no step is open; groups may still have ended
            (``ignored_seq_groups``).

        Raises:
            ``StepError``: A step is open, or ``now`` is no time or lies in the past.
        """
    def propose(
        self,
        step_id: int,
        rows: NDArray[np.int32],  # [K], increasing, sampled decode rows
        token_start: NDArray[np.int32],  # [K + 1]
        tokens: NDArray[np.int32],  # [token_start[K]]
    ) -> SchedulerOutputs:
        """Add draft tokens to decode rows of the open step.

        `prepare_inputs` then writes them after the row's token, each with a separate sample.  No
        decision depends on them: the tokens passed to `update` are those that were accepted.

        Args:
            step_id: Id of the open step.
            rows: Sampled decode rows of the step, int32 ``[K]``, increasing.
            token_start: Start of each row's tokens in ``tokens``, int32 ``[K + 1]``, increasing
                from 0.
            tokens: Draft tokens, int32 ``[token_start[K]]``, each at least 0; at most
                ``num_lookahead_slots`` per row.

        Returns:
            Decisions of the step; its counts of tokens and samples include the drafts.

        Raises:
            ``StepError``: Not the open step, a step that already has drafts, or arrays that do not
                fit it; the step then has no drafts.
        """
    def prepare_inputs(self, buffers: InputBuffers) -> None:
        """Write the model's inputs for the open step into arrays, in place.

        With R rows, T tokens and S samples (``num_rows``, ``num_batched_tokens``, ``num_samples``
        of the step) the first R, T or S entries are written, as `InputBuffers` describes; later
        entries are left unchanged.

        Raises:
            ``StepError``: No step is open, an array is too short (nothing was written then), or one
                is in use elsewhere.
        """
    def update(
        self,
        step_id: int,
        parent_rows: NDArray[np.int32],  # [K], not decreasing
        token_start: NDArray[np.int32],  # [K + 1]
        tokens: NDArray[np.int32],  # [token_start[K]]
        finish: NDArray[np.uint8],  # [K], 0 = lives on
    ) -> tuple[NDArray[np.int64], list[tuple[int, GroupStats]]]:
        """Apply the sampled tokens, forks and ends of sequences, and end the open step.

        Output *i* continues row ``parent_rows[i]`` with ``tokens[token_start[i]:token_start[i +
        1]]``.  Several outputs may name one row: the last continues its sequence, the others are
        forks of it.  A sampled row that no output names is dropped.  A group without sequences
        ends.

        Args:
            step_id: Id of the open step.
            parent_rows: Sampled row that each output continues, int32 ``[K]``, not decreasing.
            token_start: Start of each row's tokens in ``tokens``, int32 ``[K + 1]``, increasing
                from 0.
            tokens: Sampled tokens, int32 ``[token_start[K]]``, each at least 0; one per output, or
                up to ``num_lookahead_slots + 1`` for the only output of a decode row.
            finish: Whether each output ends its sequence, uint8 ``[K]``; 0 continues.

        Returns:
            Handle of each output's sequence, int64 ``[K]``, and ``(handle, stats)`` of each group
            that ended. Handles of ended sequences and groups are dead.

        Raises:
            ``StepError``: Not the open step, unresolved tokens of the previous step, or arrays that
                do not fit the step; the step stays open.
        """
    def update_async(self, step_id: int) -> bool:
        """End the open step before its tokens are known, so that the next one can be scheduled.

        Every sampled row continues with one token.  Until `resolve_tokens` sets it, the next step's
        ``token_ids`` hold the placeholder ``-1 - i`` for sample ``i``.  A sequence that ends with
        its token is aborted once the token is known.

        Returns:
            False, and the step stays open, if it has drafts, a sampled group may have several
            sequences, or a sequence is at ``max_model_len``.

        Raises:
            ``StepError``: Not the open step, or unresolved tokens of the previous step.
        """
    def resolve_tokens(self, step_id: int, tokens: NDArray[np.int32]) -> None:
        """Set the tokens of the step that `update_async` ended.

        Args:
            step_id: Id of that step.
            tokens: Sampled tokens, int32 ``[S]``, in order of samples; those of sequences that have
                ended are ignored.

        Raises:
            ``StepError``: Not that step, too few or too many tokens, or a negative one.
        """
    def abandon(self, step_id: int) -> None:
        """Abandon the open step and an unresolved one, after the model failed.

        Every group that ran or moved in them returns to the queue and is recomputed from its
        tokens, in the old order.

        Args:
            step_id: Id of either step.

        Raises:
            ``StepError``: Neither step has this id.
        """
    def token_ids(self, seq: int) -> NDArray[np.int32]:
        """Return the token ids of a sequence, prompt and output, int32.

        Raises:
            ``StaleHandleError``: The sequence has ended.
        """
    def block_table(self, seq: int, *, kv_group: int = 0) -> NDArray[np.int32]:
        """Return the physical blocks of a sequence in a KV group, int32; empty while it waits.

        In the first group by logical block; under ``sliding_window`` a physical block stands for
        several.  In another the first block is the first that a later query sees.

        Args:
            seq: Handle of the sequence.
            kv_group: Number of the group, 0 for the first.

        Raises:
            ``StaleHandleError``: The sequence has ended.
            ``IndexError``: There is no such group.
        """
    def common_computed_blocks(self, group: int) -> NDArray[np.int32]:
        """Return the computed leading blocks that all sequences of a group share, int32.

        Raises:
            ``StaleHandleError``: The group has ended.
        """
    def seq_group_metadata(self, *, delta: bool = False) -> list[SequenceGroupMetadata]:
        """Return the scheduled groups of the open step as objects, in order; none without one.

        Args:
            delta: Return only the token ids of the step, and for decoding groups only the blocks
                that the step writes, for a runner that keeps the rest.
        """
    def seqs_of(self, group: int) -> NDArray[np.int64]:
        """Return the live sequences of a group in order of creation, int64 handles.

        Raises:
            ``StaleHandleError``: The group has ended.
        """
    def group_stats(self, group: int) -> GroupStats:
        """Return the statistics of a live group.

        Raises:
            ``StaleHandleError``: The group has ended.
        """
    def prompt_refusal(self, num_tokens: int) -> str | None:
        """Return why a prompt of ``num_tokens`` tokens can never run, or None if it can.

        Args:
            num_tokens: Tokens of the prompt of a decoder-only model.

        Returns:
            A sentence without its subject, such as "has 40 tokens; max_model_len is 32, so at
            most 31 leave space for a new one"; None if such a prompt can run.

        Raises:
            ``RequestError``: A negative number.
        """
    def reset_prefix_cache(self) -> bool:
        """Drop every cached prefix.

        Returns:
            True if dropped; False, without effect, while a block is used.
        """
    def check(self) -> None:
        """Check every invariant of the whole state; slow, for tests and idle times.

        Raises:
            ``InvariantError``: The first broken invariant: a bug in this package.
        """
    @property
    def waiting(self) -> list[int]:
        """Handles of the waiting groups, in order of service."""
    @property
    def running(self) -> list[int]:
        """Handles of the running groups, in order of service."""
    @property
    def swapped(self) -> list[int]:
        """Handles of the swapped groups, in order of service."""
    @property
    def has_unfinished(self) -> bool:
        """Whether any group waits, runs or is swapped."""
    @property
    def num_waiting(self) -> int:
        """Number of waiting groups."""
    @property
    def num_running(self) -> int:
        """Number of running groups."""
    @property
    def num_swapped(self) -> int:
        """Number of swapped groups."""
    @property
    def num_free_gpu_blocks(self) -> int:
        """Number of free device blocks, cached ones included."""
    @property
    def num_free_cpu_blocks(self) -> int:
        """Number of free host blocks, cached ones included."""
    @property
    def num_preemptions(self) -> int:
        """Total number of preemptions, by recompute and by swap."""
    @property
    def gpu_cache_usage(self) -> float:
        """Used share of the fullest device pool of a KV group, from 0 to 1; states are left out."""
    @property
    def cpu_cache_usage(self) -> float:
        """Used share of the fullest host pool of a KV group, from 0 to 1; states are left out."""
    @property
    def num_recomputed_tokens(self) -> int:
        """Total number of tokens whose computed keys and values were discarded."""
    @property
    def num_looked_up_tokens(self) -> int:
        """Total number of tokens looked up in the prefix cache, counted per admission."""
    @property
    def num_cached_tokens(self) -> int:
        """Total number of looked-up tokens that the prefix cache had."""
    @property
    def queue_seconds(self) -> float:
        """Total seconds that groups waited from arrival to their first step."""

@final
class SequenceGroupMetadata:
    """Scheduled group as a model runner of vLLM 0.6.2's kind takes it.

    Dictionaries are keyed by sequence handles.
    """

    @property
    def group(self) -> int:
        """Handle of the group."""
    @property
    def is_prompt(self) -> bool:
        """Whether the group computed or recomputed its prompt before the step."""
    @property
    def do_sample(self) -> bool:
        """Whether its next tokens are sampled."""
    @property
    def token_chunk_size(self) -> int:
        """Number of tokens computed in the step: for a prompt in all, for a decode per sequence."""
    @property
    def is_delta(self) -> bool:
        """Whether tokens and tables are those of the step only."""
    @property
    def adapter(self) -> int:
        """Adapter id, 0 for none."""
    @property
    def token_ids(self) -> dict[int, NDArray[np.int32]]:
        """Token ids of each sequence, int32; those of the step come last."""
    @property
    def num_computed_tokens(self) -> dict[int, int]:
        """Number of tokens of each sequence computed before the step."""
    @property
    def block_tables(self) -> dict[int, NDArray[np.int32]]:
        """Physical blocks of each sequence, int32."""
    @property
    def cross_block_table(self) -> NDArray[np.int32]:
        """Physical blocks of the encoder, int32."""
    @property
    def computed_block_nums(self) -> NDArray[np.int32]:
        """Computed leading blocks that all sequences share, int32."""

@final
class UncachedBlockAllocator:
    """Allocator of reference-counted blocks without prefix caching."""

    def __new__(cls, num_blocks: int) -> UncachedBlockAllocator: ...
    def allocate(self) -> int | None:
        """Take a free block.

        Returns:
            Block number, or None if all are used.
        """
    def fork(self, block: int) -> None:
        """Take one more reference to a used block.

        Raises:
            ``RequestError``: No such block, or a free one.
        """
    def free(self, block: int) -> None:
        """Release one reference; the last one frees the block.

        Raises:
            ``RequestError``: No such block, or a free one.
        """
    def ref_count(self, block: int) -> int:
        """Return the number of references to a block, 0 for a free one.

        Raises:
            ``RequestError``: No such block.
        """
    @property
    def num_free(self) -> int:
        """Number of blocks without references."""
    @property
    def num_total(self) -> int:
        """Number of all blocks."""

@final
class Prefix:
    """Prefix of whole blocks, a key of `CachedBlockAllocator`."""

    @staticmethod
    def root(*, adapter: int = 0, salt: int = 0) -> Prefix:
        """Return the prefix before the first block.

        Args:
            adapter: Adapter id; prefixes of different adapters are never equal.
            salt: Cache salt; prefixes of different salts are never equal.
        """

@final
class CachedBlockAllocator:
    """Allocator of reference-counted blocks with prefix caching.

    A free block keeps its contents until it is evicted.
    """

    def __new__(cls, num_blocks: int, block_size: int) -> CachedBlockAllocator: ...
    def allocate(self, num_prefix_tokens: int = 0) -> int | None:
        """Take a free block and drop its contents: blank ones first, then the least recent.

        Args:
            num_prefix_tokens: Tokens up to the end of the block; of equally old blocks the one with
                the longest prefix is evicted first.

        Returns:
            Block number, or None if all are used.
        """
    def find(self, before: Prefix, token_ids: NDArray[np.int32]) -> int | None:
        """Find the block that holds these tokens after a prefix, compared token by token.

        Args:
            before: Prefix up to its start.
            token_ids: int32 ``[1..block_size]``.

        Returns:
            Block number, or None.
        """
    def acquire(self, block: int) -> None:
        """Take one more reference to a block that `find` returned, used or free.

        Raises:
            ``RequestError``: No such block, or one that is free and holds nothing.
        """
    def register(self, block: int, before: Prefix, token_ids: NDArray[np.int32]) -> Prefix:
        """Register the contents of a used block.

        Args:
            block: Block number.
            before: Prefix up to its start.
            token_ids: int32 ``[1..block_size]``.

        Returns:
            Prefix up to the end of the block.

        Raises:
            ``RequestError``: A free block, too many tokens, or a prefix that another block holds.
        """
    def prefix_of(self, block: int) -> Prefix | None:
        """Return the prefix up to the end of a block, or None if it is not registered.

        Raises:
            ``RequestError``: No such block.
        """
    def fork(self, block: int) -> None:
        """Take one more reference to a used block.

        Raises:
            ``RequestError``: No such block, or a free one.
        """
    def free(self, block: int, *, last_access: int = 0) -> None:
        """Release one reference; the last one frees the block, which keeps its contents.

        Args:
            block: Block number.
            last_access: Time of its last use; the least recent is evicted first.

        Raises:
            ``RequestError``: No such block, or a free one.
        """
    def mark_computed(self, block: int) -> None:
        """Mark the keys and values of a used block as computed.

        Raises:
            ``RequestError``: No such block, or a free one.
        """
    def is_computed(self, block: int) -> bool:
        """Return whether the keys and values of a block are computed.

        Raises:
            ``RequestError``: No such block.
        """
    def ref_count(self, block: int) -> int:
        """Return the number of references to a block, 0 for a free one.

        Raises:
            ``RequestError``: No such block.
        """
    def reset(self) -> bool:
        """Drop all cached contents.

        Returns:
            True if dropped; False, without effect, while a block is used.
        """
    @property
    def num_free(self) -> int:
        """Number of blocks without references."""
    @property
    def num_cached(self) -> int:
        """Number of free blocks with cached contents."""
    @property
    def num_total(self) -> int:
        """Number of all blocks."""

@final
class LRUEvictor:
    """Least-recently-used eviction order of free cached blocks."""

    def __new__(cls) -> LRUEvictor: ...
    def add(self, block: int, last_access: int, num_hashed_tokens: int) -> None:
        """Add a block to the eviction order.

        Args:
            block: Block number, not yet added.
            last_access: Time of its last use; the least recent is evicted first.
            num_hashed_tokens: Tokens up to its end; of equally old blocks the longest goes first.

        Raises:
            ``RequestError``: A block that was already added.
        """
    def remove(self, block: int) -> None:
        """Remove a block that is used again.

        Raises:
            ``RequestError``: A block that was not added.
        """
    def evict(self) -> int | None:
        """Remove and return the next block to evict.

        Returns:
            Block number, or None if empty.
        """
    def __contains__(self, block: int, /) -> bool: ...
    def __len__(self, /) -> int: ...

@final
class BlockSpaceManager:
    """Block tables of groups that the caller schedules."""

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
    ) -> tuple[int, int]:
        """Add a group without blocks.

        Args:
            token_ids: Prompt, int32 ``[L]``; copied.
            max_num_running_seqs: Maximum number of live sequences.
            adapter: Adapter id; prefixes are shared only between equal adapters and salts.
            salt: Cache salt; see ``adapter``.
            num_encoder_tokens: Tokens of the encoder's output; 0 for a decoder-only model.

        Returns:
            Handles of the group and of its first sequence.

        Raises:
            ``RequestError``: An empty prompt, a negative token, no sequence, or an encoder without
                a salt where prefixes are shared.
        """
    def begin_step(self) -> None:
        """Begin the decisions of the next step."""
    def can_allocate(self, group: int) -> _AllocStatus:
        """Return whether a waiting group can be given blocks: "ok", "later" or "never".

        Raises:
            ``StaleHandleError``: The group has ended.
        """
    def allocate(self, group: int) -> None:
        """Allocate blocks for the prompt of a group, after its cached prefix.

        Raises:
            ``StepError``: `can_allocate` does not return "ok".
            ``StaleHandleError``: The group has ended.
        """
    def append_token(self, seq: int, token_id: int) -> None:
        """Append a token to a sequence.

        Raises:
            ``RequestError``: A negative token.
            ``StepError``: The sequence has no slot for its newest token.
            ``StaleHandleError``: The sequence has ended.
        """
    def mark_computed(self, seq: int, num_tokens: int) -> None:
        """Mark the next ``num_tokens`` tokens of a sequence as computed.

        Raises:
            ``StepError``: More tokens than the sequence has.
            ``StaleHandleError``: The sequence has ended.
        """
    def can_append_slots(self, group: int) -> bool:
        """Return whether every sequence of a group can get slots for its next token and lookahead.

        Raises:
            ``StaleHandleError``: The group has ended.
        """
    def append_slots(self, group: int) -> NDArray[np.int64]:
        """Allocate slots for the next token and lookahead of every sequence of a group.

        A shared last block is replaced by a copy.

        Returns:
            Copies to make first, int64 ``[n, 2]`` (source, destination).

        Raises:
            ``StepError``: `can_append_slots` returns False.
            ``StaleHandleError``: The group has ended.
        """
    def fork(self, seq: int) -> int:
        """Fork a sequence: the child has its tokens and shares its blocks.

        Returns:
            Handle of the child.

        Raises:
            ``StepError``: The sequence has no device blocks.
            ``StaleHandleError``: The sequence has ended.
        """
    def can_swap_out(self, group: int) -> bool:
        """Return whether the host has enough free blocks for a group.

        Raises:
            ``StaleHandleError``: The group has ended.
        """
    def swap_out(self, group: int) -> NDArray[np.int64]:
        """Move the blocks of a group to the host.

        Returns:
            Moves to make, int64 ``[n, 2]`` (device, host).

        Raises:
            ``StepError``: `can_swap_out` returns False.
            ``StaleHandleError``: The group has ended.
        """
    def can_swap_in(self, group: int) -> _AllocStatus:
        """Return whether a swapped group can be swapped in: "ok", "later" or "never".

        Raises:
            ``StaleHandleError``: The group has ended.
        """
    def swap_in(self, group: int) -> NDArray[np.int64]:
        """Move the blocks of a group back to the device.

        Returns:
            Moves to make, int64 ``[n, 2]`` (host, device).

        Raises:
            ``StepError``: `can_swap_in` does not return "ok".
            ``StaleHandleError``: The group has ended.
        """
    def free(self, seq: int) -> None:
        """End a sequence and free its blocks; the group ends with its last sequence.

        Raises:
            ``StaleHandleError``: The sequence has ended.
        """
    def reset_prefix_cache(self) -> bool:
        """Drop every cached prefix.

        Returns:
            True if dropped; False, without effect, while a block is used.
        """
    def num_computed_tokens(self, seq: int) -> int:
        """Return the number of leading tokens of a sequence that are computed.

        Raises:
            ``StaleHandleError``: The sequence has ended.
        """
    def last_access(self, seq: int) -> int:
        """Return the last step that used a sequence.

        Raises:
            ``StaleHandleError``: The sequence has ended.
        """
    @property
    def moves(self) -> list[BlockMoves]:
        """Moves of the last call that made any, in the pool of each KV group.

        The first entry has what that call returned.
        """
    def block_table(self, seq: int, *, kv_group: int = 0) -> NDArray[np.int32]:
        """Return the physical blocks of a sequence in a KV group, int32.

        In the first group by logical block; in another the first block is the first that a later
        query sees.

        Args:
            seq: Handle of the sequence.
            kv_group: Number of the group, 0 for the first.

        Raises:
            ``StaleHandleError``: The sequence has ended.
            ``IndexError``: There is no such group.
        """
    def common_computed_blocks(self, group: int) -> NDArray[np.int32]:
        """Return the computed leading blocks that all sequences of a group share, int32.

        Raises:
            ``StaleHandleError``: The group has ended.
        """
    @property
    def num_free_gpu_blocks(self) -> int:
        """Number of free device blocks."""
    @property
    def num_free_cpu_blocks(self) -> int:
        """Number of free host blocks."""
    @property
    def watermark_blocks(self) -> int:
        """Number of device blocks kept free when a new group is admitted."""

@final
class TokenLookup:
    """Draft tokens by prompt lookup: what followed the newest tokens at their last occurrence.

    Costs O(1) per added token, and some microseconds per proposal whatever the length.

    Args:
        min_match: Minimum number of matching tokens, at least 1.
        max_match: Maximum number of tokens compared; the longest match wins, of equals the newest.
        max_tokens: Capacity in tokens; beyond it the older half is dropped.

    Raises:
        ``ConfigError``: A negative number.

    Example:
        >>> from pagedserve.scheduler import TokenLookup
        >>> lookup = TokenLookup(min_match=2, max_match=8)
        >>> lookup.extend([5, 6, 7, 8, 9, 5, 6])
        >>> lookup.propose(3)
        [7, 8, 9]
    """

    def __new__(
        cls, *, min_match: int, max_match: int, max_tokens: int = 16777216
    ) -> TokenLookup: ...
    def __len__(self, /) -> int: ...
    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the newest sequence."""
    def end_text(self) -> None:
        """End the newest sequence; later tokens begin another."""
    def propose(self, most: int) -> list[int]:
        """Return up to ``most`` tokens that followed the longest match of the newest tokens."""
    def propose_for(self, token_ids: Sequence[int], most: int) -> list[int]:
        """Return a proposal for a sequence that was not added, by its last tokens."""
