"""``LoRARequest``: which adapter a request is to be answered with."""

import os
from collections.abc import Sequence
from dataclasses import InitVar, dataclass

import pagedserve.checks as checks
from pagedserve.errors import RequestError

_positive_id = checks.integer("at least 1", low=1)


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter, by a name, a number and the directory of its files.

    Attributes:
        lora_name: What people call it.
        lora_int_id: Its number, at least 1; one number stands for one path.
        lora_path: A local directory as peft's ``save_pretrained`` leaves it, or the hub id of one.
        base_model_name: What it was trained on, for people.
        load_inplace: Let the number stand for this path from now on, whatever it stood for.

    Files that change are seen: later requests are answered with what is in them then.

    Raises:
        RequestError: A value that cannot be.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    lora_local_path: InitVar[str | None] = None  # what lora_path was called once
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
        """Check it."""
        for name, value in (
            ("long_lora_max_len", long_lora_max_len),
            ("tensorizer_config_dict", tensorizer_config_dict),
        ):
            if value is not None:
                checks.refuse(name, value, "None")
        path = self.lora_path or lora_local_path
        if isinstance(path, os.PathLike):
            path = os.fspath(path)
        checks.text("lora_name", self.lora_name)
        checks.flag("load_inplace", self.load_inplace)
        object.__setattr__(self, "lora_path", checks.text("lora_path", path))
        object.__setattr__(self, "lora_int_id", _positive_id("lora_int_id", self.lora_int_id))

    @property
    def name(self) -> str:
        """``lora_name``."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """``lora_int_id``."""
        return self.lora_int_id

    @property
    def path(self) -> str:
        """``lora_path``."""
        return self.lora_path


def match_lora_requests(
    lora_request: LoRARequest | Sequence[LoRARequest | None] | None, num_prompts: int
) -> list[LoRARequest | None]:
    """One adapter a prompt, or None for the model alone: one for all, or one each.

    Raises:
        RequestError: Not as many as prompts, or something else than ``LoRARequest``.
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
    """The adapter of a request that has one.

    Raises:
        RequestError: Something else.
    """
    if not isinstance(value, LoRARequest):
        checks.refuse(name, value, "a LoRARequest or None")
    return value


def _optional_request(name: str, value: object) -> LoRARequest | None:
    return None if value is None else check_lora_request(name, value)
