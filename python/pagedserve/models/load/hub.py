"""Model repositories on the Hugging Face Hub or on ModelScope, and their download.

Cached files are used without a request.  Hubs are accessed through their libraries, which cache the
files and read the variables of their environment (``HF_HOME``, ``HF_ENDPOINT``,
``HF_HUB_OFFLINE``, ``MODELSCOPE_CACHE``, ``MODELSCOPE_ENDPOINT`` and so on).
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from pagedserve.config import EngineArgs
from pagedserve.errors import ModelLoadError, extra_needed
from pagedserve.models.load.progress import say

# Required part of a repository.
Part = Literal["model", "config", "tokenizer", "adapter"]

USE_MODELSCOPE: Final = "PAGEDSERVE_USE_MODELSCOPE"
_MODELSCOPE_MAIN: Final = "master"
# Timeout of the first request to a hub, so that a machine without network fails quickly.
_TIMEOUT_SECONDS: Final = 10.0

_TEXTS: Final = (".json", ".model", ".txt", ".jinja")
_CHAT_TEMPLATES: Final = "additional_chat_templates/"
ADAPTER_FILES: Final = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubOptions:
    """Revision of a repository, and options of its download.

    Attributes:
        revision: branch, tag or commit; None is the main branch.
        token: access token; None is the one of the hub's library.
        download_dir: directory for files; None is the library's cache.
    """

    revision: str | None = None
    token: str | None = None
    download_dir: str | None = None

    @classmethod
    def of_model(cls, args: EngineArgs) -> "HubOptions":
        """Options for the model."""
        return cls(revision=args.revision, token=args.hf_token, download_dir=args.download_dir)

    @classmethod
    def of_adapters(cls, args: EngineArgs) -> "HubOptions":
        """Options for adapters, which use the main branch."""
        return cls(token=args.hf_token, download_dir=args.download_dir)

    @classmethod
    def of_tokenizer(cls, args: EngineArgs) -> "HubOptions":
        """Options for the tokenizer."""
        own = args.revision if args.tokenizer is None else None
        revision = args.tokenizer_revision or own
        return cls(revision=revision, token=args.hf_token, download_dir=args.download_dir)


class HuggingFace:
    """The Hugging Face Hub, or the one at ``HF_ENDPOINT``.

    Attributes:
        name: readable name.
    """

    name = "the Hugging Face Hub"

    def __init__(self, options: HubOptions) -> None:
        """Store the options; makes no request."""
        self._options = options

    def cached(self, repo_id: str, file_name: str) -> Path:
        """Return the directory of cached files; raises any exception if there is none.

        Args:
            repo_id: as owner/name.
            file_name: a file that every such repository has.
        """
        # Without the whole listing the library does not know whether all files are cached.
        return self._snapshot(repo_id, file_names=[file_name], local_files_only=True)

    def file_names(self, repo_id: str) -> Sequence[str]:
        """Paths of all files of a repository; raises any exception if there are none."""
        from huggingface_hub import HfApi

        info = HfApi(token=self._options.token).model_info(
            repo_id, revision=self._options.revision, timeout=_TIMEOUT_SECONDS
        )
        return [file.rfilename for file in info.siblings or ()]

    def fetch(self, repo_id: str, file_names: Sequence[str]) -> Path:
        """Download these files of a repository; return the directory."""
        return self._snapshot(repo_id, file_names=file_names)

    def _snapshot(
        self, repo_id: str, *, file_names: Sequence[str], local_files_only: bool = False
    ) -> Path:
        from huggingface_hub import snapshot_download

        from pagedserve.models.load.bars import DownloadBar

        directory = snapshot_download(
            repo_id,
            revision=self._options.revision,
            token=self._options.token,
            cache_dir=self._options.download_dir,
            allow_patterns=list(file_names),
            local_files_only=local_files_only,
            tqdm_class=DownloadBar,
        )
        return Path(directory)


class ModelScope:
    """ModelScope, or the one at ``MODELSCOPE_ENDPOINT``."""

    name = "ModelScope"

    def __init__(self, options: HubOptions) -> None:
        """Store the options; makes no request.

        Raises:
            ImportError: its library is not installed.
        """
        with extra_needed(USE_MODELSCOPE, "modelscope"):
            from modelscope_hub import HubApi
        self._options = options
        # Always set: for a repository without that branch the library would take any other.
        self._revision = options.revision or _MODELSCOPE_MAIN
        self._api = HubApi(token=options.token)

    def cached(self, repo_id: str, file_name: str) -> Path:  # noqa: ARG002  # unused here
        """Return the directory of cached files; raises any exception if there is none."""
        return self._download(repo_id, local_files_only=True)

    def file_names(self, repo_id: str) -> Sequence[str]:
        """Paths of all files of a repository; raises any exception if there are none."""
        files = self._api.list_repo_files(repo_id, "model", revision=self._revision)
        return [file.path for file in files if not file.is_dir]

    def fetch(self, repo_id: str, file_names: Sequence[str]) -> Path:
        """Download these files of a repository; return the directory."""
        return self._download(repo_id, file_names=file_names)

    def _download(
        self,
        repo_id: str,
        *,
        file_names: Sequence[str] | None = None,
        local_files_only: bool = False,
    ) -> Path:
        directory = self._api.download_repo(
            repo_id,
            "model",
            revision=self._revision,
            cache_dir=self._options.download_dir,
            allow_patterns=None if file_names is None else list(file_names),
            local_files_only=local_files_only,
        )
        return Path(directory)


Hub: TypeAlias = HuggingFace | ModelScope


def snapshot(
    name: str, repo_id: str, part: Part, options: HubOptions, check: Callable[[Path], None]
) -> Path:
    """Return the directory of a repository's files, downloading them unless cached.

    Args:
        name: name that the user gave.
        repo_id: as owner/name.
        part: required part of it.
        options: revision and download options.
        check: raises ``ModelLoadError`` if the part is incomplete.

    Raises:
        ModelLoadError: it cannot be downloaded, or lacks required files.
        ImportError: ModelScope is selected and its library is not installed.
    """
    hub: Hub = ModelScope(options) if uses_modelscope() else HuggingFace(options)
    file_name = ADAPTER_FILES[0] if part == "adapter" else "config.json"
    cached = _cached(hub, repo_id, file_name, check)
    if cached is not None:
        return cached
    fetched = _fetch(hub, name, repo_id, part, options)
    check(fetched)
    return fetched


def _cached(hub: Hub, repo_id: str, file_name: str, check: Callable[[Path], None]) -> Path | None:
    """Directory of cached files; None if they are missing or incomplete."""
    try:
        directory = hub.cached(repo_id, file_name)
        check(directory)
    except Exception:  # noqa: BLE001  # each library has different types
        return None
    return directory


def _fetch(hub: Hub, name: str, repo_id: str, part: Part, options: HubOptions) -> Path:
    try:
        needed = needed_files(hub.file_names(repo_id), part)
        revision = options.revision or "the main branch"
        say(f"fetching {len(needed)} files of {repo_id} ({revision}) from {hub.name}")
        return hub.fetch(repo_id, needed)
    except Exception as error:  # network, authorization, offline mode: many unrelated types
        reason = " ".join(str(error).split()) or type(error).__name__
        what = "adapter" if part == "adapter" else "model"
        raise ModelLoadError(
            f"{what} {name!r} is not a path, not in the hub cache, and fetching hub id {repo_id!r} "
            f"from {hub.name} failed: {reason}; accepted are a path, or a hub id whose files are "
            "in the cache or can be fetched"
        ) from error


def uses_modelscope() -> bool:
    """Whether hub ids are those of ModelScope.

    Raises:
        ModelLoadError: the environment variable has an invalid value.
    """
    value = os.environ.get(USE_MODELSCOPE, "")
    if value.lower() not in ("", "0", "1", "false", "true"):
        raise ModelLoadError(f"{USE_MODELSCOPE} is {value!r}; it must be 1, 0, true or false")
    return value.lower() in ("1", "true")


def needed_files(names: Sequence[str], part: Part) -> list[str]:
    """Files of a repository that are read.

    Excludes weights in the formats of other programs, duplicate weights, and everything in folders
    (``original/``, ``onnx/``) except chat templates and the config of pooling.
    """
    top = [name for name in names if "/" not in name and not name.startswith("consolidated")]
    if part == "adapter":
        return [name for name in top if name in ADAPTER_FILES]
    texts = [name for name in top if name.endswith(_TEXTS) or name.startswith("tokenizer.model")]
    texts = [name for name in texts if not name.endswith(".index.json")]
    templates = [
        name for name in names if name.startswith(_CHAT_TEMPLATES) and name.endswith(".jinja")
    ]
    pooling = [name for name in names if name.endswith("_Pooling/config.json")]
    return [*texts, *templates, *pooling, *(_weights(top) if part == "model" else ())]


def _weights(top: Sequence[str]) -> list[str]:
    for single, start, end in (
        ("model.safetensors", "", ".safetensors"),
        ("pytorch_model.bin", "pytorch_model", ".bin"),
    ):
        if single in top:
            return [single]
        shards = [
            name
            for name in top
            if name.startswith(start) and name.endswith(end) and not name.startswith("adapter_")
        ]
        if shards:
            return [*shards, *(name for name in top if name == f"{single}.index.json")]
    return []
