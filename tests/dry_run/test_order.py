"""What a GPU is asked for, in what order: nothing is read before it is written, or kept too short.

A recording double stands in for CUDA.  It knows which accesses are ordered by streams, events and
waits of the host, and raises where two that are not touch the same bytes; the data is real, so what
was moved is compared too.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedserve.cache.engine import CacheEngine
from pagedserve.cache.layers import LayerShape
from pagedserve.models.adapters import StepAdapters
from pagedserve.runner.buffers import StepInputs
from pagedserve.runner.graphs import DecodeGraphs
from pagedserve.runner.model_runner import ModelRunner
from pagedserve.sampling.on_gpu import GpuOps
from pagedserve.sampling.rows import RowSampling
from pagedserve.sampling.sampler import Sampler
from tests.support.recording_cuda import (
    RaceError,
    RecordedStream,
    RecordingCuda,
    WatchedBuffers,
)

pytest.importorskip("triton", reason="triton is not installed")

from pagedserve.kernels import cache as cache_kernels
from pagedserve.kernels import swap as swap_kernels

HOST = torch.device("cpu")
VOCAB_SIZE = 11
BLOCK_SIZE = 16
LAYERS = (
    LayerShape(num_kv_heads=2, key_size=4, value_size=4),
    LayerShape(num_kv_heads=1, key_size=8, value_size=4),
)


@dataclass
class Sizes:
    """A decode step of so many rows."""

    num_rows: int
    max_num_blocks: int = 2

    @property
    def num_batched_tokens(self) -> int:
        return self.num_rows

    @property
    def num_samples(self) -> int:
        return self.num_rows


class ZeroForward:
    """Stands in for the model."""

    def __init__(self) -> None:
        self.fails = False

    def __call__(
        self, inputs: StepInputs, index: Tensor | None = None, adapters: StepAdapters | None = None
    ) -> Tensor:
        assert adapters is None
        if self.fails:
            raise RuntimeError("the model failed")
        num_rows = inputs.token_ids.shape[1] if index is None else len(index)
        return torch.zeros(num_rows, VOCAB_SIZE)


@pytest.fixture
def cuda() -> RecordingCuda:
    return RecordingCuda(HOST)


@pytest.fixture
def buffers(cuda: RecordingCuda) -> WatchedBuffers:
    return WatchedBuffers(max_num_tokens=16, max_num_rows=8, max_blocks_per_row=4, cuda=cuda)


def test_the_double_answers_every_call_of_cuda() -> None:
    public = {name for name in dir(RecordingCuda.__base__) if not name.startswith("_")}
    assert public <= set(vars(RecordingCuda))


def test_buffers_are_written_only_once_the_device_has_its_copy(buffers: WatchedBuffers) -> None:
    buffers.writable()
    buffers._token_ids[:2] = [5, 6]
    buffers.upload(Sizes(2))
    assert buffers.on_device.token_ids[:2].tolist() == [5, 6]
    with pytest.raises(RaceError, match="'too soon' does not wait for 'upload'"):
        buffers.host_writes("too soon")
    buffers.writable()
    buffers.host_writes("in time")


def test_two_steps_on_their_way_order_their_copies(
    cuda: RecordingCuda, buffers: WatchedBuffers
) -> None:
    runner = ModelRunner(ZeroForward(), buffers, BLOCK_SIZE)  # type: ignore[arg-type]
    sampler = Sampler(GpuOps(cuda))
    row = RowSampling(temperature=1.0, top_k=3, uniforms=(0.5,))

    def launch(previous_tokens: Tensor | None) -> Any:
        buffers.writable()
        buffers._token_ids[:3] = [1, 2, 3] if previous_tokens is None else [-1, -2, -3]
        logits = runner.execute(Sizes(3), previous_tokens=previous_tokens)
        return sampler.launch(logits, [row] * 3)

    steps, arrived = [launch(None)], [cuda.pinned_tensors[-1]]
    for _ in range(3):
        steps.append(launch(steps[0].tokens()))
        arrived.append(cuda.pinned_tensors[-1])
        with pytest.raises(RaceError, match="does not wait for 'download'"):
            cuda.host_access("the host looks too soon", reads=[arrived[0]])
        tokens = steps.pop(0).results().tokens
        cuda.host_access("the host reads the tokens", reads=[arrived.pop(0)])
        assert buffers.on_device.token_ids[:3].tolist() == tokens.tolist()


def test_a_step_that_failed_leaves_buffers_that_can_be_written(
    cuda: RecordingCuda, buffers: WatchedBuffers
) -> None:
    forward = ZeroForward()
    runner = ModelRunner(forward, buffers, BLOCK_SIZE)  # type: ignore[arg-type]
    forward.fails = True
    buffers.writable()
    with pytest.raises(RuntimeError, match="the model failed"):
        runner.execute(Sizes(2))
    forward.fails = False
    buffers.writable()
    assert runner.execute(Sizes(2)).shape == (2, VOCAB_SIZE)
    assert cuda.log == [
        *("host waits for event 1", "upload on stream 0", "record event 1"),
        *("host waits for event 1", "upload on stream 0", "record event 1"),
    ]


def test_a_step_behind_another_may_fail(cuda: RecordingCuda, buffers: WatchedBuffers) -> None:
    forward = ZeroForward()
    runner = ModelRunner(forward, buffers, BLOCK_SIZE)  # type: ignore[arg-type]
    row = RowSampling(temperature=0.0)
    buffers.writable()
    samples = Sampler(GpuOps(cuda)).launch(runner.execute(Sizes(2)), [row] * 2)
    arrived = cuda.pinned_tensors[-1]
    forward.fails = True
    buffers.writable()
    with pytest.raises(RuntimeError, match="the model failed"):
        runner.execute(Sizes(2), previous_tokens=samples.tokens())
    with pytest.raises(RaceError, match="does not wait for 'upload'"):
        buffers.host_writes("what failed is still on its way")
    assert samples.results().tokens.shape == (2,)
    cuda.host_access("the host reads the tokens", reads=[arrived])
    buffers.writable()


def test_graphs_share_a_pool_and_the_largest_is_first(
    cuda: RecordingCuda, buffers: WatchedBuffers
) -> None:
    graphs = DecodeGraphs(
        ZeroForward(),  # type: ignore[arg-type]
        buffers,
        sizes=(1, 2, 4, 8),
        block_size=BLOCK_SIZE,
    )
    graphs.capture(VOCAB_SIZE, cuda)
    wait = ["host waits for event 1", "upload on stream 0", "record event 1"]
    parts = [[*wait, f"begin graph {n} in pool", f"end graph {n}"] for n in (1, 2, 3, 4)]
    assert cuda.log == ["graph pool", *(entry for part in parts for entry in part)]
    for num_rows, number in ((1, 4), (2, 3), (3, 2), (8, 1)):
        cuda.log.clear()
        buffers.writable()
        assert graphs.run(Sizes(num_rows)).shape == (num_rows, VOCAB_SIZE)
        assert cuda.log == [*wait, f"replay graph {number}"]


@dataclass
class Moves:
    """Moves in the one pool."""

    swap_out: NDArray[np.int64]
    swap_in: NDArray[np.int64]
    copy: NDArray[np.int64]


def moves(*, out: Any = (), into: Any = (), copy: Any = ()) -> list[Moves]:
    arrays = [np.array(pairs, dtype=np.int64).reshape(-1, 2) for pairs in (out, into, copy)]
    return [Moves(arrays[0], arrays[1], arrays[2])]


@dataclass
class MovingKernels:
    """The two kernels that move blocks, done by torch at once, their accesses noted."""

    cuda: RecordingCuda
    pools: list[Tensor] = field(default_factory=list)

    def stage(self, staging: Tensor, blocks: Tensor, *_: Any, GATHER: bool, **__: Any) -> None:  # noqa: N803
        places = staging[: len(blocks)]
        touched = [pool[block] for pool in self.pools for block in blocks.tolist()]
        if GATHER:
            self.cuda.access("gather", reads=touched, writes=[places])
        else:
            self.cuda.access("scatter", reads=[places], writes=touched)
        offset = 0
        for pool in self.pools:
            words = pool.flatten(1).view(torch.int64)
            part = places[:, offset : offset + words.shape[1]]
            if GATHER:
                part.copy_(words[blocks])
            else:
                words[blocks] = part
            offset += words.shape[1]

    def copy(self, source: Tensor, destination: Tensor, pairs: Tensor, *_: Any, **__: Any) -> None:
        olds, news = pairs.T.tolist()
        self.cuda.access(
            "copy", reads=[source[old] for old in olds], writes=[destination[new] for new in news]
        )
        destination[news] = source[olds]


class Launcher:
    """A kernel as it is called."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._run


class Tiers:
    """KV pools of both tiers, with marks in their blocks, and what the model does with them."""

    def __init__(self, cuda: RecordingCuda, kernels: MovingKernels) -> None:
        self.cuda = cuda
        self.cache = CacheEngine(
            LAYERS,
            num_gpu_blocks=8,
            num_cpu_blocks=6,
            block_size=BLOCK_SIZE,
            dtype=torch.float32,
            device=HOST,
            cuda=cuda,
        )
        kernels.pools = self.cache.gpu_pools

    def write(self, block: int, mark: float) -> None:
        """A step of the model writes a block of every layer."""
        parts = [pool[block] for pool in self.cache.gpu_pools]
        self.cuda.access(f"the model writes block {block}", writes=parts)
        for part in parts:
            part.fill_(mark)

    def read(self, block: int) -> float:
        """A step of the model attends over a block."""
        parts = [pool[block] for pool in self.cache.gpu_pools]
        self.cuda.access(f"the model reads block {block}", reads=parts)
        [mark] = {number for part in parts for number in part.unique().tolist()}
        return float(mark)


@pytest.fixture
def tiers(cuda: RecordingCuda, monkeypatch: pytest.MonkeyPatch) -> Tiers:
    kernels = MovingKernels(cuda)
    monkeypatch.setattr(swap_kernels, "_stage_kernel", Launcher(kernels.stage))
    monkeypatch.setattr(cache_kernels, "_copy_kernel", Launcher(kernels.copy))
    # Two blocks are staged at a time, so that a swap takes several pieces.
    block_bytes = sum(layer.elements_per_token for layer in LAYERS) * BLOCK_SIZE * 4
    monkeypatch.setattr(swap_kernels, "STAGING_BYTES", 2 * block_bytes)
    return Tiers(cuda, kernels)


def swap_both_ways(tiers: Tiers) -> list[float]:
    """Five blocks leave, others take their place, and those that come back take their turn."""
    for block in range(8):
        tiers.write(block, block)
    tiers.cache.move(moves(out=[(0, 5), (1, 2), (2, 3), (5, 0), (7, 1)]))
    for block in (0, 1, 2, 5, 7):
        tiers.write(block, 100 + block)
    tiers.cache.move(
        moves(out=[(3, 4)], into=[(5, 3), (2, 1), (3, 0)], copy=[(3, 6), (6, 7), (4, 5)])
    )
    return [tiers.read(block) for block in range(8)]


def test_a_block_is_overwritten_only_once_it_has_left(tiers: Tiers) -> None:
    assert swap_both_ways(tiers) == [2, 1, 102, 0, 4, 4, 0, 6]
    tiers.cuda.synchronize()
    host = tiers.cache.cpu_pools[0][:, 0, 0, 0].tolist()
    assert host == [5, 7, 1, 2, 3, 0]


@pytest.mark.parametrize("waiting", [0, 1])
def test_either_stream_must_wait_for_the_other(
    tiers: Tiers, waiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = RecordedStream.wait_stream

    def wait_or_not(stream: RecordedStream, other: RecordedStream) -> None:
        if stream.number != waiting:
            wait(stream, other)

    monkeypatch.setattr(RecordedStream, "wait_stream", wait_or_not)
    with pytest.raises(RaceError):
        swap_both_ways(tiers)


def test_compute_goes_on_beside_the_copies_of_a_swap_out(tiers: Tiers) -> None:
    tiers.write(0, 1.0)
    tiers.cuda.log.clear()
    tiers.cache.move(moves(out=[(0, 0)]))
    assert tiers.cuda.log == [
        "upload on stream 1",
        "stream 1 waits for 0",
        "stream 0 waits for 1",
        "download on stream 1",
    ]
    with pytest.raises(RaceError, match="does not wait for 'download'"):
        tiers.cuda.access("compute reads the host's pool", reads=[tiers.cache.cpu_pools[0]])


def test_random_swaps_keep_what_blocks_hold(tiers: Tiers) -> None:
    generator = np.random.default_rng(0)
    device: dict[int, float] = {}
    host: dict[int, float] = {}
    for step in range(120):
        free = [block for block in range(8) if block not in device]
        for block in free[: generator.integers(0, 3)]:
            device[block] = float(step * 8 + block)
            tiers.write(block, device[block])
        gone = [block for block in sorted(device) if generator.random() < 0.3]
        places = [block for block in range(6) if block not in host]
        out = list(zip(gone, places, strict=False))
        host |= {there: device.pop(here) for here, there in out}
        free = [block for block in range(8) if block not in device]
        back = [block for block in sorted(host) if generator.random() < 0.4]
        into = list(zip(back, free, strict=False))
        device |= {here: host.pop(there) for there, here in into}
        if out or into:
            tiers.cache.move(moves(out=out, into=into))
        assert {block: tiers.read(block) for block in device} == device
