"""From an engine's arguments and its model to the configurations of its parts."""

import traceback
from typing import Final

import torch

from pagedserve._core import CacheConfig, SchedulerConfig
from pagedserve.config import GPU_MEMORY_UTILIZATION, EngineArgs
from pagedserve.engine.memory import (
    MemoryPlan,
    default_kv_cache_bytes,
    free_bytes,
    free_host_bytes,
    plan_memory,
    shown_bytes,
)
from pagedserve.errors import ConfigError
from pagedserve.executor.available import AvailableBlocks, StepLimits
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
    defaults = {"max_num_batched_tokens": num_tokens}
    return SchedulerConfig(max_model_len=max_model_len, **(defaults | args.scheduler_options))


def memory_plan(args: EngineArgs, executor: Executor, config: SchedulerConfig) -> MemoryPlan:
    """Where the memory goes, now that the model is loaded.

    Args:
        args: The user's.
        executor: With the model.
        config: The limits of a step, which a profile run on a GPU tries out.

    Raises:
        ConfigError: More than is free, or too little to be of use.
    """
    device = executor.loaded.device
    if args.gpu_memory_utilization != GPU_MEMORY_UTILIZATION and device.type == "cpu":
        raise ConfigError(
            f"gpu_memory_utilization is {args.gpu_memory_utilization}, and the model is on the "
            "CPU, whose memory others use too: give kv_cache_memory instead"
        )
    block_bytes = executor.kv_bytes_per_block(args.block_size)
    available = None
    if device.type == "cuda" and args.num_gpu_blocks is None and args.kv_cache_memory is None:
        available = _available_blocks(args, executor, config)
    return plan_memory(
        block_bytes=block_bytes,
        block_size=args.block_size,
        weight_bytes=executor.loaded.weight_bytes,
        free_bytes=free_bytes(device),
        default_bytes=default_kv_cache_bytes(device),
        num_gpu_blocks=args.num_gpu_blocks,
        kv_cache_memory=args.kv_cache_memory,
        max_model_len=args.max_model_len,
        swap_space=args.swap_space,
        free_host_bytes=free_host_bytes(),
        available=available,
    )


def _available_blocks(
    args: EngineArgs, executor: Executor, config: SchedulerConfig
) -> AvailableBlocks:
    limits = StepLimits(
        max_num_tokens=config.max_num_batched_tokens,
        max_num_rows=config.max_num_seqs,
        max_model_len=config.max_model_len,
    )
    loaded = executor.loaded
    free = free_bytes(loaded.device)
    try:
        return executor.profile_num_available_blocks(
            limits=limits,
            block_size=args.block_size,
            utilization=args.gpu_memory_utilization,
        )
    except torch.OutOfMemoryError as error:
        # Its frames hold the tensors of the step, which whoever tries again needs.
        traceback.clear_frames(error.__traceback__)
        raise ConfigError(
            f"out of memory in the profile run on {loaded.device}: weights take "
            f"{shown_bytes(loaded.weight_bytes)}, and the {shown_bytes(free)} that are free beside "
            f"them do not hold the activations of a step of {limits.max_num_tokens} tokens or "
            f"{limits.max_num_rows} sequences, let alone a KV cache: lower max_num_batched_tokens "
            "(and max_model_len, unless prompts are chunked) or max_num_seqs"
        ) from error


def cache_config(args: EngineArgs, memory: MemoryPlan) -> CacheConfig:
    """The KV blocks of both tiers."""
    return CacheConfig(
        num_gpu_blocks=memory.num_gpu_blocks,
        num_cpu_blocks=memory.num_cpu_blocks,
        **args.cache_options,
    )
