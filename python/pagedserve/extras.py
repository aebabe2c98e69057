"""The packages of extras: which of them are missing, and the command that installs them.

The installed package's metadata lists them, so a printed command needs no published release.  It is
read here, because importlib.metadata imports parsers of messages, archives and dates: 30 ms of a
start.
"""

import importlib.util
import re
import shlex
import sys
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Final

_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")
_INCLUDED: Final = re.compile(r"pagedserve\[([a-z,-]+)\]")
# Folder of a package's metadata beside its modules, as ``prometheus_client-0.21.1.dist-info``.
_METADATA: Final = re.compile(r"([^-]+)(?:-.*)?\.(?:dist|egg)-info")
_REQUIRES: Final = "Requires-Dist:"


def requirements(extras: str) -> list[str]:
    """Requirements of extras, as ``torch>=2.6``; none without the package's metadata.

    Those of an extra that another includes, as ``pagedserve[serve]``, are listed by themselves.

    Args:
        extras: Names with commas between them.
    """
    folder = _metadata_folders().get("pagedserve")
    return [] if folder is None else _requirements(extras, list(_listed(folder / "METADATA")))


def _requirements(extras: str, listed: list[str]) -> list[str]:
    found = []
    for extra in extras.split(","):
        marker = re.compile(rf"""extra\s*==\s*['"]{extra}['"]""")
        for line in filter(marker.search, listed):
            requirement = line.partition(";")[0].strip()
            included = _INCLUDED.fullmatch(requirement)
            found += _requirements(included[1], listed) if included else [requirement]
    return list(dict.fromkeys(found))


def _metadata_folders() -> dict[str, Path]:
    """Folders of the installed packages' metadata, by normalized name; the first found is used."""
    found: dict[str, Path] = {}
    for entry in sys.path:
        try:
            names = [path.name for path in Path(entry).iterdir()]
        except OSError:  # an archive, or nothing
            continue
        for match in filter(None, map(_METADATA.fullmatch, names)):
            found.setdefault(_normalized(match[1]), Path(entry, match[0]))
    return found


def _normalized(name: str) -> str:
    """Name of a package, of which several spellings are equal."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _listed(path: Path) -> Iterator[str]:
    """Requirements in a file of metadata, with their markers; its first empty line ends them."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        if not line:
            return
        if line.startswith(_REQUIRES):
            yield line.removeprefix(_REQUIRES).strip()


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
    installed = _metadata_folders()
    missing = [
        line
        for line in requirements(extras)
        if (name := _NAME.match(line)) and not _is_installed(name[0], installed)
    ]
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


def _is_installed(name: str, installed: Container[str]) -> bool:
    """Whether a package has metadata, or else a module of its name."""
    return _normalized(name) in installed or _is_importable(name.replace("-", "_"))
