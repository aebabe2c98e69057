"""What the docs state of routes, arrays, options, files and targets, beside the code."""

import argparse
import re
import tomllib
from pathlib import Path
from typing import Final

import pytest

from pagedserve import EngineArgs
from pagedserve.cli.main import make_parser
from pagedserve.engine.defaults import server_defaults
from pagedserve.server.app import ABSENT_PATHS
from pagedserve.server.http.gate import OPEN_PATHS
from pagedserve.server.options import ServerArgs
from tests.server.conftest import Served
from tests.support.doc_blocks import PAGES, ROOT, commands
from tests.support.formula import FormulaExecutor, FormulaModel

DOCS: Final = ROOT / "docs"
_TYPES: Final = {"i32": "int32", "i64": "int64"}


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def test_arrays_of_a_step_are_those_of_the_core() -> None:
    source = (ROOT / "rust" / "core" / "src" / "inputs.rs").read_text(encoding="utf-8")
    struct = source[source.index("pub struct InputBuffers") :].partition("\n}")[0]
    fields = re.findall(r"pub (\w+): (?:Option<|Vec<)?&'a mut \[(\w+)\]", struct)
    rows = re.findall(r"^\| `(\w+)` \| (int\d+) \[", page("step.md"), re.MULTILINE)
    assert rows == [(name, _TYPES[kind]) for name, kind in fields]


def test_arrays_of_a_step_are_those_of_the_stub() -> None:
    stub = (ROOT / "python" / "pagedserve" / "_core" / "__init__.pyi").read_text(encoding="utf-8")
    arguments = stub[stub.index("class InputBuffers") :].partition("-> InputBuffers")[0]
    rows = re.findall(r"^\| `(\w+)` \| (int\d+) \[", page("step.md"), re.MULTILINE)
    assert rows == re.findall(r"(\w+): (?:Sequence\[)?NDArray\[np\.(\w+)\]", arguments)


def documented_routes() -> set[str]:
    table = page("serving.md").partition("## Routes")[2].partition("Not supported")[0]
    return set(re.findall(r"`(?:(?:GET|POST) )?(/[^`{ ]*)", table))


def test_routes_are_those_of_the_server(tmp_path: Path) -> None:
    args = ServerArgs(
        port=0,
        uvicorn_log_level="warning",
        enable_admin_routes=True,
        batch_directory=str(tmp_path),
    )
    with Served(FormulaModel().engine, args) as served:
        paths = served.http.get("/openapi.json").json()["paths"]
        served_paths = {path.partition("{")[0] for path in paths}
        assert served_paths <= documented_routes()
        for path in documented_routes() - {"/v1/models/"}:  # of a model's name
            statuses = {
                served.http.request(method, path, json={}).status_code for method in ("GET", "POST")
            }
            assert statuses - {404, 405, 501}, path


def test_absent_routes_are_those_of_the_server() -> None:
    line = page("serving.md").partition("Not supported, and answered with 501:")[2]
    named = re.findall(r"`(/[^`]+)`", line.partition("\n\n")[0])
    absent = {path.replace("{rest:path}", "...") for path in ABSENT_PATHS}
    assert set(named) == absent


def test_open_routes_are_those_of_the_server() -> None:
    line = page("serving.md").partition("every route but ")[2].partition("requires")[0]
    assert set(re.findall(r"`(/[^`]*)`", line)) == OPEN_PATHS


def test_defaults_of_a_server_are_those_of_the_code() -> None:
    text = page("serving.md").replace("\n", " ")
    info = FormulaExecutor(EngineArgs("smollm2")).model_info
    args = server_defaults(EngineArgs("smollm2"), info)
    assert f"`max_num_batched_tokens` is {args.max_num_batched_tokens} " in text
    assert args.enable_chunked_prefill
    assert args.enable_prefix_caching
    options = make_parser().parse_args(["serve", "smollm2"])
    assert f"`max_logprobs` is {options.max_logprobs}." in text


def test_named_files_exist() -> None:
    bases = [ROOT, ROOT / "python" / "pagedserve", ROOT / "kernels", ROOT / "rust" / "core" / "src"]
    bases += [ROOT / "benches" / "python", ROOT / "python" / "pagedserve" / "models"]
    bases += [ROOT / "rust" / "core" / "tests", ROOT / "python"]
    for path in PAGES:
        text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for name in re.findall(r"`([\w/.-]+\.(?:py|rs|json|html))`", text):
            if "/" in name.lstrip("/"):  # else the name of a route
                assert any((base / name).exists() for base in bases), f"{path.name}: {name}"


def test_targets_of_make_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for command in commands("make"):
        named = {name for name in command.arguments[1:] if "=" not in name and name[0] != "-"}
        assert named <= targets, command


def test_installations_work_from_a_clone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for command in commands("pip"):
        (target,) = [name for name in command.arguments[2:] if not name.startswith("-")]
        match = re.fullmatch(r"\.(?:\[([\w,-]+)\])?", target)
        assert match, command  # nothing is on an index yet
        assert set((match[1] or "engine").split(",")) <= set(project["optional-dependencies"])
    for path in PAGES:
        assert "install 'pagedserve" not in path.read_text(encoding="utf-8"), path.name


@pytest.mark.parametrize("kind", ["serve", "deploy", "generate", "run-batch", "quantize"])
def test_options_named_in_pages_exist(kind: str) -> None:
    """Options of the commands as the pages about them name them."""
    pages = {"serve": ["serving.md", "tools.md", "lora.md"], "deploy": ["deploy.md"]}
    pages |= {"generate": ["quickstart.md"], "run-batch": ["batch.md"], "quantize": ["cpu.md"]}
    known = set(_options_of(make_parser()))
    for name in pages[kind]:
        text = re.sub(r"```.*?```", "", page(name), flags=re.DOTALL)
        named = set(re.findall(r"`(--[a-z][\w-]+)", text)) - {"--extras"}
        assert named <= known, name


def _options_of(parser: argparse.ArgumentParser) -> set[str]:
    found: set[str] = set()
    for action in parser._actions:
        found |= set(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                found |= _options_of(child)
    return found


def test_pictures_are_small() -> None:
    sizes = {path.name: path.stat().st_size for path in Path(DOCS / "images").iterdir()}
    assert max(sizes.values()) < 150_000, sizes
