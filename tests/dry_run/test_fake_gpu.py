"""Whole steps on tensors of a GPU that is not there: devices, shapes, launches, and no waits.

The model, the pools and the logits are fake CUDA tensors, which have no values; a host tensor among
them raises, as it would on a GPU.  Scheduler, buffers and sampler are the real ones.  What only the
values of a GPU can show is left to tests/engine/test_gpu.py.
"""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pagedserve import _core
from pagedserve.cache.engine import CacheEngine
from pagedserve.executor.profile import largest_decode, largest_prefill
from pagedserve.executor.protocol import StepLimits
from pagedserve.models.loader import LoadedModel
from pagedserve.runner.buffers import StepBuffers
from pagedserve.runner.graphs import DecodeGraphs
from pagedserve.runner.model_runner import Forward, ModelRunner
from pagedserve.runner.padded import ladder
from pagedserve.runner.profile import peak_bytes, run_trial
from pagedserve.sampling.on_gpu import GpuOps
from pagedserve.sampling.rows import LogitsEdits, PromptTargets, RowSampling
from pagedserve.sampling.sampler import Sampler, prompt_logprobs
from tests.support.fake_cuda import GPU, FakeGpu
from tests.support.fake_kernels import checked_kernels
from tests.support.fake_model import MAX_LEN, VOCAB_SIZE, loaded_model
from tests.support.masks import state_of
from tests.support.recording_cuda import RecordingCuda

pytest.importorskip("triton", reason="triton is not installed")

MAX_ROWS = 40
BLOCK_SIZE = 16
GREEDY = RowSampling(temperature=0.0)


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with FakeGpu().running() as gpu:
        yield gpu


@pytest.fixture
def launches() -> Iterator[list[str]]:
    with checked_kernels(GPU) as launches:
        yield launches


class Engine:
    """What a worker holds, over a GPU that is not there, and a scheduler before it."""

    def __init__(self, loaded: LoadedModel, *, has_graphs: bool = True) -> None:
        self.cuda = RecordingCuda(GPU)
        self.cache = CacheEngine(
            loaded.layers,
            num_gpu_blocks=256,
            num_cpu_blocks=0,
            block_size=BLOCK_SIZE,
            dtype=loaded.dtype,
            device=GPU,
            cuda=self.cuda,
        )
        self.buffers = StepBuffers(
            max_num_tokens=512,
            max_num_rows=MAX_ROWS,
            max_blocks_per_row=MAX_LEN // BLOCK_SIZE,
            cuda=self.cuda,
        )
        forward = Forward(loaded, self.cache)
        self.graphs = None
        if has_graphs:
            self.graphs = DecodeGraphs(
                forward, self.buffers, sizes=ladder(MAX_ROWS), block_size=BLOCK_SIZE
            )
            self.graphs.capture(loaded.vocab_size, self.cuda)
        self.runner = ModelRunner(forward, self.buffers, BLOCK_SIZE, self.graphs)
        self.sampler = Sampler(GpuOps(self.cuda))
        self.scheduler = _core.Scheduler(
            _core.SchedulerConfig(
                max_model_len=MAX_LEN, max_num_seqs=MAX_ROWS, max_num_batched_tokens=512
            ),
            _core.CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=256),
        )

    def add(self, num_prompts: int) -> None:
        for number in range(num_prompts):
            ids = np.arange(1, 4 + number % 3, dtype=np.int32)
            self.scheduler.add_seq_group(ids, arrival_time=float(number))

    def launch(
        self, row: RowSampling, previous_tokens: Tensor | None = None, more: Tensor | None = None
    ) -> tuple[_core.SchedulerOutputs, Tensor, Any]:
        """Decide a step and launch it: its decisions, logits and samples."""
        outputs = self.scheduler.schedule(0.0)
        self.scheduler.prepare_inputs(self.buffers.writable())
        logits = self.runner.execute(outputs, more, previous_tokens)
        rows = [row] * outputs.num_samples
        return outputs, logits, self.sampler.launch(logits[: len(rows)], rows)

    def finish(self, outputs: _core.SchedulerOutputs, samples: Any) -> None:
        """Wait for a step, and tell the scheduler."""
        tokens = samples.results().tokens
        count = outputs.num_samples
        self.scheduler.update(
            outputs.step_id,
            self.buffers.sample_rows[:count].copy(),
            np.arange(count + 1, dtype=np.int32),
            tokens,
            np.zeros(count, dtype=np.uint8),
        )


LAYER = ["_rotate_and_write_kernel", "_decode_kernel", "_add_norm_kernel", "_swiglu_kernel"]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("is_fused", [False, True])
def test_no_step_waits_for_the_device(
    gpu: FakeGpu, launches: list[str], family: str, is_fused: bool
) -> None:
    engine = Engine(loaded_model(family, is_fused=is_fused), has_graphs=False)
    engine.add(5)
    gpu.waits.clear()
    for step in range(3):
        launches.clear()
        engine.cuda.log.clear()
        outputs, logits, samples = engine.launch(GREEDY)
        assert outputs.num_rows == 5
        assert (outputs.num_batched_tokens == 5) == (step > 0)
        assert (logits.shape, logits.dtype, logits.device) == ((5, VOCAB_SIZE), torch.float32, GPU)
        assert gpu.waits == []
        engine.finish(outputs, samples)
        assert gpu.waits == []
        # One copy there, one back, and a wait for each.
        assert engine.cuda.log == [
            "host waits for event 1",
            "upload on stream 0",
            "record event 1",
            "download on stream 0",
            f"record event {step + 2}",
            f"host waits for event {step + 2}",
        ]
        if is_fused and step:
            assert launches == LAYER * 2


@pytest.mark.parametrize("is_fused", [False, True])
def test_steps_of_every_graph_size(gpu: FakeGpu, launches: list[str], is_fused: bool) -> None:
    loaded = loaded_model("llama", is_fused=is_fused)
    shapes: list[torch.Size] = []
    head = loaded.model.get_output_embeddings()
    head.register_forward_hook(lambda _module, _given, out: shapes.append(out.shape))
    gpu.waits.clear()
    engine = Engine(loaded)
    sizes = ladder(MAX_ROWS)
    # Each twice: once to compile what it launches, once recorded; the largest first.
    assert shapes == [(1, size, VOCAB_SIZE) for size in reversed(sizes) for _ in range(2)]
    assert engine.cuda.log.count("graph pool") == 1
    begun = [entry for entry in engine.cuda.log if entry.startswith("begin")]
    assert begun == [f"begin graph {n + 1} in pool" for n in range(len(sizes))]
    assert gpu.waits == [], "what waits cannot be recorded"
    names = set(LAYER) if is_fused else {"_write_kernel", "_decode_kernel"}
    assert set(launches) == names
    engine.add(MAX_ROWS)
    engine.finish(*engine.launch(GREEDY)[::2])
    launches.clear()
    for number, size in enumerate(reversed(sizes)):
        engine.cuda.log.clear()
        step = Sizes(size)
        engine.buffers.writable()
        logits = engine.runner.execute(step)
        assert logits.shape == (size, VOCAB_SIZE)
        replays = [entry for entry in engine.cuda.log if entry.startswith("replay")]
        assert replays == [f"replay graph {number + 1}"]
    assert launches == [], "a replayed step launches nothing by itself"
    assert gpu.waits == []


class Sizes:
    """A decode step of so many rows."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = self.num_batched_tokens = self.num_samples = num_rows
        self.max_num_blocks = 2


@pytest.mark.parametrize(
    ("row", "has_graphs"),  # logits come from a graph or not; how rows are drawn is the same
    [
        (GREEDY, False),
        (GREEDY, True),
        (RowSampling(temperature=0.7, uniforms=(0.5,)), False),
        (RowSampling(temperature=0.7, min_p=0.1, uniforms=(0.5,)), False),
        (RowSampling(temperature=0.7, top_k=5, uniforms=(0.5,)), False),
        (RowSampling(temperature=0.7, top_k=50, top_p=0.9, uniforms=(0.5,)), True),
    ],
)
def test_a_step_is_launched_behind_one_whose_tokens_nobody_knows(
    gpu: FakeGpu, launches: list[str], row: RowSampling, has_graphs: bool
) -> None:
    engine = Engine(loaded_model("llama", is_fused=True), has_graphs=has_graphs)
    engine.add(5)
    engine.finish(*engine.launch(row)[::2])
    gpu.waits.clear()
    first, _, samples = engine.launch(row)
    for _ in range(3):
        assert samples.is_async_safe
        tokens = samples.tokens()
        assert (tokens.shape, tokens.dtype, tokens.device) == ((5,), torch.int32, GPU)
        assert engine.scheduler.update_async(first.step_id)
        engine.cuda.log.clear()
        second, _, following = engine.launch(row, tokens)
        # The host waits for the copy of the step before alone, not for what came of it.
        waits = [entry for entry in engine.cuda.log if entry.startswith("host waits")]
        assert waits == ["host waits for event 1"]
        assert (engine.buffers._token_ids[:5] == [-1, -2, -3, -4, -5]).all()
        engine.scheduler.resolve_tokens(first.step_id, samples.results().tokens)
        first, samples = second, following
    assert gpu.waits == []
    engine.scheduler.abandon(first.step_id)


def test_a_top_p_alone_waits_once(gpu: FakeGpu) -> None:
    logits = torch.zeros(6, VOCAB_SIZE, device=GPU)
    rows = [RowSampling(temperature=1.0, top_p=0.9, uniforms=(0.5,)), GREEDY] * 3
    samples = Sampler(GpuOps(RecordingCuda(GPU))).launch(logits, rows)
    assert gpu.waits == ["aten.index.Tensor"]
    assert samples.results().tokens.shape == (6,)


def test_rows_that_draw_differently_wait_for_nothing(gpu: FakeGpu) -> None:
    logits = torch.zeros(6, VOCAB_SIZE, device=GPU)
    single_draw = RowSampling(temperature=1.0, uniforms=(0.5,))
    rows = [RowSampling(temperature=1.0, uniforms=(0.1, 0.2, 0.3)), single_draw, GREEDY] * 2
    samples = Sampler(GpuOps(RecordingCuda(GPU))).launch(logits, rows)
    assert samples._drawn.shape == (8,)
    assert samples.results().draw_start.tolist() == [0, 3, 4, 5, 8, 9, 10]
    assert gpu.waits == []


def test_grammars_are_kept_to_where_the_logits_are(gpu: FakeGpu, launches: list[str]) -> None:
    logits = torch.zeros(5, 128_256, device=GPU)
    grammar = state_of(range(1, 20_000, 2), 128_256)
    rows = [
        RowSampling(temperature=0.0, grammar=grammar),
        RowSampling(temperature=1.0, grammar=grammar, uniforms=(0.5,)),
        RowSampling(temperature=1.0, grammar=grammar, top_k=3, uniforms=(0.5,)),
        RowSampling(temperature=1.0, uniforms=(0.5,)),
        GREEDY,
    ]
    samples = Sampler(GpuOps(RecordingCuda(GPU))).launch(logits, rows)
    assert gpu.waits == []
    found = samples.results()  # whose tokens nobody knows, so they are refused
    assert launches == ["_masked_argmax_kernel"] * 2  # for greedy and for random rows
    assert found.errors == {}
    assert found.tokens.shape == (5,)


def test_all_else_that_rows_may_want_stays_on_the_device(gpu: FakeGpu) -> None:
    logits = torch.zeros(8, VOCAB_SIZE, device=GPU)
    edits = LogitsEdits(
        prompt_token_ids=[1, 2],
        output_token_ids=[3, 3],
        presence_penalty=0.5,
        frequency_penalty=0.5,
        repetition_penalty=1.3,
        logit_bias=((5, 2.0),),
        allowed_token_ids=(4, 5, 6),
        banned_token_ids=(4,),
        logits_processors=(lambda _ids, row: row * 2,),
        top_n_sigma=1.0,
    )
    rows = [
        RowSampling(temperature=0.0, num_logprobs=3),
        RowSampling(temperature=0.0, edits=edits, num_logprobs=0),
        RowSampling(temperature=1.0, edits=edits, top_k=3, top_p=0.5, uniforms=(0.5,)),
        RowSampling(num_candidates=4),
        RowSampling(num_candidates=4, edits=edits),
        RowSampling(temperature=1.0, uniforms=(0.1, 0.2)),
        RowSampling(temperature=1.0, top_p=0.5, min_p=0.1, uniforms=(0.1, 0.2)),
        GREEDY,
    ]
    samples = Sampler(GpuOps(RecordingCuda(GPU))).launch(logits, rows)
    assert not samples.is_async_safe
    found = samples.results()
    assert found.errors == {}
    assert found.draw_start.tolist() == [0, 1, 2, 3, 3, 3, 5, 7, 8]
    assert found.logprobs is not None
    assert found.logprobs.top_token_ids.shape == (8, 3)
    assert found.candidates is not None
    assert found.candidates.token_ids.shape == (8, 4)


def test_a_host_tensor_on_the_device_is_refused_here(gpu: FakeGpu) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(4, device=GPU) + torch.zeros(4)


def test_more_positions_are_brought_there(gpu: FakeGpu, launches: list[str]) -> None:
    engine = Engine(loaded_model("llama", is_fused=True), has_graphs=False)  # a prefill has none
    engine.add(3)
    gpu.waits.clear()
    outputs, logits, samples = engine.launch(GREEDY, more=torch.tensor([0, 1], dtype=torch.int32))
    assert logits.shape == (outputs.num_samples + 2, VOCAB_SIZE)
    assert gpu.waits == []
    targets = PromptTargets(np.array([0, 1], np.int32), np.array([5, 6], np.int64), num_top=3)
    found = prompt_logprobs(targets, logits[outputs.num_samples :], GpuOps(engine.cuda))
    assert (found.logprobs.shape, found.top_token_ids.shape) == ((2,), (2, 3))
    engine.finish(outputs, samples)


@pytest.mark.parametrize("is_fused", [False, True])
def test_the_profile_run_lets_go_of_all_it_made(
    gpu: FakeGpu, launches: list[str], is_fused: bool
) -> None:
    loaded = loaded_model("llama", is_fused=is_fused)
    cuda = RecordingCuda(GPU, held=[100, 1700])
    made: list[weakref.ref[Tensor]] = []
    gpu.made = made
    limits = StepLimits(max_num_tokens=500, max_num_rows=MAX_ROWS, max_model_len=MAX_LEN)

    def run() -> None:
        cuda.log.append("run")
        for rows in (largest_prefill(limits), largest_decode(limits)):
            run_trial(loaded, rows, num_samples=MAX_ROWS, block_size=BLOCK_SIZE, cuda=cuda)

    assert peak_bytes(cuda, run) == 1600
    steps = [entry for entry in cuda.log if "upload" not in entry and "download" not in entry]
    assert steps[:5] == [
        "host waits for device",
        "release unused",
        "ask reserved",
        "start peak",
        "run",
    ]
    assert steps[-3:] == ["host waits for device", "ask peak", "release unused"]
    gc.collect()
    assert len(made) > 100
    assert [made() for made in made if made() is not None] == []
    assert "_prefill_kernel" in launches
