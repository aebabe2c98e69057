"""Faults of processes; docs/faults.md says what a server does in each."""

from pathlib import Path
from typing import Final

import pytest

from tests.hostile.faults import FAULTS, Fault
from tests.hostile.model import save_byte_llama

# A start of a server each; those that take longer, and the rest of their kinds, are slow.
QUICK: Final = ("few_descriptors", "unread_outputs")


@pytest.fixture(scope="module")
def byte_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_llama(tmp_path_factory.mktemp("byte_llama"))


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            fault, id=fault.__name__, marks=() if fault.__name__ in QUICK else pytest.mark.slow
        )
        for fault in FAULTS
    ],
)
def test_a_server_lives_through(fault: Fault, byte_llama: Path, tmp_path: Path) -> None:
    fault(byte_llama, tmp_path)
