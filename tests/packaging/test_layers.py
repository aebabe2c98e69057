"""The rules of docs/design.md that no compiler checks: which part may import which, and sizes."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TypeAlias

import pytest

# Leaves that every part of the package may name.
SHARED = {
    "byte_alphabet",
    "checks",
    "collector",
    "device",
    "errors",
    "extras",
    "plugins",
    "references",
    "regular_files",
    "sigint",
    "tokenizer",
    "vllm_names",
}

# Each part of the package, and the parts it may name besides itself and the shared ones.
PYTHON_LAYERS: dict[str, set[str]] = {
    **{leaf: set() for leaf in SHARED},
    "host_ops": set(),
    "attention": {"host_ops", "kernels"},
    "config": {"attention"},  # whose backends an option names
    "sampling_params": {"config"},  # how an option is defined
    "pooling_params": set(),
    "inputs": {"pooling_params", "sampling_params"},
    "cache": {"host_ops", "kernels"},
    "pooling": {"pooling_params"},
    "parallel": {"host_ops"},
    "models": {
        *("attention", "cache", "config", "host_ops", "inputs", "kernels", "parallel", "pooling"),
    },
    "lora": {"kernels", "models", "parallel"},
    "outputs": {"lora"},  # whose adapter answered
    "sampling": {"host_ops", "kernels", "sampling_params"},
    "drafts": {"inputs", "outputs", "sampling_params"},
    "runner": {"attention", "cache", "inputs", "lora", "models", "sampling"},
    "executor": {
        *("attention", "cache", "config", "host_ops", "inputs", "lora", "models", "parallel"),
        *("pooling", "runner", "sampling"),
    },
    # Decoders without torch: a second executor.
    "native": {
        *("cache", "config", "executor", "host_ops", "inputs", "lora", "models", "pooling"),
        "sampling",
    },
    "output": {"outputs", "pooling", "pooling_params", "sampling_params"},
    "engine": {
        *("config", "drafts", "executor", "host_ops", "inputs", "lora", "models", "native"),
        *("output", "outputs", "pooling", "pooling_params", "sampling", "sampling_params"),
    },
    "metrics": {"engine"},
    "decisions": {"inputs", "outputs"},
    "llm": {
        *("config", "decisions", "engine", "inputs", "lora", "metrics", "output", "outputs"),
        *("pooling_params", "sampling_params"),
    },
    "vllm_modules": {"config", "models"},  # a tokenizer, as vLLM's scripts load it
    "utils": {"config", "vllm_modules"},  # a name of vLLM's
    "server": {
        *("config", "decisions", "engine", "host_ops", "inputs", "lora", "output", "outputs"),
        *("pooling", "pooling_params", "sampling_params"),
    },
    "batch_files": {"config", "models", "sampling_params", "server"},
    "quantize": {"config", "executor", "host_ops", "models", "native"},
    "deploy": {
        *("config", "engine", "executor", "inputs", "lora", "models", "outputs"),
        *("pooling_params", "sampling_params"),
    },
    "replay": set(),
    "scheduler": set(),
    "bench": set(),
    "engine_bench": {"bench", "config", "inputs", "llm", "outputs", "sampling_params"},
    # Two of the public names; of models, that a start says what it does.
    "__main__": {"cli"},
    "cli": {
        *("batch_files", "bench", "config", "decisions", "deploy", "engine", "engine_bench"),
        *("host_ops", "models", "native", "outputs", "quantize", "sampling_params", "server"),
        *("LLM", "__version__"),
    },
}

# The rooms of `pagedserve.models`, and those that each names.
MODEL_ROOMS: dict[str, set[str]] = {
    "families": set(),
    "load": {"families"},
    "tokenizer": {"families", "load"},
    "fused": {"families", "load"},
    "check": {"families", "load", "tokenizer"},
}

# Those of `pagedserve.server`, which all may name what no room has: the jobs, the options.
SERVER_ROOMS: dict[str, set[str]] = {
    "http": set(),
    "tools": set(),
    "admin": {"http"},
    "completions": {"http"},
    "decisions": {"http"},
    "files": {"http"},
    "models": {"http"},
    "pooling": {"http"},
    "speech": {"http"},
    "tokens": {"http", "tools"},
    "chat": {"http", "tools"},
    "messages": {"chat", "http", "tools"},
    "responses": {"chat", "http", "tools"},
    "ollama": {"admin", "chat", "completions", "http", "pooling", "tools"},
    "batches": {"chat", "completions", "files", "http", "pooling", "responses"},
}

# The modules and packages that may name the Rust core.
CORE_USERS = {
    "pagedserve",
    "pagedserve.attention.rust",
    "pagedserve.cache.engine",
    "pagedserve.config.core_options",
    "pagedserve.drafts",
    "pagedserve.engine",
    "pagedserve.executor",
    "pagedserve.host_ops",
    "pagedserve.parallel.shared_memory",
    "pagedserve.models.fused.cpu",
    "pagedserve.models.load.gguf_header",  # lists of a vocabulary
    "pagedserve.native",
    "pagedserve.models.check.paged_logits",  # KV groups of its cache
    "pagedserve.replay",
    "pagedserve.runner.buffers",
    "pagedserve.runner.profile",
    "pagedserve.scheduler",
    "pagedserve.sampling.on_host",
    "pagedserve.server.app",  # its version
}

# The core's modules from low to high; those of one line may name each other.
# What a step gives out (outputs, inputs) is data, so it stands below the scheduler that makes it.
RUST_LAYERS = [
    {"ids", "error", "config", "hash", "arena"},
    {"block", "lookup"},
    {"table"},
    {"sequence"},
    {"space", "outputs"},
    {"inputs"},
    {"scheduler"},
    {"log"},
]

MAX_LINES = {".rs": 600, ".py": 800}

# Limits of the package's Python code: lines without docstrings, comments and blank ones.
MAX_FUNCTION_LINES = 40
MAX_PARAMETERS = 11
MAX_FIELDS = 18

LONG_FUNCTIONS = {
    "bench.options._add_dataset",  # one argument after another
    "engine.engine_metrics.EngineMetrics._gauges",  # one metric after another
    "engine.input_processor.InputProcessor.process",
    "executor.memory.plan_memory",
    "models.fused.cpu.layers.CpuDecoderLayer.__init__",
    "replay.driver.ScenarioDriver._decisions",
    "runner.buffers.StepBuffers.__init__",
    "server.job.Job.outputs",
}
MANY_PARAMETERS = {
    "executor.memory.plan_memory",
}
MANY_FIELDS = {
    "bench.options.BenchOptions",  # a table of options, as the next three
    "config.engine_options.EngineOptions",
    "sampling_params.options.SamplingOptions",
    "server.options.ServerArgs",
    "server.protocol.Body",
    "server.batches.protocol.BatchObject",  # fields of OpenAI's protocol, as the next two
    "server.responses.protocol.ResponseObject",
    "server.responses.protocol.ResponsesBody",
    "engine.request.Request",
    "runner.buffers.StepBuffers",  # one array after another
}


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Absolute names of all modules that a file imports, wherever in the file."""
    return tuple(imports_in(parsed(path)))


def imports_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules_of_package(root: Path) -> Iterator[tuple[str, Path]]:
    package = root / "python" / "pagedserve"
    for path in sorted(package.rglob("*.py")):
        if "kernels" not in path.parts:
            parts = path.relative_to(package.parent).with_suffix("").parts
            yield ".".join(part for part in parts if part != "__init__"), path


def test_kernels_import_no_other_part(root: Path) -> None:
    standard = {
        "__future__",
        "collections",
        "contextlib",
        "dataclasses",
        "functools",
        "math",
        "typing",
    }
    allowed = standard | {"torch", "triton"}
    found = {
        f"{path.name}: {name}"
        for path in (root / "kernels").rglob("*.py")
        for name in imports(path)
        if name.split(".")[0] not in allowed
    }
    assert not found


def named_parts(root: Path) -> dict[str, set[str]]:
    """Each part of the package, and the other parts that its files name."""
    parts: dict[str, set[str]] = {}
    for module, path in modules_of_package(root):
        if module != "pagedserve":  # the package's face offers the public names of all parts
            part = module.split(".")[1]
            ours = (name for name in imports(path) if name.startswith("pagedserve."))
            named = {name.split(".")[1] for name in ours}
            parts.setdefault(part, set()).update(named - {part, "_core"})
    return parts


def core_users(root: Path) -> set[str]:
    """The modules that name the Rust core."""
    return {
        module
        for module, path in modules_of_package(root)
        if any(name.startswith("pagedserve._core") for name in imports(path))
    }


def is_within(module: str, package: str) -> bool:
    """Whether a module is a package or lies in it; the package's face is only itself."""
    return module == package or (package != "pagedserve" and module.startswith(f"{package}."))


def test_python_parts_name_only_lower_ones(root: Path) -> None:
    parts = named_parts(root)
    assert parts.keys() == PYTHON_LAYERS.keys(), "each part has its line in PYTHON_LAYERS"
    wrong = {part: named - PYTHON_LAYERS[part] - SHARED for part, named in parts.items()}
    assert not {part: names for part, names in wrong.items() if names}


@pytest.mark.parametrize(("part", "rooms"), [("models", MODEL_ROOMS), ("server", SERVER_ROOMS)])
def test_rooms_name_only_lower_ones(root: Path, part: str, rooms: dict[str, set[str]]) -> None:
    named: dict[str, set[str]] = {room: set() for room in rooms}
    for module, path in modules_of_package(root):
        room = module.removeprefix(f"pagedserve.{part}.").split(".")[0]
        if room in rooms and module.startswith(f"pagedserve.{part}."):
            ours = (name for name in imports(path) if name.startswith(f"pagedserve.{part}."))
            named[room].update({name.split(".")[2] for name in ours} & rooms.keys() - {room})
    assert named == rooms
    TopologicalSorter(named).prepare()


def test_no_part_imports_through_the_face_of_the_package(root: Path) -> None:
    wrong = [
        module
        for module, path in modules_of_package(root)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and node.module == "pagedserve"
    ]
    # These use the public names, as users do.
    assert set(wrong) <= {
        *("pagedserve.cli.decide", "pagedserve.cli.generate", "pagedserve.cli.main"),
    }


def test_files_do_not_import_in_a_circle(root: Path) -> None:
    modules = dict(modules_of_package(root))
    graph = {}
    for module, path in modules.items():
        if module != "pagedserve":
            names = imports(path)  # those for type checkers too
            homes = {name if name in modules else name.rpartition(".")[0] for name in names}
            graph[module] = homes & modules.keys() - {module, "pagedserve"}
    TopologicalSorter(graph).prepare()  # its CycleError names the circle


def test_parts_do_not_name_each_other_in_a_circle(root: Path) -> None:
    TopologicalSorter(named_parts(root)).prepare()


def test_every_permission_of_a_part_is_used(root: Path) -> None:
    parts = named_parts(root)
    unused = {part: allowed - parts[part] for part, allowed in PYTHON_LAYERS.items()}
    assert not {part: names for part, names in unused.items() if names}
    assert not SHARED.difference(*parts.values())


def test_only_the_border_names_the_core(root: Path) -> None:
    users = core_users(root)
    assert not {user for user in users if not any(is_within(user, home) for home in CORE_USERS)}
    assert not {home for home in CORE_USERS if not any(is_within(user, home) for user in users)}


@pytest.mark.parametrize("part", ["output", "engine"])
def test_nothing_above_the_executor_imports_torch(root: Path, part: str) -> None:
    wrong = [
        module
        for module, path in modules_of_package(root)
        if module.startswith(f"pagedserve.{part}.")
        and any(name.split(".")[0] == "torch" for name in imports(path))
    ]
    assert not wrong


def crate_names(source: str) -> Iterator[str]:
    """Top-level modules that Rust source names through `crate::`, one or a braced list of them."""
    code = re.sub(r"//.*", "", source)
    for match in re.finditer(r"\bcrate::(\w+)?(\{)?", code):
        if match[1]:
            yield match[1]
        elif match[2]:
            depth, start = 1, match.end()
            for position in range(start, len(code)):
                depth += {"{": 1, "}": -1}.get(code[position], 0)
                if depth == 0 or (depth == 1 and code[position] == ","):
                    yield from re.findall(r"^\s*(\w+)", code[start:position])
                    start = position + 1
                if depth == 0:
                    break


def test_crate_names_reads_braced_lists() -> None:
    source = "use crate::{ids::{A, B}, block::C,\n    table};\nuse crate::space::D; // crate::no"
    assert list(crate_names(source)) == ["ids", "block", "table", "space"]


def test_rust_modules_name_only_lower_ones(root: Path) -> None:
    rank = {module: level for level, modules in enumerate(RUST_LAYERS) for module in modules}
    source = root / "rust" / "core" / "src"
    wrong = []
    for path in sorted(source.rglob("*.rs")):
        module = path.relative_to(source).with_suffix("").parts[0]
        if module in rank:
            wrong += [
                f"{path.relative_to(source)} names crate::{name}"
                for name in crate_names(path.read_text())
                if rank.get(name, -1) > rank[module]
            ]
    assert not wrong


@pytest.mark.parametrize("suffix", MAX_LINES)
def test_files_are_no_heaps(root: Path, suffix: str) -> None:
    folders = ("rust", "python", "kernels", "tests", "benches", "examples")
    long = {
        str(path.relative_to(root)): lines
        for folder in folders
        for path in (root / folder).rglob(f"*{suffix}")
        if (lines := len(path.read_text().splitlines())) > MAX_LINES[suffix]
    }
    assert not long


def code_lines(source: str) -> set[int]:
    """Numbers of the lines that have code: no docstrings, comments and blank lines."""
    layout = {
        *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
        tokenize.ENDMARKER,
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in layout:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
            lines.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return lines


Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def definitions(root: Path) -> list[tuple[str, ast.ClassDef | Function, set[int]]]:
    """Classes and functions of the package by qualified name, with the lines of code around."""
    found: list[tuple[str, ast.ClassDef | Function, set[int]]] = []
    for module, path in modules_of_package(root):
        source = path.read_text()
        lines = code_lines(source)
        inside = [(module.removeprefix("pagedserve."), parsed(path).body)]
        for name, body in inside:
            for node in body:
                if isinstance(node, ast.ClassDef | Function):
                    found.append((f"{name}.{node.name}", node, lines))
                    inside.append((f"{name}.{node.name}", node.body))
    return found


def test_functions_are_short(root: Path) -> None:
    long = {
        name
        for name, node, lines in definitions(root)
        if isinstance(node, Function)
        and len(lines & {*range(node.body[0].lineno, (node.end_lineno or 0) + 1)})
        > MAX_FUNCTION_LINES
    }
    assert long == LONG_FUNCTIONS


def num_parameters(node: Function) -> int:
    """Parameters of a function; `self` and `cls` count as none."""
    names = [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def test_functions_take_few_parameters(root: Path) -> None:
    many = {
        name
        for name, node, _ in definitions(root)
        if isinstance(node, Function) and num_parameters(node) > MAX_PARAMETERS
    }
    assert many == MANY_PARAMETERS


def fields_of(node: ast.ClassDef) -> set[str]:
    """Annotated names of a class, and attributes that its constructor assigns."""
    found = {
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            found |= {
                name.attr
                for name in ast.walk(item)
                if isinstance(name, ast.Attribute)
                and isinstance(name.ctx, ast.Store)
                and isinstance(name.value, ast.Name)
                and name.value.id == "self"
            }
    return found


def test_classes_have_few_fields(root: Path) -> None:
    many = {
        name
        for name, node, _ in definitions(root)
        if isinstance(node, ast.ClassDef) and len(fields_of(node)) > MAX_FIELDS
    }
    assert many == MANY_FIELDS
