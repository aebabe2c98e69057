"""The scheduler and its block managers as a separate library, with numpy as its only dependency.

A program that runs a model itself needs no other module: it calls ``Scheduler`` three times per
step, or decides itself and uses ``BlockSpaceManager`` or one of the block allocators.  Importing
this module loads neither torch nor transformers.  All classes are implemented in Rust.

Example:
    >>> import numpy as np
    >>> from pagedserve.scheduler import CacheConfig, Scheduler, SchedulerConfig
    >>> config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=32)
    >>> scheduler = Scheduler(config, CacheConfig(block_size=4, num_gpu_blocks=32))
    >>> group, seq = scheduler.add_seq_group(np.array([11, 12, 13], np.int32), arrival_time=0.0)
    >>> step = scheduler.schedule(0.0)
    >>> step.num_rows, step.num_batched_tokens
    (1, 3)
"""

from pagedserve._core import (
    BlockMoves,
    BlockSpaceManager,
    CacheChoices,
    CacheConfig,
    CachedBlockAllocator,
    GroupStats,
    InputBuffers,
    KVGroup,
    LRUEvictor,
    Prefix,
    ScheduledSequenceGroup,
    Scheduler,
    SchedulerChoices,
    SchedulerConfig,
    SchedulerOutputs,
    SequenceGroupMetadata,
    TokenLookup,
    UncachedBlockAllocator,
)
from pagedserve.errors import (
    ConfigError,
    InvariantError,
    PagedServeError,
    RequestError,
    StaleHandleError,
    StepError,
)

__all__ = [
    "BlockMoves",
    "BlockSpaceManager",
    "CacheChoices",
    "CacheConfig",
    "CachedBlockAllocator",
    "ConfigError",
    "GroupStats",
    "InputBuffers",
    "InvariantError",
    "KVGroup",
    "LRUEvictor",
    "PagedServeError",
    "Prefix",
    "RequestError",
    "ScheduledSequenceGroup",
    "Scheduler",
    "SchedulerChoices",
    "SchedulerConfig",
    "SchedulerOutputs",
    "SequenceGroupMetadata",
    "StaleHandleError",
    "StepError",
    "TokenLookup",
    "UncachedBlockAllocator",
]
