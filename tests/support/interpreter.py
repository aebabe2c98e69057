"""Triton's interpreter, without a search that it repeats for each call of a kernel or a function.

It lists all members of triton.language to find the builtins that it replaces, the same each time.
"""

import inspect
from functools import cache
from typing import Any


def quicken() -> None:
    """Remember which members of a module or a class are builtins."""
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @cache
    def builtins_of(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name in builtins_of(package):
            if is_builtin(member := getattr(package, name)):  # not replaced yet
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin
