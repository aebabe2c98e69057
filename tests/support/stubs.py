"""Docstrings of the stubs of `pagedserve._core`: copied from the built module, whose home they are.

Run as a program (`make stubs`), it writes them into the stubs.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pagedserve._core
import pagedserve._core.cpu

FOLDER = Path(__file__).resolve().parents[2] / "python" / "pagedserve" / "_core"
STUBS: dict[str, ModuleType] = {
    "__init__.pyi": pagedserve._core,
    "cpu.pyi": pagedserve._core.cpu,
}

Documented = ast.ClassDef | ast.FunctionDef


def documented_nodes(tree: ast.Module) -> Iterator[tuple[str, Documented]]:
    """Dotted name and node of every class, function, method and property but the special ones."""
    for node in tree.body:
        if isinstance(node, Documented):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and not member.name.startswith("__"):
                    yield f"{node.name}.{member.name}", member


def built_docstring(module: ModuleType, name: str) -> str:
    """Docstring that the built module gives a dotted name."""
    found: object = module
    for part in name.split("."):
        found = getattr(found, part)
    if not (docstring := inspect.getdoc(found)):
        raise ValueError(f"{module.__name__}.{name} has no docstring; write it in rust/py")
    return docstring


def with_docstrings(source: str, module: ModuleType) -> str:
    """Stub `source` with the docstrings of `module` in the place of those that it has."""
    lines = source.splitlines()
    # From the end, so that the lines of the nodes before keep their numbers.
    for name, node in reversed(list(documented_nodes(ast.parse(source)))):
        quoted = f'"""{built_docstring(module, name)}'
        quoted += '\n"""' if "\n" in quoted else '"""'
        docstring = textwrap.indent(quoted, " " * (node.col_offset + 4)).splitlines()
        first = node.body[0]
        if ast.get_docstring(node) is not None:
            lines[first.lineno - 1 : first.end_lineno] = docstring
        elif isinstance(node, ast.FunctionDef):
            head = re.sub(r": \.\.\.(\s*#.*)?$", ":", lines[first.lineno - 1])
            lines[first.lineno - 1 : first.lineno] = [head, *docstring]
        else:
            begin = min([first.lineno, *(item.lineno for item in _decorators(first))])
            lines[begin - 1 : begin - 1] = [*docstring, ""]
    return "\n".join(lines) + "\n"


def _decorators(node: ast.stmt) -> list[ast.expr]:
    return node.decorator_list if isinstance(node, ast.FunctionDef) else []


def main() -> None:
    """Write the docstrings into the stubs."""
    for name, module in STUBS.items():
        path = FOLDER / name
        path.write_text(with_docstrings(path.read_text(), module))


if __name__ == "__main__":
    main()
