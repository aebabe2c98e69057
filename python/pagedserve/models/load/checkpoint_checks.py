"""Checks of a checkpoint's files against the model that they are loaded into.

transformers casts any dtype, initializes missing weights before it reports them, and refers to a
report that is not shown.  Here each is an error that names the weight.

Costs: reading the headers of the files, and a sum over each weight (0.1 s for a model of 500 MB).
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel

from pagedserve.errors import ModelLoadError
from pagedserve.models.load.weight_files import weight_files
from pagedserve.regular_files import MAX_SAFETENSORS_HEADER_BYTES, read_start

# The first bytes of a safetensors file are the length of its header.
_LENGTH_BYTES: Final = 8
# Held while a method of transformers' class is patched: one load at a time.
_LOADING: Final = RLock()
_DENSE: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def check_dtypes(name: str, directory: Path, model: PreTrainedModel) -> None:
    """Check that a model's weights are floating-point numbers in the files, too.

    Args:
        name: Name of the model in errors.
        directory: Directory of the files.
        model: Model loaded from them; not quantized.

    Raises:
        ModelLoadError: A weight has another type, or occurs twice in a file.
    """
    others = {
        tensor: dtype
        for tensor, dtype in _tensors_of(name, directory)
        if not dtype.lower().startswith(("f", "bf"))
    }
    if not others:
        return
    weights = [weight for weight, _ in model.named_parameters()]
    for tensor, dtype in sorted(others.items()):
        if tensor.endswith(".weight") or any(_is_same(tensor, weight) for weight in weights):
            raise ModelLoadError(
                f"model {name!r}: its files have {tensor!r} as {dtype}, which is no floating-point "
                "type, and config.json has no quantization_config that would define it"
            )


def _is_same(tensor: str, weight: str) -> bool:
    """Whether two names are of one weight, with or without a prefix."""
    return f".{tensor}".endswith(f".{weight}") or f".{weight}".endswith(f".{tensor}")


def _tensors_of(name: str, directory: Path) -> Iterator[tuple[str, str]]:
    """Names and dtypes in the files with a model's weights, in the spelling of each format."""
    for file in weight_files(directory):
        if file.suffix == ".safetensors":
            yield from _header(name, file)
        else:
            content: Any = torch.load(file, map_location="meta", weights_only=True)
            for tensor, value in content.items():
                if isinstance(value, torch.Tensor):
                    yield tensor, str(value.dtype).removeprefix("torch.")


def _header(name: str, file: Path) -> list[tuple[str, str]]:
    """Names and dtypes in a safetensors file that was read already."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = [key for key, number in Counter(key for key, _ in pairs).items() if number > 1]
        if twice:
            raise ModelLoadError(f"model {name!r}: {file.name} has {twice[0]!r} twice")
        return dict(pairs)

    num_bytes = int.from_bytes(read_start(file, _LENGTH_BYTES), "little")
    start = read_start(file, _LENGTH_BYTES + min(num_bytes, MAX_SAFETENSORS_HEADER_BYTES))
    header = json.loads(start[_LENGTH_BYTES:], object_pairs_hook=unique)
    return [
        (tensor, str(entry["dtype"]))
        for tensor, entry in header.items()
        if tensor != "__metadata__"
    ]


def check_finite(name: str, model: nn.Module) -> None:
    """Check that all numbers of all weights are finite.

    Args:
        name: Name of the model in errors.
        model: Loaded model; quantized or shared weights are skipped.

    Raises:
        ModelLoadError: Names the weight, and how many numbers are not finite.
    """
    for weight, parameter in model.named_parameters():
        numbers = parameter.detach()
        if type(parameter) is not nn.Parameter or parameter.dtype not in _DENSE:
            continue
        # A sum of finite numbers may be infinite; one with other numbers is never finite.
        if not torch.isfinite(numbers.sum(dtype=torch.float32)):
            num_odd = int((~torch.isfinite(numbers)).sum())
            if num_odd:
                raise ModelLoadError(
                    f"model {name!r}: {num_odd} of the {numbers.numel()} numbers of {weight!r} are "
                    "infinite or no numbers: its files are damaged, or it was saved in a dtype "
                    "that is too narrow"
                )


@contextmanager
def checked_loading(name: str, unused: tuple[str, ...]) -> Iterator[None]:
    """A context in which transformers neither initializes missing weights nor hides its report.

    Args:
        name: Name of the model in errors.
        unused: Prefixes of the names of weights that may be missing.
    """
    model_class: Any = PreTrainedModel

    def finalize(model: PreTrainedModel, load_config: Any, loading_info: Any) -> Any:
        _check_shapes(name, loading_info.mismatched_keys)
        _check_conversions(name, loading_info.conversion_errors)
        check_present(name, _untied(model, loading_info.missing_keys), unused)
        return own(model, load_config, loading_info)

    with _LOADING:
        own = model_class._finalize_model_loading  # noqa: SLF001  # whose report is not shown
        model_class._finalize_model_loading = staticmethod(finalize)  # noqa: SLF001
        try:
            yield
        finally:
            model_class._finalize_model_loading = staticmethod(own)  # noqa: SLF001


def check_present(name: str, missing: set[str], unused: tuple[str, ...] = ()) -> None:
    """Check that only unused weights are missing.

    Raises:
        ModelLoadError: Weights are missing; names the first and the number.
    """
    needed = sorted(weight for weight in missing if not weight.startswith(unused))
    if needed:
        raise ModelLoadError(
            f"model {name!r}: its files lack {len(needed)} of the model's weights, the first is "
            f"{needed[0]!r}"
        )


def _untied(model: PreTrainedModel, missing: set[str]) -> set[str]:
    """Missing weights that are not tied to others in the files."""
    tied: Mapping[str, str] = model.all_tied_weights_keys
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    ignored = model._keys_to_ignore_on_load_missing or []  # noqa: SLF001  # set by classes
    found = (missing & weights) - tied.keys() - set(tied.values())
    return {name for name in found if not any(re.search(pattern, name) for pattern in ignored)}


def _check_shapes(name: str, mismatched: set[tuple[str, Any, Any]]) -> None:
    for weight, found, expected in sorted(mismatched, key=lambda entry: entry[0]):
        raise ModelLoadError(
            f"model {name!r}: {weight!r} is {tuple(found)} in its files, and config.json makes it "
            f"{tuple(expected)}; {len(mismatched) - 1} more do not fit"
        )


def _check_conversions(name: str, failed: Mapping[str, str]) -> None:
    for weight, why in sorted(failed.items()):
        reason = " ".join(str(why).split())[-300:]
        raise ModelLoadError(f"model {name!r}: {weight!r} cannot be made of its files: {reason}")
