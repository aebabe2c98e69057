"""Compile the Triton kernels ahead of time, without a GPU: registers, shared memory and spills.

    python benches/python/compile_kernels.py                       # everything
    python benches/python/compile_kernels.py --head-sizes 128 --dtypes bfloat16 --kernels decode

It fails if a kernel spills, or takes more of a multiprocessor than there is.  The launches run on
small tensors in host memory, and triton compiles what they ask for, with the specialisations of a
real launch, for a device that is only named.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, TypeVar, get_args
from unittest.mock import patch

os.environ.pop("TRITON_INTERPRET", None)  # read when a kernel is decorated

import torch
import triton
from measuring import report_table
from triton.backends.compiler import GPUTarget

from pagedserve.kernels import cache, decode, layer, lora, masks, prefill, swap
from pagedserve.kernels.call import AttentionCall
from pagedserve.kernels.pools import pool_parts
from pagedserve.kernels.tuning import Config, Kernel, config_for

NUM_HEADS, NUM_KV_HEADS = 32, 8
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# KiB of shared memory: what a program may take, and what a multiprocessor has, of which each
# program takes 1 KiB more than it asked for (CUDA programming guide, "Compute Capabilities").
SHARED_KIB = {80: (163, 164), 90: (227, 228), 100: (227, 228)}
# Registers of a multiprocessor; a warp gets them in pieces of 256.
REGISTERS = 65536
# Columns of Blackwell's memory for sums of products.
TENSOR_COLUMNS = 512
# What multiplies tiles, the newest first.
PRODUCTS = ("tcgen05.mma", "wgmma.mma_async", "mma.sync")
WIDE_LOAD = re.compile(r"ld\.global[.:\w]*\.(v4\.b32|v2\.b64)|cp\.async[.\w]* \[.*, 0x10")
Name = TypeVar("Name", bound=str)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {
        "window": 4096,
        "softcap": 50.0,
        "sinks": torch.zeros(NUM_HEADS),
        "alibi": torch.zeros(NUM_HEADS),
    },
}
# Pools of bytes, and the least capability for which they are compiled.  Under queries in float32
# some tiles of them spill, which costs time alone: they are compiled for the others.
BYTES = {
    "int8": (torch.int8, 80),
    "e5m2": (torch.float8_e5m2, 80),
    "e4m3": (torch.float8_e4m3fn, 90),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """What is compiled: a kernel for a device, a dtype and a head size, with some options."""

    kernel: str
    sm: int
    dtype: str
    head: int
    options: str


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a kernel takes; ``local_bytes`` of a thread are 0 unless registers spill.

    ``config`` is None for kernels that have one.  ``product`` is the instruction that multiplies
    tiles, and ``tensor_columns`` what it takes of Blackwell's memory for their sums.  ``is_wide``
    says whether memory is read in pieces of 16 bytes a thread.
    """

    shape: Shape
    config: Config | None
    num_warps: int
    registers: int
    shared_bytes: int
    tensor_columns: int
    local_bytes: int
    product: str
    is_wide: bool

    def faults(self) -> list[str]:
        """What is wrong with it; nothing, if it runs as the table says."""
        resident = 1 if self.config is None else self.config.resident
        most, there = SHARED_KIB[self.shape.sm]
        shared, registers = self.shared_bytes / 1024, -(-self.registers // 8) * 8 * 32
        found = {
            f"spills {self.local_bytes} bytes": self.local_bytes > 0,
            f"takes {shared} of {most} KiB": shared > most,
            f"{resident} at a time take more than {there} KiB": resident * (shared + 1) > there,
            f"{resident} at a time take more than {REGISTERS} registers": (
                resident * self.num_warps * registers > REGISTERS
            ),
            f"{resident} at a time take more than {TENSOR_COLUMNS} columns": (
                resident * self.tensor_columns > TENSOR_COLUMNS
            ),
        }
        return [fault for fault, is_true in found.items() if is_true]


class NamedDevice:
    """Stands in for the driver where there is no device: triton asks it what to compile for."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        """What triton compiles for."""
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        """A number of its own for each capability: triton remembers kernels by it."""
        return self._capability

    def get_current_stream(self, device: int) -> int:
        """Any: nothing is launched."""
        return device


class Compiler:
    """A kernel whose launches are compiled and not run."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.compiled: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_launch(*args: Any, **kwargs: Any) -> None:
            self.compiled.append(self._kernel.run(*args, grid=grid, warmup=True, **kwargs))

        return compile_launch


@contextmanager
def compiling(module: Any, name: str, capability: int) -> Iterator[list[Any]]:
    """Compile what is launched of one kernel while the block runs."""
    compiler = Compiler(getattr(module, name))
    triton.runtime.driver.set_active(NamedDevice(capability))
    with patch.object(module, name, compiler):
        yield compiler.compiled


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory of each thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {name: int(number) for name, number in re.findall(r"\b([A-Z]+):(\d+)", text)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def attention_call(shape: Shape) -> AttentionCall:
    """One row over a pool of the engine's layout, small: only its strides count."""
    dtype = getattr(torch, shape.dtype)
    stored, extra = (BYTES[shape.options][0], 4) if shape.options in BYTES else (dtype, 0)
    pool = torch.zeros(2, 16, NUM_KV_HEADS, 2 * shape.head + extra, dtype=stored)
    parts = pool_parts(pool, shape.head)
    query = torch.zeros(1, NUM_HEADS, shape.head, dtype=dtype)
    options = {"window": None, "softcap": None, "sinks": None, "alibi": None}
    return AttentionCall(
        output=torch.empty_like(query),
        query=query,
        key_cache=parts.keys,
        value_cache=parts.values,
        cache_scales=parts.scales,
        block_tables=torch.zeros(1, 2, dtype=torch.int32),
        query_start=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([32], dtype=torch.int32),
        scale=0.1,
        causal=True,
        max_query_len=1,
        max_seq_len=4096,
        **{**options, **OPTIONS.get(shape.options, {})},
    )


def compile_attention(shape: Shape, kernel: Kernel) -> Compiled:
    """Compile an attention kernel with the table's configuration, for its widest tile."""
    config = config_for(
        kernel,
        head_size=shape.head,
        itemsize=getattr(torch, shape.dtype).itemsize,
        capability=shape.sm // 10,
        stores_bytes=shape.options in BYTES,
    )
    call = attention_call(shape)
    if kernel in {"prefill", "prefill_plain"}:
        with compiling(prefill, "_prefill_kernel", shape.sm) as compiled:
            prefill.launch(call, config, skipped=1)
    else:
        with (
            compiling(decode, "_merge_kernel", shape.sm),
            compiling(decode, "_decode_kernel", shape.sm) as compiled,
        ):
            decode.launch(call, config, queries=config.rows // call.group)
    return measured(shape, compiled, config)


def compile_move(shape: Shape) -> Compiled:
    """Compile a kernel that writes or moves."""
    call = attention_call(shape)
    pool = torch.zeros(2, 16, NUM_KV_HEADS, 2 * shape.head, dtype=call.query.dtype)
    key, slot = call.query[:, :NUM_KV_HEADS], torch.zeros(1, dtype=torch.int64)
    pairs = torch.tensor([[0, 1]])
    module = swap if shape.kernel == "stage" else cache
    with compiling(module, f"_{shape.kernel}_kernel", shape.sm) as compiled:
        if shape.kernel == "write":
            caches = call.key_cache, call.value_cache
            cache.write_cache(key, key, *caches, slot, cache_scales=call.cache_scales)
        elif shape.kernel == "copy":
            cache.copy_blocks(pool, pairs)
        else:
            swap.BlockSwapper([pool], 2).swap_out(pairs)
    return measured(shape, compiled, None)


def compile_layer(shape: Shape) -> Compiled:
    """Compile a kernel that stands between products; of a layer as wide as its heads together."""
    dtype = getattr(torch, shape.dtype)
    rows = torch.zeros(1, NUM_HEADS * shape.head, dtype=dtype)
    with compiling(layer, f"_{shape.kernel}_kernel", shape.sm) as compiled:
        if shape.kernel == "add_norm":
            layer.add_norm(rows, rows, rows[0], 1e-5)
        elif shape.kernel == "swiglu":
            layer.swiglu(torch.zeros(1, 7 * NUM_HEADS * shape.head, dtype=dtype))
        else:
            call, head = attention_call(shape), rows[:, : shape.head]
            layer.rotate_and_write(
                torch.zeros(1, (NUM_HEADS + 2 * NUM_KV_HEADS) * shape.head, dtype=dtype),
                head,
                head,
                call.key_cache,
                call.value_cache,
                torch.zeros(1, dtype=torch.int64),
                query_norm=head[0] if shape.options == "all" else None,
                key_norm=head[0] if shape.options == "all" else None,
            )
    return measured(shape, compiled, None)


def compile_adapters(shape: Shape) -> Compiled:
    """Compile a kernel of adapters of rank 64: one row, or with all options many."""
    dtype, width = getattr(torch, shape.dtype), NUM_HEADS * shape.head
    num_rows = 1 if shape.options == "plain" else 2 * lora.FEW_ROWS
    rows = torch.zeros(num_rows, width, dtype=dtype)
    weights = torch.zeros(2, width, 64, dtype=dtype)
    rest = (
        torch.zeros(2, 1, dtype=torch.int32),
        torch.tensor([0, width], dtype=torch.int32),
        torch.zeros(3, dtype=torch.int32),
        torch.zeros(num_rows, dtype=torch.int32),
    )
    names = {"shrink", "look_up", "expand"} - {shape.kernel}
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(compiling(lora, f"_{name}_kernel", shape.sm))
        compiled = stack.enter_context(compiling(lora, f"_{shape.kernel}_kernel", shape.sm))
        if shape.kernel == "look_up":
            lora.add_embedding_adapters(rows, rest[-1], weights, weights, *rest)
        else:
            lora.add_adapters(rows, rows, weights.view(2, 1, 64, width), weights, *rest)
    return measured(shape, compiled, None)


def compile_masks(shape: Shape) -> Compiled:
    """Compile the kernel of masked rows; their logits are float32 whatever the model is."""
    logits, packed = torch.zeros(1, 4096), torch.zeros(1, 128, dtype=torch.int32)
    with compiling(masks, f"_{shape.kernel}_kernel", shape.sm) as compiled:
        masks.masked_argmax(logits, packed)
    return measured(shape, compiled, None)


def measured(shape: Shape, compiled: Sequence[Any], config: Config | None) -> Compiled:
    """What the one compiled kernel takes."""
    [binary] = compiled
    registers, local_bytes = resources(binary.asm["cubin"])
    return Compiled(
        shape=shape,
        config=config,
        num_warps=binary.metadata.num_warps,
        registers=registers,
        shared_bytes=binary.metadata.shared,
        tensor_columns=binary.metadata.tmem_size or 0,
        local_bytes=local_bytes,
        product=next((name for name in PRODUCTS if name in binary.asm["ptx"]), ""),
        is_wide=WIDE_LOAD.search(binary.asm["ptx"]) is not None,
    )


def table_rows(results: Sequence[Compiled]) -> list[dict[str, Any]]:
    """What is printed: one line a kernel."""
    return [
        {
            **asdict(compiled.shape),
            "rows": compiled.config and compiled.config.rows,
            "keys": compiled.config and compiled.config.key_tile,
            "warps": compiled.num_warps,
            "stages": compiled.config and compiled.config.num_stages,
            "registers": compiled.registers,
            "shared KiB": round(compiled.shared_bytes / 1024, 2),
            "columns": compiled.tensor_columns,
            "local bytes": compiled.local_bytes,
            "product": compiled.product,
            "16-byte loads": "yes" if compiled.is_wide else "no",
            "faults": "; ".join(compiled.faults()),
        }
        for compiled in results
    ]


def named(names: tuple[Name, ...], wanted: str | None) -> list[Name]:
    """The names that were asked for."""
    return [name for name in names if wanted is None or name in wanted.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head-sizes", default="64,80,96,128,256")
    parser.add_argument("--dtypes", default="bfloat16,float16,float32")
    parser.add_argument("--capabilities", default="80,90,100")
    parser.add_argument("--kernels", help="only these")
    parser.add_argument("--options", help="of attention and writes, only these")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(arguments)
    print(f"triton {triton.__version__}, torch {torch.__version__}")
    results = []
    for capability, dtype, head in product(
        options.capabilities.split(","), options.dtypes.split(","), options.head_sizes.split(",")
    ):
        stored = [
            name
            for name, (_, least) in BYTES.items()
            if int(capability) >= least and dtype != "float32"
        ]
        results += [
            compile_attention(Shape(kernel, int(capability), dtype, int(head), name), kernel)
            for kernel in named(get_args(Kernel), options.kernels)
            for name in named((*OPTIONS, *stored), options.options)
            if not (kernel == "prefill_plain" and name == "all")
        ]
        results += [
            compile_move(Shape(kernel, int(capability), dtype, int(head), name))
            for kernel in named(("write", "copy", "stage"), options.kernels)
            for name in named(("plain", *stored), options.options)
            if kernel == "write" or name == "plain"
        ]
        results += [
            compile_layer(Shape(kernel, int(capability), dtype, int(head), name))
            for kernel in named(("add_norm", "rotate_and_write", "swiglu"), options.kernels)
            for name in OPTIONS
            if kernel == "rotate_and_write" or name == "plain"
        ]
        results += [
            compile_adapters(Shape(kernel, int(capability), dtype, int(head), name))
            for kernel in named(("shrink", "look_up", "expand"), options.kernels)
            for name in OPTIONS
        ]
        results += [
            compile_masks(Shape(kernel, int(capability), dtype, int(head), "plain"))
            for kernel in named(("masked_argmax",), options.kernels)
        ]
    results.sort(key=lambda compiled: compiled.shape.kernel)
    report_table("compiled", table_rows(results), as_json=options.json)
    num_faulty = sum(bool(compiled.faults()) for compiled in results)
    print(f"{len(results)} kernels, {num_faulty} of them spill or do not fit")
    sys.exit(num_faulty > 0)


if __name__ == "__main__":
    main()
