"""Ranks that die, hang or are left alone: who it was is said, nothing is lost, nothing stays."""

import copy
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from pagedserve import LLM, EngineArgs, EngineOptions, SamplingParams, TokensPrompt
from pagedserve.errors import ConfigError, ExecutorDeadError, UnsupportedModelError
from pagedserve.executor.channel import PoolMoves
from pagedserve.executor.model_step import ModelStep
from pagedserve.executor.protocol import StepSizes
from pagedserve.executor.ranks import RankedExecutor
from pagedserve.executor.subprocesses import LocalBackend, LocalProcess
from pagedserve.models.split import check_split
from pagedserve.parallel.group import RankGroup
from tests.server.conftest import Process
from tests.support.children import child_says
from tests.support.families import save_family

PROMPTS = [TokensPrompt(prompt_token_ids=[number, 2 * number]) for number in range(3, 9)]
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)  # to be interrupted
SHORT = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def ranks_of(pid: int) -> list[psutil.Process]:
    """The ranks that a process has started and that still run."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if "pagedserve.executor.rank" in child.cmdline():
                found.append(child)
    return found


def wait_until(is_true: Callable[[], bool]) -> None:
    """Wait, as long as a test may take."""
    while not is_true():
        time.sleep(0.005)


@dataclass
class Engine:
    """An engine of two ranks, and what it says when nothing is wrong."""

    llm: LLM
    wanted: list[tuple[int, ...]]

    @property
    def executor(self) -> RankedExecutor:
        executor = self.llm.llm_engine.model_executor
        assert isinstance(executor, RankedExecutor)
        return executor

    @property
    def rank(self) -> psutil.Process:
        [rank] = ranks_of(os.getpid())
        return rank

    def tokens(self, params: SamplingParams = SHORT) -> list[tuple[int, ...]]:
        outputs = self.llm.generate(PROMPTS, params, use_tqdm=False)
        return [tuple(output.outputs[0].token_ids) for output in outputs]

    def fails(self) -> ExecutorDeadError:
        """A run that ends with an error, and takes no block with it."""
        with pytest.raises(ExecutorDeadError) as caught:
            self.tokens(LONG)
        engine = self.llm.llm_engine
        assert engine.get_num_unfinished_requests() == 0
        assert engine.scheduler.num_free_gpu_blocks == engine.memory.num_gpu_blocks
        wait_until(lambda: not ranks_of(os.getpid()))  # they are killed once the error is known
        return caught.value

    def raise_in_rank(self) -> None:
        """Let the rank copy a block that does not exist."""
        nothing = np.zeros((0, 2), np.int64)
        moves = PoolMoves(nothing, nothing, copy=np.array([[0, 10**6]]))
        channel = self.executor._channel
        assert channel is not None
        channel.publish(ModelStep(sizes=StepSizes(0, 0, 0, 0), moves=[moves]))

    def is_known_to_be_dead(self) -> None:
        """Returns once a check says so."""

        def is_noticed() -> bool:
            try:
                self.executor.check()
            except ExecutorDeadError:
                return True
            return False

        wait_until(is_noticed)

    def works_again(self) -> None:
        self.llm.llm_engine.restart()
        assert self.tokens() == self.wanted


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("model"), "llama")


# First, as long as this process is in no other group.
def test_a_rank_that_dies_before_it_is_ready_ends_the_start(directory: Path) -> None:
    rank: list[psutil.Process] = []

    def kill() -> None:
        wait_until(lambda: bool(ranks_of(os.getpid())))
        rank.extend(ranks_of(os.getpid()))
        rank[0].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(ExecutorDeadError, match=r"rank 1 of 2 .*SIGKILL"):
        LLM(str(directory), tensor_parallel_size=2, use_tqdm_on_load=False)
    killer.join()
    assert ranks_of(os.getpid()) == []


def test_a_rank_that_dies_before_it_is_configured_ends_the_start(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = LocalBackend.start

    def start_and_kill(self: LocalBackend, memory: int) -> list[LocalProcess]:
        processes = start(self, memory)
        processes[0].kill()
        return processes

    monkeypatch.setattr(LocalBackend, "start", start_and_kill)
    with pytest.raises(ExecutorDeadError, match=r"rank 1 of 2 .*SIGKILL"):
        LLM(str(directory), tensor_parallel_size=2, use_tqdm_on_load=False)
    assert ranks_of(os.getpid()) == []


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[Engine]:
    options: EngineOptions = {
        "tensor_parallel_size": 2,
        "num_gpu_blocks": 128,
        "use_tqdm_on_load": False,
    }
    engine = Engine(LLM(str(directory), **options), [])
    engine.wanted = engine.tokens()
    yield engine
    if hasattr(engine, "llm"):  # the last test lets go of it
        engine.llm.llm_engine.shutdown()


@pytest.mark.parametrize("delay", [0.0, pytest.param(0.05, marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_in_a_step_is_named(engine: Engine, delay: float) -> None:
    def kill() -> None:
        wait_until(lambda: engine.llm.llm_engine.stats.num_generation_tokens > before)
        time.sleep(delay)
        rank.kill()

    rank, before = engine.rank, engine.llm.llm_engine.stats.num_generation_tokens
    killer = threading.Thread(target=kill)
    killer.start()
    error = engine.fails()
    killer.join()
    assert error.rank == 1
    assert "rank 1 of 2" in str(error)
    assert "SIGKILL" in str(error)
    again = copy.copy(error)  # as it goes to another process
    assert (str(again), again.rank, again.step) == (str(error), 1, error.step)
    engine.works_again()


# The last test of this engine notices every day, and it is restarted after other ends.
@pytest.mark.slow
def test_an_engine_whose_rank_died_while_nothing_ran_works_again(engine: Engine) -> None:
    engine.executor.check()
    engine.rank.kill()
    engine.is_known_to_be_dead()
    assert engine.fails().rank == 1
    engine.works_again()


@pytest.mark.slow
def test_an_engine_whose_rank_raised_works_again(engine: Engine) -> None:
    engine.raise_in_rank()
    wait_until(lambda: not ranks_of(os.getpid()))
    assert "StepError" in str(engine.fails())
    engine.works_again()


@pytest.mark.slow
def test_a_rank_that_is_stopped_holds_nobody_up_for_ever(engine: Engine) -> None:
    engine.rank.suspend()
    error = engine.fails()
    assert error.rank == 1
    assert "stopped" in str(error)
    engine.works_again()


def test_ctrl_c_waits_for_the_ranks(engine: Engine) -> None:
    def interrupt() -> None:
        wait_until(lambda: stats.num_generation_tokens > before)
        os.kill(os.getpid(), signal.SIGINT)

    stats = engine.llm.llm_engine.stats
    for _ in range(3):
        before = stats.num_generation_tokens
        timer = threading.Thread(target=interrupt)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            engine.llm.generate(PROMPTS * 4, LONG, use_tqdm=False)
        timer.join()
        scheduler = engine.llm.llm_engine.scheduler
        assert scheduler.num_free_gpu_blocks == engine.llm.llm_engine.memory.num_gpu_blocks
        assert engine.tokens() == engine.wanted


def test_a_second_group_of_ranks_is_refused(engine: Engine, directory: Path) -> None:
    with pytest.raises(ConfigError, match="group of ranks already"):
        LLM(str(directory), tensor_parallel_size=2, use_tqdm_on_load=False)
    assert len(ranks_of(os.getpid())) == 1
    assert engine.tokens() == engine.wanted


@pytest.mark.slow
def test_another_engine_can_be_made_when_a_rank_has_died(engine: Engine, directory: Path) -> None:
    engine.rank.kill()
    engine.fails()
    executor = engine.executor  # still referred to, and not shut down
    options: EngineOptions = {
        "tensor_parallel_size": 2,
        "num_gpu_blocks": 128,
        "use_tqdm_on_load": False,
    }
    with LLM(str(directory), **options) as other:
        assert Engine(other, []).tokens() == engine.wanted
        with pytest.raises(ConfigError, match="group of ranks already"):
            engine.llm.llm_engine.restart()
        assert Engine(other, []).tokens() == engine.wanted
    assert ranks_of(os.getpid()) == []
    engine.works_again()
    assert engine.executor is executor


def test_a_forked_child_leaves_the_ranks_alone(engine: Engine) -> None:
    def use() -> None:
        engine.executor._end()
        engine.executor._ranks.end()
        engine.executor.check()

    assert child_says(use).startswith("ExecutorDeadError: the ranks are the parent's")
    assert child_says(engine.tokens).startswith("EngineDeadError: the engine belongs to process")
    assert engine.tokens() == engine.wanted


# The last of this engine.
def test_an_idle_engine_whose_rank_raised_quotes_it_and_is_collected(engine: Engine) -> None:
    engine.executor.check()
    engine.raise_in_rank()
    engine.is_known_to_be_dead()
    error = engine.fails()
    assert error.rank == 1
    assert "StepError" in str(error)
    del error
    executor = weakref.ref(engine.executor)
    del engine.llm
    gc.collect()
    assert executor() is None
    assert not RankGroup.is_joined()


def test_heads_that_ranks_cannot_share_are_refused(directory: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="12 attention heads"):
        LLM(str(directory), tensor_parallel_size=5, use_tqdm_on_load=False)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("t5", "T5ForConditionalGeneration cannot be: transformers has no plan"),
        ("bert", "BertModel cannot be: transformers has no plan"),
        ("lfm2", "Lfm2ForCausalLM cannot be: transformers' plan splits 0%"),
    ],
)
def test_models_that_ranks_cannot_share_are_refused(
    tmp_path: Path, kind: str, message: str
) -> None:
    classes = {"t5": AutoModelForSeq2SeqLM, "bert": AutoModel}
    config = AutoConfig.for_model(kind, num_hidden_layers=2, hidden_size=48, vocab_size=97)
    model: Any = classes.get(kind, AutoModelForCausalLM).from_config(config)
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=message):
        check_split(EngineArgs(str(tmp_path), tensor_parallel_size=2))


SCRIPT = """
import os, sys, time
from pagedserve import LLM, SamplingParams
llm = LLM(sys.argv[1], tensor_parallel_size=3, num_gpu_blocks=64, use_tqdm_on_load=False)
print("ready", flush=True)
params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
while sys.argv[2] == "busy":
    llm.generate([" w3 w4"] * 4, params, use_tqdm=False)
if sys.argv[2] == "idle":
    time.sleep(60)
if sys.argv[2] == "forked":  # a child that outlives its parent, and one that ends as programs do
    llm.generate(" w3", params, use_tqdm=False)
    if os.fork() == 0:
        time.sleep(60)
    if (child := os.fork()) == 0:
        sys.exit(3)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    llm.generate(" w3", params, use_tqdm=False)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(
    ("state", "end"),
    [
        ("busy", "kill"),
        pytest.param("idle", "kill", marks=pytest.mark.slow),
        pytest.param("idle", "terminate", marks=pytest.mark.slow),
        pytest.param("done", "", marks=pytest.mark.slow),
    ],
)
def test_ranks_end_with_their_engine(directory: Path, state: str, end: str) -> None:
    command = [sys.executable, "-c", SCRIPT, str(directory), state]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "ready\n"
        ranks = ranks_of(driver.pid)
        if end:
            assert len(ranks) == 2
            time.sleep(0.2)
            getattr(driver, end)()
        driver.wait()
    wait_until(lambda: not any(rank.is_running() for rank in ranks))


@pytest.mark.slow
def test_forked_children_keep_no_rank_alive_and_end(directory: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(directory), "forked"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "ready\n"
        family = psutil.Process(driver.pid).children()
        assert driver.stdout.readline() == "3\n"
        [outliving] = [
            child for child in psutil.Process(driver.pid).children() if child not in family
        ]
        driver.wait()
        wait_until(lambda: not any(rank.is_running() for rank in family))
        outliving.kill()


# tests/server/test_ranks.py has a server whose rank dies every day.
@pytest.mark.slow
@pytest.mark.parametrize("is_busy", [True, False])
def test_a_server_ends_when_a_rank_dies(directory: Path, tmp_path: Path, is_busy: bool) -> None:
    options = ["--tensor-parallel-size", "2", "--num-gpu-blocks", "128"]
    server = Process(tmp_path / "log", str(directory), *options)
    server.wait_until_healthy()
    [rank] = ranks_of(server.process.pid)
    if is_busy:
        body = {"prompt": [3, 6], "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            rank.kill()
            said = [line for line in lines if "error" in line]
        assert len(said) == 1, said
    else:
        rank.kill()
    assert server.process.wait() == 1
    assert "rank 1 of 2 died" in server.log
    assert "SIGKILL" in server.log
