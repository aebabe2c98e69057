"""Memory plan of a model for the options of an engine, from the shapes of its layers."""

from collections.abc import Callable, Sequence
from functools import partial

from pagedserve._core import KVGroup, SchedulerConfig
from pagedserve.cache.layers import KVFormat, LayerShape, kv_bytes_per_block, split_layers
from pagedserve.config import EngineArgs
from pagedserve.executor.memory import (
    DEFAULT_KV_CACHE_BYTES,
    AvailableMemory,
    MemoryPlan,
    WindowNeed,
    free_host_bytes,
    plan_memory,
)
from pagedserve.executor.protocol import StepLimits


def plan_kv_cache(
    args: EngineArgs,
    limits: StepLimits,
    layers: Sequence[LayerShape],
    *,
    kv_format: KVFormat,
    weight_bytes: int,
    state_bytes: int = 0,
    num_parts: int = 1,
    free_bytes: Callable[[], int] = free_host_bytes,
    profile: Callable[[], AvailableMemory] | None = None,
) -> MemoryPlan:
    """Compute the number of KV blocks.

    Args:
        args: Options of the engine.
        limits: Limits of a step.
        layers: Layers that keep keys and values.
        kv_format: How these are stored.
        weight_bytes: Bytes of the loaded model.
        state_bytes: Recurrent states of one sequence.
        num_parts: Number of such models that share the memory.
        free_bytes: Returns the free memory of the model's device.
        profile: Measures the memory of a GPU that the largest steps leave, if the number of blocks
            depends on it; None for a model in host memory.

    Raises:
        ConfigError: More than is free, or too little for one block or one sequence.
    """
    all_keys, windowed = (
        num_parts * kv_bytes_per_block(part, block_size=args.block_size, kv_format=kv_format)
        for part in split_layers(layers, limits.group_window, limits.group_kind)
    )
    windows = _window_need(limits, args, windowed)
    is_given = args.num_gpu_blocks is not None or args.kv_cache_memory is not None
    has_keys = all_keys > 0 or windows is not None
    available = profile() if profile and has_keys and not is_given else None
    return plan_memory(
        block_bytes=all_keys,
        block_size=args.block_size,
        max_num_seqs=limits.max_num_rows,
        weight_bytes=num_parts * weight_bytes,
        state_bytes=num_parts * state_bytes,
        free_bytes=free_bytes(),
        # GPU memory is for the cache; host memory is shared with other programs.
        default_bytes=DEFAULT_KV_CACHE_BYTES if profile is None else None,
        num_gpu_blocks=args.num_gpu_blocks,
        kv_cache_memory=args.kv_cache_memory,
        max_model_len=args.max_model_len and args.max_model_len + limits.num_lookahead_slots,
        longest=limits.max_model_len + limits.num_lookahead_slots,
        swap_space=args.swap_space,
        free_host_bytes=free_host_bytes(),
        available=available,
        windows=windows,
    )


def _window_need(limits: StepLimits, args: EngineArgs, block_bytes: int) -> WindowNeed | None:
    """Requirements of layers with windows or chunks; None if they share blocks with the others."""
    if limits.group_window is None:
        return None
    config = SchedulerConfig(
        max_num_seqs=limits.max_num_rows,
        max_num_batched_tokens=limits.max_num_tokens,
        max_model_len=limits.max_model_len,
        num_lookahead_slots=limits.num_lookahead_slots,
        enable_chunked_prefill=True,  # only the limits are used
    )

    blocks_for = partial(
        KVGroup.num_gpu_blocks_for, config, window=limits.group_window, block_size=args.block_size
    )
    return WindowNeed(
        window=limits.group_window,
        kind=limits.group_kind,
        block_bytes=block_bytes,
        least_blocks=blocks_for(num_seqs=1),
        # As many again for the ends of cached prefixes.
        most_blocks=blocks_for(
            num_seqs=limits.max_num_rows * (2 if args.enable_prefix_caching else 1)
        ),
    )
