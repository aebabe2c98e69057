"""Memory that is freed goes back to the system, also from between tensors that stay."""

from pathlib import Path

import torch

from pagedserve.host_ops.heap import return_freed_memory

MIB = 1 << 20


def resident_bytes() -> int:
    """What the system holds for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def test_freed_tensors_among_others_go_back() -> None:
    torch.ones(30 * MIB, dtype=torch.uint8)  # once freed, smaller ones are kept in the heap
    before = resident_bytes()
    tensors = [torch.ones(4 * MIB, dtype=torch.uint8) for _ in range(32)]
    del tensors[::2]
    return_freed_memory()
    assert resident_bytes() - before < sum(tensor.nbytes for tensor in tensors) + 16 * MIB
