"""Parsers and logits processors of other packages: by file, by module and by entry point.

The example of docs/plugins.md is the plug-in of most tests.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagedserve import RequestError, SamplingParams
from pagedserve.cli.main import make_parser
from pagedserve.cli.serve import read_args
from pagedserve.errors import ConfigError
from pagedserve.inputs import TokensPrompt
from pagedserve.plugins import module_of_file
from pagedserve.server.options import ServerArgs
from pagedserve.server.parsers import REASONING_PARSERS, TOOL_PARSERS
from pagedserve.server.tools.formats import tool_format_of
from tests.server.conftest import TEMPLATE, Serve
from tests.support.doc_blocks import python_examples
from tests.support.formula import FormulaModel, byte_tokenizer

PARSERS, PROCESSORS, ADAPTER = (
    example.code for example in python_examples() if example.page == "docs/plugins.md"
)
# What a plug-in may raise, and no caller expects.
RAISING = PARSERS.replace("    json.loads(arguments)", "    if 'x' in arguments: raise KeyError(9)")
CALL = '<call>weather: {"city": "x"}</call>'
TOOLS = [{"type": "function", "function": {"name": "weather"}}]


@pytest.fixture(autouse=True)
def tables() -> Iterator[None]:
    """Leaves the tables as they were."""
    kept = [(table, dict(table.rows)) for table in (TOOL_PARSERS, REASONING_PARSERS)]
    yield
    for table, rows in kept:
        table.rows.clear()
        table.rows.update(rows)
    module_of_file.cache_clear()
    tool_format_of.cache_clear()


@pytest.fixture
def plugin(tmp_path: Path) -> Callable[[str], str]:
    """Writes a plug-in file; its path."""

    def write(code: str) -> str:
        path = tmp_path / "plugin.py"
        path.write_text(code)
        return str(path)

    return write


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs a package with a module ``brought`` and entry points of a group."""

    def install(code: str, group: str, **points: str) -> None:
        (tmp_path / "brought.py").write_text(code)
        info = tmp_path / "brought-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n")
        lines = [f"{name} = {value}" for name, value in points.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(__import__("sys").modules, "brought", raising=False)

    return install


def args_of(path: str, tools: str = "colon", reasoning: str = "plan") -> dict[str, Any]:
    return {
        "tool_parser_plugin": path,
        "tool_call_parser": tools,
        "reasoning_parser_plugin": path,
        "reasoning_parser": reasoning,
        "chat_template": f"{TEMPLATE}{{% if tools %}}{{% endif %}}",
    }


def chat(text: str) -> dict[str, Any]:
    """A request whose response is this text."""
    return {
        "messages": [{"role": "user", "content": "Go."}],
        "tools": TOOLS,
        "max_tokens": 90,
        "structured_outputs": {"choice": [text]},
    }


def test_formats_of_a_file_parse_responses(serve: Serve, plugin: Callable[[str], str]) -> None:
    with serve(**args_of(plugin(PARSERS))) as running:
        body = chat(f"<plan>So.</plan>Look.\n{CALL}")
        answer = running.http.post("/v1/chat/completions", json=body).json()
        message = answer["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("So.", "Look.")
        assert message["tool_calls"][0]["function"] == {
            "name": "weather",
            "arguments": '{"city": "x"}',
        }
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        other = chat("<call>time: {}</call>")
        message = running.http.post("/v1/chat/completions", json=other).json()["choices"][0]
        assert message["message"]["content"] == "<call>time: {}</call>"


@pytest.mark.parametrize("stream", [False, True])
def test_a_plugin_that_raises_fails_its_request_alone(
    serve: Serve, plugin: Callable[[str], str], stream: bool
) -> None:
    with serve(**args_of(plugin(RAISING))) as running:
        body = chat(f"Look. {CALL}") | {"stream": stream}
        answer = running.http.post("/v1/chat/completions", json=body)
        if stream:
            events = answer.text.removesuffix("\n\n").split("\n\n")
            assert events[-1] == "data: [DONE]"
            error = json.loads(events[-2].removeprefix("data: "))["error"]
        else:
            assert answer.status_code == 500
            error = answer.json()["error"]
        assert error["code"] == 500
        assert "KeyError" in error["message"]
        good = chat(f"Look. {CALL.replace('x', 'y')}")
        answer = running.http.post("/v1/chat/completions", json=good)
        assert answer.json()["choices"][0]["message"]["tool_calls"]
        running.wait_until_idle()


def test_formats_of_entry_points(package: Callable[..., None]) -> None:
    more = 'COLON = TOOL_PARSERS["colon"]'
    package(
        f"{PARSERS}\n{more}\n", "pagedserve.tool_parsers", mine="brought:COLON", bad="brought:x"
    )
    assert ServerArgs(tool_call_parser="mine").tool_call_parser == "mine"
    assert TOOL_PARSERS.rows["mine"].starts == ("<call>",)
    with pytest.raises(ConfigError, match="tool_call_parser is 'bad', and brought:x cannot be"):
        ServerArgs(tool_call_parser="bad")
    with pytest.raises(ConfigError, match=r"tool_call_parser is 'other'; it must be one of .*mine"):
        ServerArgs(tool_call_parser="other")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (None, "tool_parser_plugin is .*; it must be a Python file"),
        ("import nothing_at_all", "cannot be imported: ModuleNotFoundError"),
        ("x = 1", "whose TOOL_PARSERS is None; it must be a mapping of names to ToolFormat"),
        ("TOOL_PARSERS = {'a': 1}", "TOOL_PARSERS of .* has 'a', a int; it must be a name and a"),
        (PARSERS.replace('"colon"', '"hermes"'), "has 'hermes', which is taken"),
        (PARSERS, "tool_call_parser is 'absent'; it must be one of .*colon"),
    ],
)
def test_a_bad_plugin_is_refused_by_name(
    plugin: Callable[[str], str], code: str | None, error: str
) -> None:
    path = "/nowhere.py" if code is None else plugin(code)
    with pytest.raises(ConfigError, match=error):
        ServerArgs(tool_parser_plugin=path, tool_call_parser="absent")


def test_files_of_one_name_are_separate_modules_with_dataclasses(tmp_path: Path) -> None:
    code = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Kept:
    number: int = {number}
"""
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "plugin.py").write_text(code.format(number=number))
    found = [module_of_file("x", str(tmp_path / str(number) / "plugin.py")) for number in range(2)]
    assert [module.Kept().number for module in found] == [0, 1]
    assert [sys.modules[module.__name__] for module in found] == found
    (tmp_path / "plugin.py").write_text("raise KeyError(7)")
    known = {*sys.modules}
    with pytest.raises(ConfigError, match="cannot be imported: KeyError"):
        module_of_file("x", str(tmp_path / "plugin.py"))
    assert {*sys.modules} == known


def test_the_command_line_takes_plugins(plugin: Callable[[str], str]) -> None:
    path = plugin(PARSERS)
    given = f"serve m --reasoning-parser-plugin {path} --reasoning-parser plan".split()
    engine_args, server_args = read_args(make_parser().parse_args(given))
    assert server_args.reasoning_parser == "plan"
    assert engine_args.reasoning_config == REASONING_PARSERS.rows["plan"]
    again, _ = read_args(make_parser().parse_args(given))
    assert again.reasoning_config == engine_args.reasoning_config
    empty = make_parser().parse_args(["serve", "m", "--tool-parser-plugin", ""])
    assert read_args(empty)[1].tool_parser_plugin is None


PROMPT: TokensPrompt = {"prompt_token_ids": byte_tokenizer().encode("Go.")}
PROCESSING = """
class Favour:
    def new_req_logits_processor(self, params):
        if params.max_tokens == 3:
            raise KeyError(7)
        if params.max_tokens == 4:
            return lambda token_ids, logits: [][0]
        return None if params.temperature == 0 else self.process

    def process(self, prompt, token_ids, logits):
        logits[prompt[0] + len(token_ids)] = 100
        return logits

class Bad:
    def __init__(self, config):
        pass

    new_req_logits_processor = None

class Arguments(Favour):
    def __init__(self, config):
        pass
"""


def test_logits_processors_of_an_engine(
    formula: FormulaModel, package: Callable[..., None]
) -> None:
    package(PROCESSING, "pagedserve.logits_processors", favour="brought:Favour")
    engine = formula.engine(logits_processors=["favour"])
    plain = formula.engine()

    def run(running: Any, temperature: float, max_tokens: int) -> Any:
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True)
        running.add_request("a", PROMPT, params)
        return formula.finish(running)["a"].outputs[0]

    first = byte_tokenizer().encode("Go.")[0]
    assert run(engine, 1.0, 5).token_ids == [first + number for number in range(5)]
    assert run(engine, 0.0, 5).token_ids == run(plain, 0.0, 5).token_ids
    with pytest.raises(RequestError, match="logits processor Favour raised KeyError: 7"):
        run(engine, 1.0, 3)
    ended = run(engine, 1.0, 4)
    assert ended.finish_reason == "error"
    assert "IndexError" in ended.stop_reason
    assert run(engine, 1.0, 5).token_ids[0] == first


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("absent", "'absent'; it must be module:Name, or an entry point of pagedserve.logits_pro"),
        ("brought:Nothing", "brought:Nothing cannot be imported: AttributeError"),
        ("no_module:A", "no_module:A cannot be imported: ModuleNotFoundError"),
        ("brought:Bad", "has 'brought:Bad', .*; it must be a class with the method new_req"),
        ("brought:Arguments", "has 'brought:Arguments', which cannot be created: TypeError"),
    ],
)
def test_a_bad_logits_processor_is_refused_by_name(
    formula: FormulaModel, package: Callable[..., None], name: str, error: str
) -> None:
    package(PROCESSING, "pagedserve.logits_processors", favour="brought:Favour")
    with pytest.raises(ConfigError, match=error):
        formula.engine(logits_processors=[name])


def test_the_printed_logits_processor(formula: FormulaModel, package: Callable[..., None]) -> None:
    package(PROCESSORS, "pagedserve.logits_processors")
    engine = formula.engine(logits_processors=["brought:NoFirstTokens"])
    params = SamplingParams(temperature=50.0, max_tokens=99, ignore_eos=True)
    engine.add_request("a", PROMPT, params)
    assert min(formula.finish(engine)["a"].outputs[0].token_ids) >= 10


def test_a_class_of_vllm_gives_requests_their_processors(
    formula: FormulaModel, package: Callable[..., None]
) -> None:
    package(ADAPTER, "pagedserve.logits_processors")
    engine = formula.engine(logits_processors=["brought:OneToken"])
    (factory,) = engine.input_processor.processors
    assert (factory.device.type, factory.max_model_len) == ("cpu", engine.max_model_len)

    def run(extra_args: dict[str, Any] | None) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=3, extra_args=extra_args)
        engine.add_request("a", PROMPT, params)
        return formula.finish(engine)["a"].outputs[0].token_ids

    assert run({"target_token": 7}) == [7, 7, 7]
    plain = formula.greedy(byte_tokenizer().encode("Go."), 3)
    assert run(None) == run({}) == plain
    with pytest.raises(RequestError, match=r"OneToken raised ValueError: target_token is '7'"):
        run({"target_token": "7"})
    again = formula.engine(logits_processors=[type(factory)])
    assert type(again.input_processor.processors[0]) is type(factory)


def test_extra_args_without_a_class_that_reads_them_are_refused(formula: FormulaModel) -> None:
    engine = formula.engine()
    engine.add_request("a", PROMPT, SamplingParams(extra_args={}))
    with pytest.raises(RequestError, match=r"^extra_args is \{'a': 1\}; it must be left out"):
        engine.add_request("b", PROMPT, SamplingParams(extra_args={"a": 1}))


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "Go."}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Go."}]}),
        ("/v1/responses", {"input": "Go."}),
    ],
)
def test_requests_to_a_server_have_extra_args(
    serve: Serve, package: Callable[..., None], path: str, prompt: dict[str, Any]
) -> None:
    package(ADAPTER, "pagedserve.logits_processors")
    options = {"logits_processors": ["brought:OneToken"]}
    with serve(options, chat_template=TEMPLATE) as running:
        body = {"temperature": 0, "vllm_xargs": {"target_token": "7"}, **prompt}
        answer = running.http.post(path, json=body)
        assert answer.status_code == 400
        assert "target_token is '7'" in answer.json()["error"]["message"]
