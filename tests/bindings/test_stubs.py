"""The stubs say what the built module says: an editor shows the docstrings of `help()`."""

import ast
import inspect

import pytest

from tests.support.stubs import FOLDER, STUBS, built_docstring, documented_nodes, with_docstrings


@pytest.mark.parametrize("stub", STUBS)
def test_every_docstring_is_that_of_the_built_module(stub: str) -> None:
    module = STUBS[stub]
    for name, node in documented_nodes(ast.parse((FOLDER / stub).read_text())):
        assert ast.get_docstring(node) == built_docstring(module, name), f"{name}: make stubs"


@pytest.mark.parametrize("stub", STUBS)
def test_writing_docstrings_again_changes_nothing(stub: str) -> None:
    source = (FOLDER / stub).read_text()
    assert with_docstrings(source, STUBS[stub]) == source


@pytest.mark.parametrize("stub", STUBS)
def test_first_lines_stand_alone(stub: str) -> None:
    """As words.md has it: one sentence on one line, and no fragment such as "As of the class."."""
    for name, _ in documented_nodes(ast.parse((FOLDER / stub).read_text())):
        first, *rest = built_docstring(STUBS[stub], name).splitlines()
        assert first.endswith("."), name
        assert not rest or not rest[0], f"{name}: a blank line after the first"
        assert not first.startswith(("As ", "Of ", "What ", "The same", "Those ")), name


def test_nothing_public_is_missing_from_the_stubs() -> None:
    for stub, module in STUBS.items():
        named = {name for name, _ in documented_nodes(ast.parse((FOLDER / stub).read_text()))}
        for name in set(module.__all__) - {"__version__", "cpu"}:
            assert name in named
            if inspect.isclass(built := getattr(module, name)):
                members = {member for member in vars(built) if not member.startswith("__")}
                assert {f"{name}.{member}" for member in members} <= named
