"""Ranks that Ray starts, on two real nodes of this machine, and how they end."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pagedserve import LLM, SamplingParams, TokensPrompt
from pagedserve.errors import ConfigError, ExecutorDeadError
from pagedserve.executor.ranks import RankedExecutor
from tests.executor.test_rank_adapters import OPTIONS, check_equal, saved_adapters
from tests.executor.test_rank_adapters import answers as adapted_answers
from tests.executor.test_ranks import ROOMY, TIGHT, answers, tokens_of
from tests.support.families import save_family

ray = pytest.importorskip("ray", reason="ray is not installed")
pytestmark = pytest.mark.ray

PROMPTS = [TokensPrompt(prompt_token_ids=[number, 2 * number]) for number in range(3, 9)]
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
# Seconds that the engine waits for ranks; the end of one is noticed before.
TIMEOUT = 30


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """This process's node has room for two ranks, the other for one."""
    from ray.cluster_utils import Cluster

    for attempt in range(3):  # Ray gives its parts 30 s to appear, which is not always enough
        cluster: Any = Cluster()
        try:
            small: Any = {"object_store_memory": 100 << 20, "include_dashboard": False}
            cluster.add_node(num_cpus=2, **small)
            cluster.far = cluster.add_node(num_cpus=1, **small)
            ray.init(address=cluster.address, log_to_driver=False)
            break
        except Exception:
            ray.shutdown()
            cluster.shutdown()
            if attempt == 2:
                raise
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def engine(directory: Path, size: int, **options: Any) -> LLM:
    given = {"max_model_len": 256, "max_num_seqs": 8, "use_tqdm_on_load": False} | options
    given["distributed_executor_backend"] = "ray"
    return LLM(str(directory), tensor_parallel_size=size, **given)


def executor_of(llm: LLM) -> RankedExecutor:
    executor = llm.llm_engine.model_executor
    assert isinstance(executor, RankedExecutor)
    return executor


def tokens(llm: LLM) -> list[tuple[int, ...]]:
    outputs = llm.generate(PROMPTS, LONG, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def left() -> list[psutil.Process]:
    """Processes of ranks that are alive after a minute; Ray ends them shortly after `kill`."""
    alive: list[psutil.Process] = psutil.wait_procs(actors(), timeout=60)[1]
    return alive


def actors() -> list[psutil.Process]:
    """The processes of ranks on this machine."""
    found = []
    for process in psutil.process_iter():
        try:
            if "RankActor" in process.cmdline()[0]:
                found.append(process)
        except (psutil.Error, IndexError):  # it has just ended
            continue
    return found


@pytest.mark.parametrize(
    "options", [pytest.param(ROOMY, marks=pytest.mark.slow), TIGHT], ids=["roomy", "tight"]
)
def test_ranks_on_two_nodes_give_the_tokens_of_one_process(
    cluster: Any, directory: Path, options: dict[str, Any]
) -> None:
    alone = LLM(
        str(directory), max_model_len=256, max_num_seqs=8, use_tqdm_on_load=False, **options
    )
    wanted = tokens_of(answers(alone))
    llm = engine(directory, 3, **options)
    ranks = executor_of(llm)._ranks
    assert ranks.readers == [1], "the first is beside this process"
    assert len(ranks.remote_connections) == 1, "and the last on the other node"
    assert tokens_of(answers(llm)) == wanted
    llm.llm_engine.shutdown()
    assert left() == []


@pytest.mark.slow
def test_adapters_reach_a_rank_on_another_node(
    cluster: Any, directory: Path, tmp_path: Path
) -> None:
    adapters = saved_adapters(directory, tmp_path)
    options = TIGHT | OPTIONS
    alone = LLM(str(directory), max_model_len=256, max_num_seqs=8, **options)
    wanted = adapted_answers(alone, adapters)
    llm = engine(directory, 3, **options)
    assert len(executor_of(llm)._ranks.remote_connections) == 1
    check_equal(adapted_answers(llm, adapters), wanted)
    llm.llm_engine.shutdown()


SCRIPT = """
import sys, time
from pagedserve import LLM, SamplingParams
llm = LLM(sys.argv[1], tensor_parallel_size=2, distributed_executor_backend="ray",
          num_gpu_blocks=64, use_tqdm_on_load=False)
print("ready", flush=True)
while True:
    llm.generate([" w3 w4"] * 4, SamplingParams(max_tokens=400, ignore_eos=True), use_tqdm=False)
"""


@pytest.mark.slow
def test_actors_end_with_the_engine_that_is_killed(cluster: Any, directory: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(directory)]
    env = os.environ | {"RAY_ADDRESS": cluster.address}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "ready\n"
        [rank] = actors()
        driver.kill()
    rank.wait(60)


def test_a_cluster_without_room_is_said_to_have_none(cluster: Any, directory: Path) -> None:
    with pytest.raises(ConfigError, match="no CPU for each rank within 2 s"):
        engine(directory, 6, distributed_timeout_seconds=2)
    assert left() == []


class Ranks:
    """An engine of three ranks, which are brought to their ends in several ways."""

    def __init__(self, directory: Path) -> None:
        self.llm = engine(directory, 3, num_gpu_blocks=128, distributed_timeout_seconds=TIMEOUT)
        self.wanted = tokens(self.llm)

    def process(self, rank: int) -> Any:
        return executor_of(self.llm)._ranks._ranks[rank].process

    def fails_after(
        self, end: Callable[[], None], *, idle: bool
    ) -> tuple[ExecutorDeadError, float]:
        """What is said, and the seconds from the end of a rank until then."""
        engine = self.llm.llm_engine
        before, times = engine.stats.num_generation_tokens, []

        def act() -> None:
            while not idle and engine.stats.num_generation_tokens == before:
                time.sleep(0.005)
            times.append(time.monotonic())
            end()

        actor = threading.Thread(target=act)
        actor.start()
        if idle:
            actor.join()
            time.sleep(2)
        with pytest.raises(ExecutorDeadError) as caught:
            tokens(self.llm)
        seconds = time.monotonic() - times[0]
        actor.join()
        assert engine.get_num_unfinished_requests() == 0
        assert engine.scheduler.num_free_gpu_blocks == engine.memory.num_gpu_blocks
        return caught.value, seconds

    def work_again(self) -> None:
        self.llm.llm_engine.restart()
        assert tokens(self.llm) == self.wanted


@pytest.fixture(scope="module")
def ranks(cluster: Any, directory: Path) -> Iterator[Ranks]:
    ranks = Ranks(directory)
    yield ranks
    ranks.llm.llm_engine.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("idle", [False, True], ids=["busy", "idle"])
def test_an_actor_that_ray_kills_is_named(ranks: Ranks, rank: int, idle: bool) -> None:
    actor = ranks.process(rank)._actor
    error, seconds = ranks.fails_after(lambda: ray.kill(actor), idle=idle)
    assert f"rank {rank} of 3" in str(error)
    assert seconds < TIMEOUT
    ranks.work_again()


@pytest.mark.parametrize("rank", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_actor_whose_process_is_killed_is_named(ranks: Ranks, rank: int) -> None:
    process = psutil.Process(ranks.process(rank).where.pid)
    error, seconds = ranks.fails_after(process.kill, idle=False)
    assert f"rank {rank} of 3" in str(error)
    assert seconds < TIMEOUT
    ranks.work_again()


@pytest.mark.slow
def test_a_node_that_is_removed_ends_its_rank(ranks: Ranks, cluster: Any) -> None:
    error, seconds = ranks.fails_after(lambda: cluster.remove_node(cluster.far), idle=False)
    assert "rank 2 of 3" in str(error)
    assert seconds < TIMEOUT
    with pytest.raises(ConfigError, match=f"no CPU for each rank within {TIMEOUT} s"):
        ranks.llm.llm_engine.restart()
    with pytest.raises(ExecutorDeadError):
        tokens(ranks.llm)
    cluster.far = cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
    ranks.work_again()
