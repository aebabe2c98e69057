"""Plug-ins: objects of other packages, found by entry point, by module, or in a Python file.

Nothing is imported before an option names it: an installed package alone changes nothing.
"""

import importlib
import importlib.util
import os
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pagedserve.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def object_of(option: str, name: str, group: str) -> Any:
    """Import what an option names: ``module:Name``, or the name of an entry point.

    Args:
        option: Name of the option, for errors.
        name: Value of the option.
        group: Group of the entry points.

    Raises:
        ConfigError: It does not exist, or its module cannot be imported.
    """
    from importlib.metadata import EntryPoint, entry_points  # which takes 20 ms

    if ":" in name:
        return _loaded(option, EntryPoint(name, name, group))
    found = [*entry_points(group=group, name=name)]
    if not found:
        raise ConfigError(
            f"{option} is {name!r}; it must be module:Name, or an entry point of {group}"
        )
    if len({entry.value for entry in found}) > 1:
        values = " and ".join(sorted(entry.value for entry in found))
        raise ConfigError(f"{option} is {name!r}, which {values} have as an entry point of {group}")
    return _loaded(option, found[0])


def has_entry_point(name: str, group: str) -> bool:
    """Whether an installed package has an entry point of this name."""
    from importlib.metadata import entry_points

    return bool(entry_points(group=group, name=name))


@cache
def module_of_file(option: str, path: str) -> ModuleType:
    """Import a Python file, once.

    Args:
        option: Name of the option, for errors.
        path: The file.

    Raises:
        ConfigError: It does not exist, or cannot be imported.
    """
    import hashlib  # which a start without plug-ins does not need

    file = Path(path)
    digest = hashlib.sha256(os.fsencode(file.absolute())).hexdigest()
    name = f"pagedserve_plugin_{file.stem}_{digest[:16]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"{option} is {path!r}; it must be a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses find the names of postponed annotations
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(
            f"{option} is {path!r}, which cannot be imported: {type(error).__name__}: {error}"
        ) from error
    return module


def _loaded(option: str, entry: "EntryPoint") -> Any:
    try:
        return entry.load()
    except Exception as error:
        raise ConfigError(
            f"{option} is {entry.name!r}, and {entry.value} cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error
