"""The scheduler core: every decision about sequences and KV blocks, written in Rust.

Handles (sequence groups, sequences) are opaque integers.  A handle dies with what it
names and is never given out again, so a late call raises ``StaleHandleError`` instead
of touching somebody else's blocks.
"""

from typing import Final, Literal, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "CacheConfig",
    "InputBuffers",
    "ScheduledSequenceGroup",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerOutputs",
    "__version__",
]

__version__: Final[str]

_PreemptionMode: TypeAlias = Literal["recompute", "swap"]

@final
class CacheConfig:
    def __new__(
        cls,
        *,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int = 0,
        watermark: float = 0.01,
    ) -> CacheConfig: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_gpu_blocks(self) -> int: ...
    @property
    def num_cpu_blocks(self) -> int: ...
    @property
    def watermark(self) -> float: ...

@final
class SchedulerConfig:
    def __new__(
        cls,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        preemption_mode: _PreemptionMode | None = None,
    ) -> SchedulerConfig: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_num_batched_tokens(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def preemption_mode(self) -> _PreemptionMode | None: ...

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
    def ignored_seq_groups(self) -> list[tuple[int, str]]: ...  # handle (now dead), reason
    @property
    def preempted(self) -> list[tuple[int, _PreemptionMode]]: ...
    @property
    def swapped_in(self) -> list[int]: ...
    @property
    def running_queue_size(self) -> int: ...
    @property
    def is_empty(self) -> bool: ...  # nothing to execute, and no update is awaited

@final
class Scheduler:
    def __new__(cls, scheduler_config: SchedulerConfig, cache_config: CacheConfig) -> Scheduler: ...
    def add_seq_group(
        self, token_ids: NDArray[np.int32], *, arrival_time: float, max_num_running_seqs: int = 1
    ) -> tuple[int, int]: ...
    def abort(self, group: int) -> bool: ...
    def schedule(self, now: float) -> SchedulerOutputs: ...
    def prepare_inputs(self, buffers: InputBuffers) -> None: ...
    def update(
        self,
        step_id: int,
        parent_rows: NDArray[np.int32],  # [K], not decreasing
        token_start: NDArray[np.int32],  # [K + 1]
        tokens: NDArray[np.int32],  # [token_start[K]]
        finish: NDArray[np.uint8],  # [K], 0 = lives on
    ) -> NDArray[np.int64]: ...  # [K]
    def abandon(self, step_id: int) -> None: ...
    def token_ids(self, seq: int) -> NDArray[np.int32]: ...
    def block_table(self, seq: int) -> NDArray[np.int32]: ...
    def check(self) -> None: ...
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
    def queue_seconds(self) -> float: ...
