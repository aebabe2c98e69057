"""Steps of a native model, without an engine."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from pagedserve.config.cache import KVCacheDtype
from pagedserve.executor.numpy_buffers import GroupBlocks, StepArrays
from pagedserve.executor.protocol import CacheShape, StepLimits
from pagedserve.native.load import LoadedNative
from pagedserve.native.pools import KVPools

_BLOCK_SIZE: Final = 16


def _one_row(tokens: NDArray[np.int32], first: int) -> StepArrays:
    """Arrays of a step with one row, whose first tokens are in the cache already."""
    num_tokens, num_new = len(tokens), len(tokens) - first
    tables = np.arange(-(-num_tokens // _BLOCK_SIZE), dtype=np.int32)[None]
    positions = np.arange(first, num_tokens)
    return StepArrays(
        token_ids=tokens[first:],
        positions=positions,
        slot_mapping=positions,
        query_start=np.array([0, num_new], np.int32),
        seq_lens=np.array([num_tokens], np.int32),
        block_tables=tables,
        sample_index=np.arange(num_new, dtype=np.int32),
        adapter_slots=np.full(1, -1, np.int32),
        groups=(GroupBlocks(tables, positions),),
    )


def logits_of(
    loaded: LoadedNative,
    tokens: NDArray[np.int32],
    *cuts: int,
    cache_dtype: KVCacheDtype = "auto",
    index: NDArray[np.int32] | None = None,
) -> NDArray[np.float32]:
    """Logits of all tokens, or of those at ``index`` in each step: at these cuts a step ends."""
    limits = StepLimits(max_num_tokens=256, max_num_rows=1, max_model_len=256)
    shape = CacheShape(num_gpu_blocks=16, num_cpu_blocks=0, block_size=_BLOCK_SIZE, limits=limits)
    pools = KVPools(loaded.model.config, shape, loaded.model.dtype, cache_dtype).layers
    found, first = [], 0
    for end in (*cuts, len(tokens)):
        step = _one_row(tokens[:end], first)
        found.append(
            loaded.model.outputs(step, pools, step.sample_index if index is None else index)
        )
        first = end
    return np.concatenate(found)
