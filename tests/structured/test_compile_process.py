"""The process that compiles grammars first: how it starts, dies and ends."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pagedserve.errors import PagedServeError, RequestError
from pagedserve.sampling import compile_process, compile_worker
from pagedserve.sampling.grammar import GrammarCompiler
from pagedserve.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@pytest.fixture(scope="module")
def compiler(real_tokenizer: "PreTrainedTokenizerBase") -> GrammarCompiler:
    return GrammarCompiler(real_tokenizer, len(real_tokenizer), [real_tokenizer.eos_token_id])


def rules(number: int) -> str:
    """A rule ``start``, and others that make a chain of ``number`` with it."""
    chain = "".join(f"r{i}: r{i + 1}\n" for i in range(1, number - 1))
    return f'start: r1\n{chain}r{number - 1}: "x"\n'


def test_a_process_that_died_of_a_grammar_is_replaced(compiler: GrammarCompiler) -> None:
    compiler.compile(StructuredOutputsParams(regex="a first one"))
    num_deaths = compiler.process.num_deaths
    assert "nested too deeply" in compiler._fault(rules(3000))
    assert compiler.process.num_deaths == num_deaths + 1
    assert compiler._fault('start: "a"') == ""
    assert compiler.process._running is not None
    compiler.process._running._process.kill()  # as an operator would
    compiler.process._running._process.wait()
    assert compiler._fault('start: "b"') == ""
    assert compiler.process.num_deaths == num_deaths + 1


def test_a_process_that_something_else_ended_is_asked_again(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.compile(StructuredOutputsParams(regex="before it is killed"))
    kills = iter([True, False, True, True, False])
    ask = compile_process._Running.ask

    def killed(running: compile_process._Running, frame: dict[str, Any]) -> dict[str, Any] | int:
        if "source" in frame and next(kills):
            os.kill(running._process.pid, signal.SIGKILL)
        return ask(running, frame)

    monkeypatch.setattr(compile_process._Running, "ask", killed)
    num_deaths = compiler.process.num_deaths
    compiler.compile(StructuredOutputsParams(regex="killed once"))
    must_be = StructuredOutputsParams(regex="killed twice")
    with pytest.raises(PagedServeError, match="was ended twice, with code -9") as refused:
        compiler.compile(must_be)
    assert not isinstance(refused.value, RequestError)
    compiler.compile(must_be)  # nothing of it was kept
    assert compiler.process.num_deaths == num_deaths


def test_a_process_that_does_not_answer_is_no_fault_of_the_grammar(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.compile(StructuredOutputsParams(regex="before it is silent"))
    must_be = StructuredOutputsParams(regex="is silent")
    assert compiler.process._running is not None
    process = compiler.process._running._process
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # until then one of its threads may answer
    with monkeypatch.context() as patch:
        patch.setattr(compile_process, "_WALL_SECONDS", 0.01)
        with pytest.raises(PagedServeError, match="has not answered for 0 s") as refused:
            compiler.compile(must_be)
    assert not isinstance(refused.value, RequestError)
    compiler.compile(must_be)


def test_a_forked_process_starts_its_own(compiler: GrammarCompiler) -> None:
    assert compiler._fault('start: "a"') == ""
    running = compiler.process._running
    child = os.fork()
    if child == 0:
        is_right = compiler._fault('start: "c"') == "" and compiler.process._running is not running
        os._exit(0 if is_right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert compiler._fault('start: "b"') == ""
    assert compiler.process._running is running


OWNER = """
import sys
from pagedserve.sampling.compile_process import CompileProcess
process = CompileProcess({})
process.start()
print(process._running._process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, None], ids=["killed", "left"])
def test_the_process_ends_with_its_owner(number: int | None) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        descriptor = os.pidfd_open(pid)
        if number is None:
            owner.stdin.close()
        else:
            owner.send_signal(number)
        owner.wait()
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(60_000), "it still runs"
    os.close(descriptor)


def test_the_end_is_for_good(compiler: GrammarCompiler) -> None:
    process = compile_process.CompileProcess({})
    process.end()  # nothing was started
    with pytest.raises(PagedServeError, match="was ended with its engine"):
        process.start()
    process = compile_process.CompileProcess({})
    process.start()
    assert process._running is not None
    child = process._running._process
    process.end()
    assert child.poll() is not None
    compiler.compile(StructuredOutputsParams(regex="the vocabulary is known"))
    with pytest.raises(PagedServeError, match="was ended with its engine"):
        process.fault('start: "a"', compiler._vocabulary)


def test_the_process_imports_little() -> None:
    path = str(Path(compile_worker.__file__))
    program = f"import runpy, sys; runpy.run_path({path!r}); import llguidance; print(*sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    heavy = {"torch", "numpy", "transformers", "tokenizers", "pagedserve"}
    assert "llguidance" in done.stdout.split()
    assert heavy.isdisjoint(done.stdout.split())
