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
from pagedserve.host_ops.heap import allocated_bytes
from pagedserve.sampling import compile_process, compile_worker, sources
from pagedserve.sampling.grammar import compute_masks
from pagedserve.sampling.grammar_compiler import GrammarCompiler
from pagedserve.sampling.sources import GrammarKey
from pagedserve.sampling_params.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@pytest.fixture(scope="module")
def compiler(real_tokenizer: "PreTrainedTokenizerBase") -> GrammarCompiler:
    return GrammarCompiler(real_tokenizer, len(real_tokenizer), [real_tokenizer.eos_token_id])


def only(text: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=text)


def test_a_process_that_died_of_a_grammar_is_replaced(compiler: GrammarCompiler) -> None:
    compiler.compile(only("a first one"))
    num_deaths = compiler.process.num_deaths
    wide = {"properties": {f"a{index}": True for index in range(9_999)}}
    for _ in range(2):  # the second time it is cached
        with pytest.raises(RequestError, match="nested too deeply"):
            compiler.compile(StructuredOutputsParams(json=wide))
    assert compiler.process.num_deaths == num_deaths + 1
    compiler.compile(only("a second one"))
    assert compiler.process._running is not None
    compiler.process._running._process.kill()  # as an operator would
    compiler.process._running._process.wait()
    compiler.compile(only("a third one"))
    assert compiler.process.num_deaths == num_deaths + 1


def test_a_process_that_has_grown_is_replaced(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.compile(only("before it has grown"))
    running = compiler.process._running
    ask = compile_process._Running.ask

    def grown(running: compile_process._Running, frame: dict[str, Any]) -> dict[str, Any] | int:
        answer = ask(running, frame)
        assert isinstance(answer, dict)
        return answer | {"is_grown": "grammar" in frame}

    with monkeypatch.context() as patch:
        patch.setattr(compile_process._Running, "ask", grown)
        compiler.compile(only("it has grown"))
    assert compiler.process._running is not running
    assert running is not None
    assert running._process.returncode == -signal.SIGKILL
    num_deaths = compiler.process.num_deaths
    compiler.compile(only("the next one is there"))
    assert compiler.process.num_deaths == num_deaths


def test_the_process_prepares_a_grammar(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_not_called(*_given: Any, **_more: Any) -> None:
        raise AssertionError("the engine's steps would wait for its Python code")

    monkeypatch.setattr(sources, "prepare_schema", is_not_called)
    monkeypatch.setattr(sources, "_schema_source", is_not_called)
    compiler.compile(StructuredOutputsParams(json={"enum": ["prepared elsewhere"]}))
    with pytest.raises(RequestError, match="at #/anyOf/0/const: 1152921504606846976 cannot"):
        compiler.compile(StructuredOutputsParams(json={"anyOf": [{"const": 2**60}]}))


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ({"regex": "a{100000}"}, ["a" * 200]),
        ({"choice": ["b" * 9000, "c"]}, ["b" * 200, "c"]),
        ({"json": {"const": "d" * 9000}}, ['"' + "d" * 200]),
        ({"json": {"properties": {"e": {"const": ["e"] * 5000}}}}, ['{"e": ["e", "e"', "{}"]),
        ({"grammar": f'start: "f" "{"g" * 9000}"'}, ["f" + "g" * 200]),
    ],
)
def test_a_long_text_that_must_follow_is_not_found_in_one_step(
    compiler: GrammarCompiler, given: dict[str, Any], texts: list[str]
) -> None:
    grammar = compiler.compile(StructuredOutputsParams(**given))
    for text in texts:
        token_ids = compiler.tokenizer.encode(text)
        for place, token_id in enumerate(token_ids):
            state = grammar.states(1).at(token_ids[:place])
            assert len(state.forced()) <= 1
            (mask,) = compute_masks([state])
            assert mask.view("uint32")[token_id // 32] >> (token_id % 32) & 1, (place, token_id)
        (mask,) = compute_masks([grammar.states(1).at([])])
        other = compiler.tokenizer.encode("z")[0]
        assert not mask.view("uint32")[other // 32] >> (other % 32) & 1


def test_a_short_text_that_must_follow_is_found_at_once(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(only("exactly this text"))
    assert compiler.tokenizer.decode(grammar.states(1).at([]).forced()) == "exactly this text"


@pytest.mark.skipif(not allocated_bytes(), reason="the C library does not count what it allocated")
def test_large_grammars_take_the_place_of_many(compiler: GrammarCompiler) -> None:
    small = [only(f"small {number}") for number in range(3)]
    for params in small:
        assert compiler.compile(params).num_bytes < 1 << 20
    texts = [f"{number} of many texts" for number in range(5000)]
    large = [StructuredOutputsParams(choice=[name, *texts]) for name in "abcdefghij"]
    for params in large:
        assert 1 << 20 < compiler.compile(params).num_bytes < 4 << 20
    assert compiler.knows(large[-1])
    assert not compiler.knows(large[0])
    assert not any(map(compiler.knows, small))


def test_a_failure_of_the_preparation_is_no_fault_of_the_grammar(
    compiler: GrammarCompiler,
) -> None:
    compiler.compile(only("the vocabulary is known"))
    key = GrammarKey("lark", 3, False, False)  # type: ignore[arg-type]
    with pytest.raises(
        PagedServeError, match="the process for grammars failed: TypeError"
    ) as failed:
        compiler.process.source(key, compiler._vocabulary)
    assert not isinstance(failed.value, RequestError)


def test_a_process_that_something_else_ended_is_asked_again(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.compile(only("before it is killed"))
    kills = iter([True, False, True, True, False])
    ask = compile_process._Running.ask

    def killed(running: compile_process._Running, frame: dict[str, Any]) -> dict[str, Any] | int:
        if "grammar" in frame and next(kills):
            os.kill(running._process.pid, signal.SIGKILL)
        return ask(running, frame)

    monkeypatch.setattr(compile_process._Running, "ask", killed)
    num_deaths = compiler.process.num_deaths
    compiler.compile(only("killed once"))
    must_be = only("killed twice")
    with pytest.raises(PagedServeError, match="was ended twice, with code -9") as refused:
        compiler.compile(must_be)
    assert not isinstance(refused.value, RequestError)
    compiler.compile(must_be)  # nothing of it was kept
    assert compiler.process.num_deaths == num_deaths


def test_a_process_that_does_not_answer_is_no_fault_of_the_grammar(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.compile(only("before it is silent"))
    must_be = only("is silent")
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
    compiler.compile(only("before the fork"))
    process, vocabulary = compiler.process, compiler._vocabulary
    running = process._running
    key = GrammarKey("regex", "forked", False, False)
    child = os.fork()
    if child == 0:
        is_right = (
            "forked" in process.source(key, vocabulary)[0] and process._running is not running
        )
        os._exit(0 if is_right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert "forked" in process.source(key, vocabulary)[0]
    assert process._running is running


OWNER = """
import sys
from pagedserve.sampling.compile_process import CompileProcess
process = CompileProcess()
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
    process = compile_process.CompileProcess()
    process.end()  # nothing was started
    with pytest.raises(PagedServeError, match="was ended with its engine"):
        process.start()
    process = compile_process.CompileProcess()
    process.start()
    assert process._running is not None
    child = process._running._process
    process.end()
    assert child.poll() is not None
    compiler.compile(only("the vocabulary is known"))
    with pytest.raises(PagedServeError, match="was ended with its engine"):
        process.source(GrammarKey("regex", "a", False, False), compiler._vocabulary)


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
    heavy = {"torch", "numpy", "transformers", "tokenizers"}
    assert "llguidance" in done.stdout.split()
    assert heavy.isdisjoint(done.stdout.split())
