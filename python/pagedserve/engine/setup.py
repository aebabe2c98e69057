"""From an engine's arguments and its model to the configurations of its parts."""

from typing import Final

from pagedserve._core import CacheConfig, SchedulerConfig
from pagedserve.engine.args import EngineArgs
from pagedserve.engine.memory import (
    MemoryPlan,
    default_kv_cache_bytes,
    free_bytes,
    free_host_bytes,
    plan_memory,
)
from pagedserve.executor.executor import Executor

# Tokens of a step where nobody says: with chunks few, so that no decode waits long for a prompt.
_CHUNKED_TOKENS: Final = 512
_WHOLE_PROMPT_TOKENS: Final = 2048


def scheduler_config(args: EngineArgs, max_model_len: int) -> SchedulerConfig:
    """The limits of a step.

    Raises:
        ConfigError: Limits that contradict each other.
    """
    if args.enable_chunked_prefill:
        num_tokens = max(_CHUNKED_TOKENS, args.max_num_seqs)
    else:
        num_tokens = max(_WHOLE_PROMPT_TOKENS, max_model_len, args.max_num_seqs)
    return SchedulerConfig(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens or num_tokens,
        max_model_len=max_model_len,
        preemption_mode=args.preemption_mode,
        enable_chunked_prefill=args.enable_chunked_prefill,
        num_lookahead_slots=args.num_lookahead_slots,
    )


def memory_plan(args: EngineArgs, executor: Executor) -> MemoryPlan:
    """Where the memory goes, now that the model is loaded.

    Raises:
        ConfigError: More than is free, or too little to be of use.
    """
    device = executor.loaded.device
    return plan_memory(
        block_bytes=executor.kv_bytes_per_block(args.block_size),
        block_size=args.block_size,
        weight_bytes=executor.loaded.weight_bytes,
        free_bytes=free_bytes(device),
        default_bytes=default_kv_cache_bytes(device),
        num_gpu_blocks=args.num_gpu_blocks,
        kv_cache_memory=args.kv_cache_memory,
        max_model_len=args.max_model_len,
        swap_space=args.swap_space,
        free_host_bytes=free_host_bytes(),
    )


def cache_config(args: EngineArgs, memory: MemoryPlan) -> CacheConfig:
    """The KV blocks of both tiers."""
    return CacheConfig(
        block_size=args.block_size,
        num_gpu_blocks=memory.num_gpu_blocks,
        num_cpu_blocks=memory.num_cpu_blocks,
        enable_prefix_caching=args.enable_prefix_caching,
    )
