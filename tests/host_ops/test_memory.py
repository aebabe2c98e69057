"""Memory that is freed goes back to the system, also from between tensors that stay."""

import subprocess
import sys
from pathlib import Path

import torch

from pagedserve.host_ops.heap import return_freed_memory
from tests.support.doc_blocks import ROOT

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


def test_what_another_thread_freed_goes_back_where_one_heap_is_shared() -> None:
    code = """
from concurrent.futures import ThreadPoolExecutor

import psutil

from pagedserve.host_ops.heap import return_freed_memory, share_one_heap

share_one_heap()
process, mib = psutil.Process(), 1 << 20
with ThreadPoolExecutor(1) as pool:
    pool.submit(lambda: b"x" * (30 * mib) and None).result()  # smaller ones are in the heap now
    before = process.memory_info().rss
    pool.submit(lambda: [b"x" * mib for _ in range(32)] and None).result()
    return_freed_memory()
    assert process.memory_info().rss - before < 8 * mib
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
