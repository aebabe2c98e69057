"""The real model behind an executor, and the shortest engine loop around it."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pagedserve import _core
from pagedserve.config import EngineArgs
from pagedserve.executor.local import LocalExecutor
from pagedserve.executor.protocol import CacheShape, StepInput, StepLimits
from pagedserve.sampling.rows import RowSampling

BLOCK_SIZE = 4
MAX_MODEL_LEN = 256
Generate = Callable[[list[list[int]], int], list[list[int]]]


@pytest.fixture(scope="session")
def executor(model_package: None) -> LocalExecutor:
    return LocalExecutor(EngineArgs(model="smollm2", dtype="float32", max_model_len=MAX_MODEL_LEN))


@pytest.fixture(scope="session")
def make_scheduler(executor: LocalExecutor) -> Callable[..., _core.Scheduler]:
    """A scheduler over so many blocks, the executor's pools made to fit and poisoned."""

    def make(
        num_gpu_blocks: int,
        *,
        num_cpu_blocks: int = 0,
        enable_prefix_caching: bool = False,
        **options: Any,
    ) -> _core.Scheduler:
        executor.init_cache(
            CacheShape(
                num_gpu_blocks=num_gpu_blocks,
                num_cpu_blocks=num_cpu_blocks,
                block_size=BLOCK_SIZE,
                limits=StepLimits(
                    max_num_tokens=MAX_MODEL_LEN, max_num_rows=16, max_model_len=MAX_MODEL_LEN
                ),
            )
        )
        for pool in executor.worker.cache.gpu_pools:
            pool.fill_(torch.nan)
        limits = {"max_num_seqs": 16, "max_num_batched_tokens": MAX_MODEL_LEN}
        return _core.Scheduler(
            _core.SchedulerConfig(max_model_len=MAX_MODEL_LEN, **(limits | options)),
            _core.CacheConfig(
                block_size=BLOCK_SIZE,
                num_gpu_blocks=num_gpu_blocks,
                num_cpu_blocks=num_cpu_blocks,
                enable_prefix_caching=enable_prefix_caching,
            ),
        )

    return make


@pytest.fixture(scope="session")
def run(
    executor: LocalExecutor,
) -> Callable[[_core.Scheduler, list[list[int]], int], list[list[int]]]:
    """Generates greedily with a scheduler until nothing is left."""

    def generate(
        scheduler: _core.Scheduler, prompts: list[list[int]], num_tokens: int
    ) -> list[list[int]]:
        handles: list[int] = []
        for index, prompt in enumerate(prompts):
            ids = np.array(prompt, dtype=np.int32)
            handles.append(scheduler.add_seq_group(ids, arrival_time=float(index))[1])
        texts: dict[int, list[int]] = {handle: [] for handle in handles}
        while scheduler.has_unfinished:
            outputs = scheduler.schedule(time.monotonic())
            if outputs.is_empty:
                continue
            scheduler.prepare_inputs(executor.buffers.writable())
            rows = [RowSampling(temperature=0.0)] * outputs.num_samples
            tokens = executor.launch(StepInput.of(outputs, rows)).results().sampled.tokens
            parents = executor.buffers.sample_rows[: outputs.num_samples].copy()
            for parent, token in zip(parents.tolist(), tokens.tolist(), strict=True):
                texts[int(executor.buffers.row_handles[parent])].append(token)
            done = [
                len(texts[int(executor.buffers.row_handles[parent])]) == num_tokens
                for parent in parents.tolist()
            ]
            scheduler.update(
                outputs.step_id,
                parents,
                np.arange(len(parents) + 1, dtype=np.int32),
                tokens,
                np.array(done, dtype=np.uint8),
            )
        return [texts[handle] for handle in handles]

    return generate
