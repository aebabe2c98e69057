"""What takes long runs without the GIL; threads that ask for one scheduler wait for each other."""

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pagedserve import CacheConfig, Scheduler, SchedulerConfig
from pagedserve._core import cpu

NUM_SEQS = 2048


@pytest.fixture
def passed() -> Iterator[Callable[[Callable[[], object]], bool]]:
    """Whether another thread ran while a call was under way."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # nobody is interrupted: the others run if the GIL is released
    num_rounds, is_over = 0, threading.Event()

    def count() -> None:
        nonlocal num_rounds
        while not is_over.wait(0.0001):
            num_rounds += 1

    def passes(call: Callable[[], object]) -> bool:
        before = num_rounds
        call()
        return num_rounds > before

    thread = threading.Thread(target=count)
    thread.start()
    yield passes
    is_over.set()
    thread.join()
    sys.setswitchinterval(interval)


def product(num_features: int) -> Callable[[], None]:
    """One row times a square matrix, on the slowest instructions."""
    panels = np.zeros(-(-num_features // 64) * 64 * num_features, np.uint32)
    weights = cpu.PackedWeights(
        panels, dtype="float32", in_features=num_features, out_features=num_features
    )
    x, output = np.zeros(num_features, np.float32), np.zeros(num_features, np.float32)

    def multiply() -> None:
        weights.multiply(
            num_rows=1,
            x=x.ctypes.data,
            x_stride=num_features,
            output=output.ctypes.data,
            output_stride=num_features,
            output_dtype="float32",
            instructions="portable",
        )

    return multiply


def busy(num_seqs: int = NUM_SEQS) -> Scheduler:
    """A scheduler in which so many requests wait."""
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=65536, max_model_len=512),
        CacheConfig(block_size=16, num_gpu_blocks=4 * num_seqs),
    )
    prompt = np.zeros(32, np.int32)
    for _ in range(num_seqs):
        scheduler.add_seq_group(prompt, arrival_time=0.0)
    return scheduler


def sample(scheduler: Scheduler, num_rows: int, step_id: int) -> None:
    """End a step in which every row goes on with one token."""
    scheduler.update(
        step_id,
        np.arange(num_rows, dtype=np.int32),
        np.arange(num_rows + 1, dtype=np.int32),
        np.zeros(num_rows, np.int32),
        np.zeros(num_rows, np.uint8),
    )


def test_others_run_during_a_long_product(passed: Any) -> None:
    assert passed(product(8192))


def test_a_short_product_is_not_worth_a_release(passed: Any) -> None:
    multiply = product(64)
    assert not any(passed(multiply) for _ in range(20))


def test_others_run_while_a_large_state_is_checked(passed: Any) -> None:
    scheduler = busy()

    def check() -> None:
        for _ in range(100):
            scheduler.check()

    assert passed(check)


def test_a_thread_that_looks_waits_for_one_that_computes() -> None:
    scheduler, interval = busy(), sys.getswitchinterval()
    failures: list[BaseException] = []
    seen: set[int] = set()
    is_over = threading.Event()

    def look() -> None:
        try:
            while not is_over.is_set():
                num_groups = scheduler.num_waiting + scheduler.num_running
                seen.add(num_groups)
                len(scheduler.running)
                scheduler.prompt_refusal(1)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=look) for _ in range(2)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for number in range(20):
            step = scheduler.schedule(float(number))
            scheduler.check()
            sample(scheduler, step.num_rows, step.step_id)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert not failures
    assert NUM_SEQS in seen


def test_threads_may_share_a_scheduler() -> None:
    scheduler = busy(1)
    added: list[int] = []

    def add() -> None:
        for _ in range(200):
            group, _ = scheduler.add_seq_group(np.zeros(4, np.int32), arrival_time=0.0)
            added.append(group)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(added)) == 800
    assert scheduler.num_waiting == 801
    scheduler.check()
