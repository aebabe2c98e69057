"""Stub of the top level, for type checkers: the names in the table of `pagedserve/__init__.py`.

Run as a program (`make stubs`), it writes the stub, which ruff then sorts and formats.
"""

from collections import defaultdict
from pathlib import Path
from typing import Final

import pagedserve

STUB: Final = Path(__file__).resolve().parents[2] / "python" / "pagedserve" / "__init__.pyi"
# The module of each name.
HOME: Final[dict[str, str]] = vars(pagedserve)["_HOME"]


def exports_stub() -> str:
    """The stub, unformatted."""
    names = defaultdict(list)
    for name, module in HOME.items():
        names[module].append(name)
    return "\n".join(
        [
            "# Names at the top level.  `make stubs` writes this file from __init__.py.",
            "",
            *(f"from {module} import {', '.join(found)}" for module, found in names.items()),
            "",
            "__all__ = [",
            *(f'    "{name}",' for name in HOME),
            "]",
            "",
        ]
    )


if __name__ == "__main__":
    STUB.write_text(exports_stub())
