"""What ranks cost: a step's way to one, their sums, one that waits, and a model that two share.

A step's way is half of the time from ``publish`` to the answer of a rank that does nothing; to
another machine's it is a message over TCP, here through loopback, and an empty answer.  The ratio
of decode steps is that of medians, two ranks with half of the threads over one process.
"""

import argparse
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Client, Listener
from statistics import median, quantiles
from typing import Any

import psutil
import torch
from measuring import report_table

from pagedserve import LLM, SamplingParams
from pagedserve.executor.actors import send_at_once
from pagedserve.executor.channel import RemoteChannel, StepChannel
from pagedserve.executor.model_step import ModelStep
from pagedserve.executor.protocol import CacheShape, StepLimits, StepSizes
from pagedserve.parallel.shared_memory import SharedMemory

MAX_ROWS = 256
BLOCKS_PER_ROW = 128
ROUNDS = 3000
# Of SmolLM2-135M's hidden states.
NUM_FEATURES = 576
LIMITS = StepLimits(max_num_tokens=2048, max_num_rows=MAX_ROWS, max_model_len=2048)
SHAPE = CacheShape(num_gpu_blocks=2048, num_cpu_blocks=64, block_size=16, limits=LIMITS)
BYTES_PER_ROW = 64 + 4 * BLOCKS_PER_ROW
NUM_BYTES = BYTES_PER_ROW * MAX_ROWS


def ways_us(sizes: Sequence[int]) -> list[dict[str, object]]:
    """Microseconds from a step's publication to a rank that sleeps, sizes in turn."""
    memory = os.memfd_create("bench")
    rank = os.fork()
    if rank == 0:
        there = StepChannel(memory, SHAPE, rank=1, num_ranks=2)
        there.allocate(NUM_BYTES)
        for _ in range(ROUNDS * len(sizes)):
            there.take()
            there.done()
        os._exit(0)
    here = StepChannel(memory, SHAPE, rank=0, num_ranks=2, readers=[1])
    arrays = here.allocate(NUM_BYTES).numpy()
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for turn in range(ROUNDS):
        for size, spent in times.items():
            arrays[: size * BYTES_PER_ROW] = turn % 256
            time.sleep(0.0002)  # the rank goes to sleep
            spent.append(one_way_us(here, size))
    os.waitpid(rank, 0)
    os.close(memory)
    return summary(times)


def messages_us(sizes: Sequence[int]) -> list[dict[str, object]]:
    """Microseconds from a step's publication to the answer of a rank that is sent it over TCP."""
    listener = Listener(("127.0.0.1", 0))
    rank = os.fork()
    if rank == 0:
        with Client(listener.address) as connection:
            send_at_once(connection)
            there = RemoteChannel(connection, SHAPE, rank=1, num_ranks=2)
            there.allocate(NUM_BYTES)
            for _ in range(ROUNDS * len(sizes)):
                there.take()
                connection.send_bytes(b"")
        os._exit(0)
    here = StepChannel(os.memfd_create("bench"), SHAPE, rank=0, num_ranks=2)
    here.allocate(NUM_BYTES)
    times: dict[int, list[float]] = {size: [] for size in sizes}
    with listener, listener.accept() as connection:
        send_at_once(connection)
        for _ in range(ROUNDS):
            for size, spent in times.items():
                time.sleep(0.0002)  # the rank goes to sleep
                started = time.perf_counter()
                here.publish(step_of(size))
                connection.send_bytes(here.message([slice(0, size * BYTES_PER_ROW)]))
                connection.recv_bytes()
                spent.append(1e6 * (time.perf_counter() - started))
    os.waitpid(rank, 0)
    return summary(times)


def sums_us(sizes: Sequence[int]) -> list[dict[str, object]]:
    """Microseconds of a sum over two ranks of one machine, which come at the same time."""
    memory = os.memfd_create("bench")
    rank = os.fork()
    shared = SharedMemory(memory, int(rank == 0), 2, lambda: None)
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(ROUNDS):
        for size, spent in times.items():
            values = torch.ones(size, NUM_FEATURES)
            started = time.perf_counter()
            shared.all_reduce(values)
            spent.append(1e6 * (time.perf_counter() - started))
    if rank == 0:
        os._exit(0)
    os.waitpid(rank, 0)
    os.close(memory)
    return summary(times)


def summary(times: dict[int, list[float]]) -> list[dict[str, object]]:
    """A row for each number of rows."""
    return [
        {
            "rows": size,
            "best us": min(spent),
            "median us": median(spent),
            "p99 us": quantiles(spent, n=100)[-1],
        }
        for size, spent in times.items()
    ]


def step_of(num_rows: int) -> ModelStep:
    """A step of decodes, as far as ranks are told of it."""
    sizes = StepSizes(
        num_rows=num_rows,
        num_batched_tokens=num_rows,
        num_samples=num_rows,
        max_num_blocks=BLOCKS_PER_ROW,
    )
    return ModelStep(sizes=sizes)


def one_way_us(channel: StepChannel, num_rows: int) -> float:
    """Half of the time to publish a step and hear that a rank is done with it."""
    step = step_of(num_rows)
    started = time.perf_counter()
    channel.publish(step)
    channel.wait_until_read()
    return 1e6 * (time.perf_counter() - started) / 2


def decode_ms(llm: LLM, num_rows: int) -> float:
    """The median of a decode step, in milliseconds."""
    engine, seconds = llm.llm_engine, []
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    for row in range(num_rows):
        engine.add_request(str(row), "A story about the sea:", params)
    while engine.has_unfinished_requests():
        started = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - started)
    return 1e3 * median(seconds[3:])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="also decode with it, on one rank and on more")
    parser.add_argument("--size", type=int, default=2, help="ranks")
    parser.add_argument("--json", action="store_true", help="a JSON object a line")
    options = parser.parse_args(arguments)
    report_table("way of a step", ways_us((1, 256)), as_json=options.json)
    report_table("message and answer over TCP", messages_us((1, 256)), as_json=options.json)
    report_table("sum of float32 rows", sums_us((1, 8, 64, 256)), as_json=options.json)
    if options.model is None:
        return
    given: dict[str, Any] = {"max_model_len": 512, "use_tqdm_on_load": False}
    alone = LLM(options.model, **given)
    ones = {rows: decode_ms(alone, rows) for rows in (1, 8, 64)}
    shared = LLM(options.model, tensor_parallel_size=options.size, **given)
    [rank, *_] = psutil.Process().children()
    several = {rows: decode_ms(shared, rows) for rows in ones}
    time.sleep(1)
    busy = sum(rank.cpu_times()[:2])
    time.sleep(10)
    idle = (sum(rank.cpu_times()[:2]) - busy) / 10
    shared.llm_engine.shutdown()
    rows = [
        {"rows": rows, "1 rank ms": ones[rows], f"{options.size} ranks ms": several[rows]}
        for rows in ones
    ]
    report_table("decode step", rows, as_json=options.json)
    print(f"an idle rank takes {idle:.2%} of a core")


if __name__ == "__main__":
    main()
