"""A whole engine over a GPU that is not there: the profile run, the graphs, steps launched ahead.

Everything is the real one but the tensors of the device, which are fake, and CUDA's streams, events
and copies, whose double raises where two accesses are not ordered.  All tokens are 0.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from pagedserve import EngineArgs, LLMEngine, SamplingParams
from pagedserve.executor import worker
from pagedserve.executor.local import LocalExecutor
from tests.support.adapter_files import save_adapter
from tests.support.fake_cuda import GPU, FakeGpu
from tests.support.fake_kernels import checked_kernels
from tests.support.fake_model import loaded_model
from tests.support.formula import byte_tokenizer
from tests.support.recording_cuda import RecordingCuda, WatchedBuffers

pytest.importorskip("triton", reason="triton is not installed")

GIB = 1 << 30


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with FakeGpu().running() as gpu, checked_kernels(GPU):
        yield gpu


class DryEngine:
    """An engine and what it was seen to do."""

    def __init__(self, gpu: FakeGpu, **options: Any) -> None:
        self.gpu = gpu
        self.cuda = RecordingCuda(GPU, held=[0, GIB])
        loaded = loaded_model("llama", is_fused=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker, "load_model", lambda *_, **__: loaded)
            patch.setattr(worker, "cuda_of", lambda _device: self.cuda)
            patch.setattr(worker, "StepBuffers", WatchedBuffers)
            options = {"block_size": 16, "swap_space": 0} | options
            args = EngineArgs(model="made up", **options)
            executor = LocalExecutor(args)
            self.engine = LLMEngine(args, executor=executor, tokenizer=byte_tokenizer())
        self.model = loaded.model
        self.startup = self.cuda.log.copy()
        self.cuda.log.clear()
        self.gpu.waits.clear()

    def add(self, count: int, **params: Any) -> None:
        for number in range(count):
            sampling = SamplingParams(max_tokens=12, ignore_eos=True, **params)
            self.engine.add_request(str(number), [5, 6, 7, 8 + number], sampling)

    def run(self) -> dict[str, list[int]]:
        """The tokens of every request that ended well."""
        tokens: dict[str, list[int]] = {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    tokens[output.request_id] = list(output.outputs[0].token_ids)
        return tokens

    def count(self, entry: str) -> int:
        return sum(line.startswith(entry) for line in self.cuda.log)


def test_the_profile_run_comes_first_and_the_graphs_last(gpu: FakeGpu) -> None:
    dry = DryEngine(gpu, max_num_seqs=8)
    notes = [note for note in dry.startup if "stream" not in note and "event" not in note]
    profile = ["host waits for device", "release unused", "ask reserved", "start peak"]
    profile += ["host waits for device", "ask peak", "release unused"]
    while notes[0] == "ask memory":
        notes.pop(0)
    assert notes[:14] == profile * 2
    graphs = notes[notes.index("graph pool") :]
    assert graphs[1::2] == [f"begin graph {n} in pool" for n in (1, 2, 3, 4)]
    assert graphs[2::2] == [f"end graph {n}" for n in (1, 2, 3, 4)]
    available = dry.engine.memory.available
    assert available is not None
    assert available.activation_bytes == GIB
    memory = dry.engine.memory
    assert memory.num_gpu_blocks == available.num_bytes // memory.block_bytes > 1000


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 0.8, "seed": 1, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    ],
)
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_steps_run_ahead_and_wait_for_copies_alone(
    gpu: FakeGpu, params: dict[str, Any], enforce_eager: bool
) -> None:
    dry = DryEngine(gpu, max_num_seqs=8, num_gpu_blocks=64, enforce_eager=enforce_eager)
    dry.add(5, **params)
    assert dry.run() == {str(number): [0] * 12 for number in range(5)}
    assert gpu.waits == []
    assert dry.engine.stats.num_async_steps >= 10
    assert dry.count("download") == 12
    assert dry.count("replay") == (0 if enforce_eager else 11)


def test_steps_that_must_wait_still_copy_once(gpu: FakeGpu) -> None:
    dry = DryEngine(gpu, max_num_seqs=8, num_gpu_blocks=64, async_scheduling=False)
    dry.add(3, temperature=0)
    assert dry.run() == {str(number): [0] * 12 for number in range(3)}
    assert gpu.waits == []
    assert dry.count("download") == 12


def test_rows_of_all_kinds_end(gpu: FakeGpu) -> None:
    dry = DryEngine(gpu, max_num_seqs=8, num_gpu_blocks=64)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0.8, "top_p": 0.9, "seed": 1},
        {"temperature": 0.8, "n": 2, "seed": 1},
        {"temperature": 0, "presence_penalty": 0.5, "repetition_penalty": 1.2},
        {"temperature": 0},
    ]
    for number, kind in enumerate(kinds):
        sampling = SamplingParams(max_tokens=12, ignore_eos=True, **kind)
        dry.engine.add_request(str(number), [5, 6, 7], sampling)
    assert set(dry.run()) == {"0", "1", "2", "3", "4"}


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_step_that_fails_is_run_again(gpu: FakeGpu, enforce_eager: bool) -> None:
    dry = DryEngine(gpu, max_num_seqs=8, num_gpu_blocks=64, enforce_eager=enforce_eager)
    dry.add(3, temperature=0)
    failing = iter([False, True, False, True])

    def fail(*_: Any) -> None:
        if next(failing, False):
            raise RuntimeError("the device is lost")

    copy = dry.cuda.copy

    def copy_or_fail(source: Tensor, destination: Tensor) -> None:
        copy(source, destination)
        fail()

    dry.cuda.copy = copy_or_fail  # type: ignore[method-assign]
    tokens: dict[str, list[int]] = {}
    num_failures = 0
    while dry.engine.has_unfinished_requests():
        try:
            tokens |= dry.run()
        except RuntimeError:
            num_failures += 1
    assert num_failures == 2
    assert tokens == {str(number): [0] * 12 for number in range(3)}
    assert gpu.waits == []


def test_an_abort_waits_for_the_step_under_way(gpu: FakeGpu) -> None:
    dry = DryEngine(gpu, max_num_seqs=8, num_gpu_blocks=64)
    dry.add(3, temperature=0)
    for _ in range(4):
        dry.engine.step()
    dry.engine.abort_request("1")
    assert dry.run().keys() >= {"0", "2"}
    assert gpu.waits == []


# The pools' addresses are kept for a kernel, which is not run.
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
def test_preempted_requests_are_swapped_beside_the_steps(gpu: FakeGpu) -> None:
    dry = DryEngine(gpu, max_num_seqs=8, num_gpu_blocks=4, swap_space=1, preemption_mode="swap")
    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for number in range(3):
        dry.engine.add_request(str(number), [5, 6, 7], sampling)
    assert dry.run() == {str(number): [0] * 40 for number in range(3)}
    assert dry.engine.stats.num_swapped_blocks > 0
    assert dry.count("download on stream 1") > 0
    assert gpu.waits == []


def test_steps_with_adapters_have_graphs_of_their_own(gpu: FakeGpu, tmp_path: Path) -> None:
    inside = {"self_attn.q_proj": (128, 128), "self_attn.v_proj": (128, 64)}
    inside |= {"mlp.gate_proj": (128, 96), "mlp.up_proj": (128, 96), "mlp.down_proj": (96, 128)}
    layers = {f"model.layers.{n}.{name}": inside[name] for n in range(2) for name in inside}
    adapter = save_adapter(tmp_path / "a", layers, rank=4, number=1)
    dry = DryEngine(gpu, max_num_seqs=4, enable_lora=True, max_loras=2)
    begun = [note for note in dry.startup if note.startswith("begin graph")]
    assert len(begun) == 2 * 3
    # Copies of its own bring an adapter to its slot, once.
    dry.engine.add_request("loads", [5, 6, 7], SamplingParams(max_tokens=1), lora_request=adapter)
    dry.run()
    moves: list[list[int]] = []
    for name, wanted in (("plain", None), ("adapted", adapter)):
        dry.cuda.log.clear()
        gpu.waits.clear()
        sampling = SamplingParams(max_tokens=12, ignore_eos=True)
        dry.engine.add_request(name, [5, 6, 7], sampling, lora_request=wanted)
        assert dry.run() == {name: [0] * 12}
        # One row: the last graphs of all, first the one with adapters.
        number = 5 if wanted is not None else 6
        replays = [note for note in dry.cuda.log if note.startswith("replay")]
        assert set(replays) == {f"replay graph {number}"}
        moves.append([dry.count("upload"), dry.count("download"), dry.count("host waits")])
        assert gpu.waits == []
    assert moves[0] == moves[1], "who has which adapter goes with the step"
