"""The runner over the real core and the real model, from pools full of NaN."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pagedserve import _core
from pagedserve.errors import StepError
from pagedserve.executor.local import LocalExecutor
from pagedserve.executor.protocol import ModelOutput, StepInput, StepLimits
from pagedserve.sampling.rows import RowSampling

MakeScheduler = Callable[..., _core.Scheduler]
Run = Callable[[_core.Scheduler, list[list[int]], int], list[list[int]]]
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = np.random.default_rng(7)
    return [generator.integers(100, 40_000, size).tolist() for size in (1, 3, 9, 16, 33)]


@pytest.fixture(scope="module")
def expected(peer: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of transformers, one prompt at a time, with its own attention."""
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        texts.append(output[0, len(prompt) :].tolist())
    return texts


def test_greedy_tokens_equal_those_of_transformers(
    make_scheduler: MakeScheduler, run: Run, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    scheduler = make_scheduler(200)
    assert run(scheduler, prompts, NUM_TOKENS) == expected
    assert scheduler.num_free_gpu_blocks == 200


def test_so_they_do_when_sequences_are_preempted(
    make_scheduler: MakeScheduler, run: Run, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    scheduler = make_scheduler(12)
    assert run(scheduler, prompts, NUM_TOKENS) == expected
    assert scheduler.num_preemptions > 0


def test_only_sampled_rows_pass_the_head(
    executor: LocalExecutor, make_scheduler: MakeScheduler
) -> None:
    scheduler = make_scheduler(50)
    for size in (5, 9):
        scheduler.add_seq_group(np.arange(size, dtype=np.int32), arrival_time=0.0)
    outputs = scheduler.schedule(0.0)
    scheduler.prepare_inputs(executor.buffers.writable())
    logits = executor.worker.runner.execute(outputs)
    assert outputs.num_batched_tokens == 14
    assert logits.shape == (2, executor.worker.loaded.vocab_size)
    assert logits.dtype == torch.float32
    assert not logits.isnan().any()


def test_a_failed_forward_leaves_the_runner_usable(
    executor: LocalExecutor,
    make_scheduler: MakeScheduler,
    run: Run,
    prompts: list[list[int]],
    expected: list[list[int]],
) -> None:
    scheduler = make_scheduler(100)
    scheduler.add_seq_group(np.arange(5, dtype=np.int32), arrival_time=0.0)
    outputs = scheduler.schedule(0.0)
    scheduler.prepare_inputs(executor.buffers.writable())
    layer = executor.worker.loaded.model.get_submodule("model.layers.3")

    def fail(*_: object) -> None:
        raise RuntimeError("broken layer")

    hook = layer.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="broken layer"):
        executor.launch(StepInput.of(outputs, [RowSampling(temperature=0.0)]))
    hook.remove()
    scheduler.abandon(outputs.step_id)
    with pytest.raises(StepError, match="outside"):
        executor.worker.loaded.model(input_ids=torch.tensor([[1]]), use_cache=False)
    fresh = make_scheduler(100)
    assert run(fresh, prompts[:3], NUM_TOKENS) == expected[:3]


def test_a_wrong_number_of_parameters_is_refused(
    executor: LocalExecutor, make_scheduler: MakeScheduler
) -> None:
    scheduler = make_scheduler(50)
    scheduler.add_seq_group(np.arange(5, dtype=np.int32), arrival_time=0.0)
    outputs = scheduler.schedule(0.0)
    scheduler.prepare_inputs(executor.buffers.writable())
    with pytest.raises(StepError, match="2 sampling parameters for 1 samples"):
        executor.launch(StepInput.of(outputs, [RowSampling(), RowSampling()]))


def test_a_step_after_one_of_another_executor_is_refused(
    executor: LocalExecutor, make_scheduler: MakeScheduler
) -> None:
    class Handle:
        is_async_safe = True

        def results(self) -> ModelOutput:
            raise NotImplementedError

    scheduler = make_scheduler(50)
    scheduler.add_seq_group(np.arange(5, dtype=np.int32), arrival_time=0.0)
    outputs = scheduler.schedule(0.0)
    scheduler.prepare_inputs(executor.buffers.writable())
    with pytest.raises(StepError, match="one that another executor launched"):
        executor.launch(StepInput.of(outputs, [RowSampling()], after=Handle()))


def test_bytes_of_a_block_count_every_layer(executor: LocalExecutor) -> None:
    plan = executor.determine_num_blocks(
        StepLimits(max_num_tokens=64, max_num_rows=4, max_model_len=64)
    )
    assert plan.block_bytes == 30 * 3 * (64 + 64) * 16 * 4
