"""``LoRARequest``: the LoRA adapter of a request."""

import os
import re
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from typing import Final

import pagedserve.checks as checks
from pagedserve.errors import RequestError
from pagedserve.regular_files import MAX_PATH_CHARACTERS

MAX_NAME_CHARACTERS: Final = 256

_SEPARATORS: Final = re.compile(r"[/\\]")
_positive_id = checks.integer("at least 1", low=1)


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter, by a name, an id and the directory of its files.

    Attributes:
        lora_name: Display name: at most 256 printable characters, no ``..`` between slashes.
        lora_int_id: Id, at least 1; each id belongs to one path.
        lora_path: Local directory as saved by peft's ``save_pretrained``, or a hub id; at most
            4,096 characters.
        base_model_name: Name of the model that it was trained on, for information; at most 256
            printable characters.
        load_inplace: Assign the id to this path from now on, replacing another one.

    Modified files are detected: later requests use their new contents.

    Raises:
        RequestError: A value is invalid.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    lora_local_path: InitVar[str | None] = None  # former name of lora_path
    long_lora_max_len: InitVar[None] = None
    base_model_name: str | None = None
    tensorizer_config_dict: InitVar[None] = None
    load_inplace: bool = False

    def __post_init__(
        self,
        lora_local_path: str | None,
        long_lora_max_len: None,
        tensorizer_config_dict: None,
    ) -> None:
        """Check the values."""
        for name, value in (
            ("long_lora_max_len", long_lora_max_len),
            ("tensorizer_config_dict", tensorizer_config_dict),
        ):
            if value is not None:
                checks.refuse(name, value, "None")
        path = self.lora_path or lora_local_path
        if isinstance(path, os.PathLike):
            path = os.fspath(path)
        check_name("lora_name", self.lora_name)
        checks.optional(_printable)("base_model_name", self.base_model_name)
        checks.flag("load_inplace", self.load_inplace)
        object.__setattr__(self, "lora_path", _path("lora_path", path))
        object.__setattr__(self, "lora_int_id", _positive_id("lora_int_id", self.lora_int_id))

    @property
    def name(self) -> str:
        """Alias of ``lora_name``."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """Alias of ``lora_int_id``."""
        return self.lora_int_id

    @property
    def path(self) -> str:
        """Alias of ``lora_path``."""
        return self.lora_path


def check_name(name: str, value: object) -> str:
    """Check the name of an adapter, which logs, metrics and the list of models show.

    Args:
        name: Name of the parameter, for errors.
        value: Value given.

    Raises:
        RequestError: It is empty, too long, not printable, or has ``..`` between slashes.
    """
    text = _printable(name, value)
    if ".." in _SEPARATORS.split(text):
        checks.refuse(name, text, "a name without .. between slashes")
    return text


def _printable(name: str, value: object) -> str:
    accepted = f"1 to {MAX_NAME_CHARACTERS} printable characters"
    if isinstance(value, str) and len(value) > MAX_NAME_CHARACTERS:
        given = f"{value[:40]}... ({len(value)} characters)"
        checks.refuse(name, given, accepted)
    text = checks.text(name, value)
    if not text.isprintable():
        checks.refuse(name, text, accepted)
    return text


def _path(name: str, value: object) -> str:
    """Check a path."""
    if isinstance(value, str) and (len(value) > MAX_PATH_CHARACTERS or "\0" in value):
        given = f"{value[:40]}... ({len(value)} characters)"
        checks.refuse(name, given, f"at most {MAX_PATH_CHARACTERS} characters without NUL")
    return checks.text(name, value)


def match_lora_requests(
    lora_request: LoRARequest | Sequence[LoRARequest | None] | None, num_prompts: int
) -> list[LoRARequest | None]:
    """Match adapters to prompts: one for all, or one or None each.

    Raises:
        RequestError: A number that differs from that of prompts, or not ``LoRARequest``.
    """
    if lora_request is None or isinstance(lora_request, LoRARequest):
        return [lora_request] * num_prompts
    accepted = "one LoRARequest for all prompts or a list with one, or None, a prompt"
    listed = checks.each(_optional_request, accepted)("lora_request", lora_request)
    if len(listed) != num_prompts:
        raise RequestError(
            f"{len(listed)} in lora_request for {num_prompts} prompts; it must be {accepted}",
            param="lora_request",
        )
    return list(listed)


def check_lora_request(name: str, value: object) -> LoRARequest:
    """Check the adapter of a request.

    Raises:
        RequestError: Any other value.
    """
    if not isinstance(value, LoRARequest):
        checks.refuse(name, value, "a LoRARequest or None")
    return value


def _optional_request(name: str, value: object) -> LoRARequest | None:
    return None if value is None else check_lora_request(name, value)
