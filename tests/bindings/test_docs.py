"""The border is documented where it stands: ``help`` is enough to program from."""

import doctest
import inspect
from collections.abc import Iterator
from types import ModuleType

import pytest

import pagedserve
from pagedserve import _core
from pagedserve._core import cpu


def documented(module: ModuleType) -> Iterator[tuple[str, object]]:
    """Every public name of a module, and of its classes."""
    for name in dir(module):
        value = getattr(module, name)
        if name.startswith("_") or inspect.ismodule(value):
            continue
        yield name, value
        if inspect.isclass(value):
            for member in dir(value):
                if not member.startswith("_"):
                    yield f"{name}.{member}", getattr(value, member)


@pytest.mark.parametrize("module", [_core, cpu])
def test_every_public_name_has_a_docstring(module: ModuleType) -> None:
    assert inspect.getdoc(module)
    assert not [name for name, value in documented(module) if not inspect.getdoc(value)]


@pytest.mark.parametrize("module", [_core, cpu])
def test_arguments_of_documented_calls_are_all_named(module: ModuleType) -> None:
    missing = []
    for name, value in documented(module):
        if not callable(value) or "Args:" not in (text := inspect.getdoc(value) or ""):
            continue
        missing += [
            f"{name}({argument})"
            for argument in inspect.signature(value).parameters
            if argument != "self" and f"{argument}:" not in text
        ]
    assert not missing


def test_the_example_of_a_step_runs() -> None:
    text = inspect.getdoc(pagedserve.Scheduler)
    assert text is not None
    example = doctest.DocTestParser().get_doctest(text, {}, "Scheduler", None, None)
    assert len(example.examples) > 10
    assert doctest.DocTestRunner().run(example).failed == 0


def test_the_kernels_are_a_module_of_their_own() -> None:
    assert cpu.__name__ == "pagedserve._core.cpu"
    assert cpu.paged_attention.__module__ == "pagedserve._core.cpu"
    assert not [name for name in dir(_core) if name.endswith("_cpu")]
