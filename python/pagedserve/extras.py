"""The packages of extras: which of them are missing, and the command that installs them.

The installed package's metadata lists them, so a printed command needs no published release.
"""

import importlib.metadata
import importlib.util
import re
import shlex
from typing import Final

_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")
_INCLUDED: Final = re.compile(r"pagedserve\[([a-z,-]+)\]")


def requirements(extras: str) -> list[str]:
    """Requirements of extras, as ``torch>=2.6``; none without the package's metadata.

    Those of an extra that another includes, as ``pagedserve[serve]``, are listed by themselves.

    Args:
        extras: Names with commas between them.
    """
    try:
        listed = importlib.metadata.requires("pagedserve") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = []
    for extra in extras.split(","):
        marker = re.compile(rf"""extra\s*==\s*['"]{extra}['"]""")
        for line in filter(marker.search, listed):
            requirement = line.partition(";")[0].strip()
            included = _INCLUDED.fullmatch(requirement)
            found += requirements(included[1]) if included else [requirement]
    return list(dict.fromkeys(found))


def install_command(extras: str, module: str) -> str:
    """The command that installs extras; ``module`` alone where their packages are unknown."""
    return shlex.join(["pip", "install", *(requirements(extras) or [module])])


def check_installed(what: str, extras: str) -> None:
    """Check that the packages of extras are installed, without importing them.

    Args:
        what: Command or function that needs them.
        extras: Names with commas between them.

    Raises:
        ImportError: Names the missing packages and the command that installs them.
    """
    missing = [line for line in requirements(extras) if not _is_installed(_NAME.match(line))]
    if missing:
        names = ", ".join(re.split(r"[^\w.-]", line)[0] for line in missing)
        raise ImportError(
            f"{what} needs packages that are not installed ({names}): "
            f"{shlex.join(['pip', 'install', *missing])}"
        )


def absent_modules(*names: str) -> list[str]:
    """The modules of these top-level names that cannot be imported; imports none."""
    return [name for name in names if not _is_importable(name)]


def _is_importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # a finder that refuses it, a module without a spec
        return False


def _is_installed(name: re.Match[str] | None) -> bool:
    """Whether a package has metadata, or else a module of its name."""
    if name is None:
        return True
    try:
        importlib.metadata.distribution(name[0])
    except importlib.metadata.PackageNotFoundError:
        return importlib.util.find_spec(name[0].replace("-", "_")) is not None
    return True
