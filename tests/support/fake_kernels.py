"""The border where Triton kernels are launched: arguments are checked, and nothing is computed."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

# What kernels read as whole numbers of that width, and sums that they keep.
DTYPES = {
    "block_tables": torch.int32,
    "query_start": torch.int32,
    "seq_lens": torch.int32,
    "slot_mapping": torch.int64,
    "pairs": torch.int64,
    "blocks": torch.int64,
    "layers": torch.int64,
    "staging": torch.int64,
    "partial_values": torch.float32,
    "partial_sums": torch.float32,
    "ranks": torch.int32,
    "features": torch.int32,
    "starts": torch.int32,
    "order": torch.int32,
    "hidden": torch.float32,
    "logits": torch.float32,
    "masks": torch.int32,
    "peaks": torch.float32,
}
# Of a launch: programs in each dimension.
MAX_GRID = (2**31 - 1, 65535, 65535)
# Alike in dtype: what is multiplied, and what is written beside each other.
FAMILIES = [
    ("query", "key_cache", "value_cache", "output", "key", "value", "qkv"),
    ("x", "a", "table"),
    ("output", "b"),
]


class CheckedKernel:
    """Stands in for a kernel: a launch is checked against what the kernel reads."""

    def __init__(self, name: str, kernel: Any, device: torch.device, launches: list[str]) -> None:
        self._name = name
        self._names = list(inspect.signature(kernel.fn).parameters)
        self._device = device
        self._launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            given = dict(zip(self._names, args, strict=False))
            given |= {name: value for name, value in options.items() if name in self._names}
            assert list(given) == self._names or set(given) == set(self._names)
            for size, most in zip(grid, MAX_GRID, strict=False):
                assert 0 < size <= most, f"{self._name} is launched over {grid}"
            self._check(given, grid)
            self._launches.append(self._name)

        return launch

    def _check(self, given: dict[str, Any], grid: tuple[int, ...]) -> None:
        for name, value in given.items():
            if isinstance(value, Tensor):
                assert value.device == self._device, f"{self._name}: {name} is on {value.device}"
                expected = DTYPES.get(name, value.dtype)
                assert value.dtype == expected, f"{self._name}: {name} is {value.dtype}"
                assert value.numel() == 0 or value.stride(-1) == 1, f"{name} is scattered"
        for family in FAMILIES:
            dtypes = {given[name].dtype for name in family if name in given}
            assert len(dtypes) <= 1, f"{self._name} mixes {dtypes}"
        if "query_start" in given:
            num_rows = given["seq_lens"].shape[0]
            assert given["query_start"].shape == (num_rows + 1,)
            if "block_tables" in given:
                assert given["block_tables"].shape[0] == num_rows
                assert given["table_stride"] == given["block_tables"].stride(0)
        if "slot_mapping" in given:
            num_tokens = given["slot_mapping"].shape[0]
            assert grid[0] % num_tokens == 0
            for name in ("key", "value", "qkv", "cosines", "sines"):
                if name in given:
                    assert given[name].shape[0] == num_tokens, f"{name} is {given[name].shape}"
        _check_slots(given)
        if "partial_sums" in given and given["num_splits"] > 1:
            sums = given["partial_sums"]
            assert sums.shape[1] == given["num_splits"]
            assert sums.shape[0] % (given["seq_lens"].shape[0] * given["queries"]) == 0


def _check_slots(given: dict[str, Any]) -> None:
    """What kernels of adapters read for each slot."""
    if "starts" in given:
        assert given["starts"].shape == (given["NUM_SLOTS"] + 1,)
    if "ranks" in given:
        assert len(given["ranks"]) == given["NUM_SLOTS"]


def _kernel_modules() -> list[ModuleType]:
    from pagedserve.kernels import cache, decode, layer, lora, masks, prefill, swap

    return [cache, decode, layer, lora, masks, prefill, swap]


@contextmanager
def checked_kernels(
    device: torch.device, *, capability: int = 9, num_multiprocessors: int = 132
) -> Iterator[list[str]]:
    """Check every launch while the block runs; gives their names, in order."""
    launches: list[str] = []
    properties = SimpleNamespace(major=capability, multi_processor_count=num_multiprocessors)
    with pytest.MonkeyPatch.context() as patch:
        for module in _kernel_modules():
            for name, kernel in list(vars(module).items()):
                if name.endswith("_kernel") and hasattr(kernel, "fn"):
                    patch.setattr(module, name, CheckedKernel(name, kernel, device, launches))
        patch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
        yield launches
