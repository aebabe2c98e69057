"""Profile run: executes the largest steps once to measure their memory.

They attend over a pool of one block, to which all block tables refer: the results are undefined,
but time and memory are the same.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from pagedserve._core import KVGroup
from pagedserve.attention.metadata import AttentionMetadata, BatchLayout
from pagedserve.cache.engine import CacheEngine
from pagedserve.device import Cuda
from pagedserve.models.loader import LoadedModel
from pagedserve.runner.buffers import StepInputs
from pagedserve.runner.model_runner import Forward
from pagedserve.sampling.rows import RowSampling
from pagedserve.sampling.sampler import Sampler
from pagedserve.sampling.tensors import as_array, ops_for


class TrialRow(NamedTuple):
    """A row of a profiled step: number of queries, and keys that the last of them attends to."""

    num_queries: int
    seq_len: int


@torch.inference_mode()
def run_trial(
    loaded: LoadedModel,
    rows: Sequence[TrialRow],
    *,
    num_samples: int,
    block_size: int,
    cuda: Cuda | None = None,
) -> None:
    """Run and sample a step, and drop the results.

    Args:
        loaded: the model.
        rows: rows of the step.
        num_samples: rows of logits, sampled with every filter; may exceed the rows of the step.
        block_size: tokens per block.
        cuda: the model's device; None for a model in host memory.
    """
    cache = CacheEngine(
        loaded.stored_layers,
        num_gpu_blocks=1,
        num_cpu_blocks=0,
        block_size=block_size,
        dtype=loaded.dtype,
        device=loaded.device,
        states=loaded.states,
        groups=[KVGroup("state", num_gpu_blocks=1)],
    )
    for pool in cache.gpu_pools:
        pool.zero_()
    inputs = _inputs(rows, num_samples, block_size, loaded.device)
    logits = Forward(loaded, cache)(inputs, inputs.sample_index).float()
    row = RowSampling(temperature=1.0, top_p=0.9, min_p=0.01, uniforms=(0.5,))
    Sampler(ops_for(cuda)).sample(as_array(logits), [row] * num_samples)


def peak_bytes(cuda: Cuda, run: Callable[[], None]) -> int:
    """Peak memory of torch on a GPU while a function runs, above that before."""
    cuda.synchronize()
    cuda.release_unused()
    held = cuda.reserved_bytes()
    cuda.start_peak()
    run()
    cuda.synchronize()
    peak = cuda.peak_reserved_bytes()
    cuda.release_unused()
    return max(0, peak - held)


def _inputs(
    rows: Sequence[TrialRow], num_samples: int, block_size: int, device: torch.device
) -> StepInputs:
    num_queries = np.array([row.num_queries for row in rows])
    seq_lens = np.array([row.seq_len for row in rows], dtype=np.int32)
    query_start = np.concatenate(([0], np.cumsum(num_queries))).astype(np.int32)
    num_tokens = int(query_start[-1])
    num_blocks = -(-int(seq_lens.max()) // block_size)
    layout = BatchLayout(
        query_start=query_start,
        seq_lens=seq_lens,
        block_tables=np.zeros((len(rows), num_blocks), dtype=np.int32),
        block_size=block_size,
        state_slots=np.zeros(len(rows), dtype=np.int32),
    )
    positions = [np.arange(row.seq_len - row.num_queries, row.seq_len) for row in rows]
    nowhere = torch.full((num_tokens,), -1, dtype=torch.int64, device=device)
    return StepInputs(
        token_ids=torch.zeros((1, num_tokens), dtype=torch.int32, device=device),
        positions=torch.from_numpy(np.concatenate(positions))[None].to(device),
        sample_index=(torch.arange(num_samples, device=device) % num_tokens).int(),
        metadata=AttentionMetadata(layout, nowhere),
    )
