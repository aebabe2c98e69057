"""Requirements of layers with windows or chunks that have separate KV blocks."""

from functools import partial

from pagedserve._core import KVGroup, SchedulerConfig
from pagedserve.executor.memory import WindowNeed
from pagedserve.executor.protocol import StepLimits


def window_need(
    limits: StepLimits, *, block_size: int, block_bytes: int, caches_prefixes: bool
) -> WindowNeed | None:
    """Requirements of layers with windows or chunks; None if they share blocks with the others.

    Args:
        limits: Limits of a step.
        block_size: Tokens per block.
        block_bytes: Bytes of one block over these layers.
        caches_prefixes: Whether prefixes are cached.
    """
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
        KVGroup.num_gpu_blocks_for,
        config,
        window=limits.group_window,
        block_size=block_size,
    )
    return WindowNeed(
        window=limits.group_window,
        kind=limits.group_kind,
        block_bytes=block_bytes,
        least_blocks=blocks_for(num_seqs=1),
        # As many again for the ends of cached prefixes.
        most_blocks=blocks_for(num_seqs=limits.max_num_rows * (2 if caches_prefixes else 1)),
    )
