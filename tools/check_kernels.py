"""Compare the CPU kernels with numpy in float64, for each instruction set that this CPU has.

It needs numpy and an installed wheel alone, so it also runs where torch does not, as in an emulator
of another architecture.
"""

import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagedserve._core import cpu

if TYPE_CHECKING:
    from pagedserve._core.cpu import _InstructionSet

Numbers: TypeAlias = NDArray[np.float64]
Dtype: TypeAlias = Literal["float32", "bfloat16", "float16"]

# Relative to the largest number of a result: sums are made in float32, results are rounded.
BOUNDS: dict[Dtype, float] = {"float32": 4e-6, "bfloat16": 2.0**-7, "float16": 2.0**-10}


def main() -> None:
    """Compare, and print a line an instruction set."""
    for instructions in cpu.instruction_sets():
        results = dict(errors(instructions))
        wrong = {name: error for name, error in results.items() if not error <= 1}
        if wrong:
            raise SystemExit(f"{instructions}: errors in units of what is allowed: {wrong}")
        print(f"{instructions}: {len(results)} results, all near those of numpy")


def errors(instructions: "_InstructionSet") -> Iterator[tuple[str, float]]:
    """Name and error of each comparison, in units of what is allowed."""
    random = np.random.default_rng(1)
    for dtype in BOUNDS:
        for num_rows in (1, 2, 5, 7, 30):
            for is_int8 in (False, True):
                name = f"product of {num_rows} rows, {dtype}{', int8' * is_int8}"
                yield name, product_error(random, dtype, num_rows, instructions, is_int8=is_int8)
        for num_tokens in (1, 3, 37, 150):
            yield (
                f"attention of {num_tokens} tokens, {dtype}",
                attention_error(random, dtype, num_tokens, instructions),
            )
        yield f"norm, {dtype}", norm_error(random, dtype, instructions)


def stored(numbers: Numbers, dtype: Dtype) -> NDArray[np.uint8 | np.uint16 | np.float32]:
    """Numbers as the kernels read them."""
    if dtype == "float32":
        return np.ascontiguousarray(numbers, np.float32)
    if dtype == "float16":
        return np.ascontiguousarray(numbers, np.float16).view(np.uint16)
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def loaded(memory: NDArray[np.uint8 | np.uint16 | np.float32], dtype: Dtype) -> Numbers:
    """Numbers that lie in memory."""
    if dtype == "bfloat16":
        return (memory.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return memory.view(dtype).astype(np.float64)


def rounded(numbers: Numbers, dtype: Dtype) -> Numbers:
    """The nearest numbers of a dtype."""
    return loaded(stored(numbers, dtype), dtype)


def distance(found: Numbers, exact: Numbers, bound: float) -> float:
    """The largest error in units of what is allowed; not a number if a result is none."""
    return float(np.abs(found - exact).max() / (bound * np.abs(exact).max()))


def product_error(
    random: np.random.Generator,
    dtype: Dtype,
    num_rows: int,
    instructions: "_InstructionSet",
    *,
    is_int8: bool,
) -> float:
    """Rows times packed weights with a bias."""
    depth, num_features = 402, 150
    x = random.normal(size=(num_rows, depth))
    rows = random.normal(size=(num_features, depth)).astype(np.float32)
    bias = random.normal(size=num_features).astype(np.float32)
    units = -(-num_features // 64) * 64 * depth
    scales = np.zeros(num_features, np.float32) if is_int8 else None
    panels: NDArray[np.int8 | np.uint32] = np.zeros(units, np.int8)
    if not is_int8:
        panels = np.zeros(units if dtype == "float32" else units // 2, np.uint32)
    with tempfile.TemporaryFile() as file:
        file.write(rows.tobytes())
        file.flush()
        parts = [(file.fileno(), 0, num_features, "F32", None, 0)]
        layer = (panels, dtype, parts, depth, False, scales, None)
        cpu.pack_layers([layer], instructions=instructions)
    packed = cpu.PackedWeights(
        panels,
        dtype=dtype,
        in_features=depth,
        out_features=num_features,
        scales=scales,
        bias=bias,
    )
    given, output = stored(x, dtype), np.full((num_rows, num_features), np.nan, np.float32)
    packed.multiply(
        num_rows=num_rows,
        x=given.ctypes.data,
        x_stride=depth,
        output=output.ctypes.data,
        output_stride=num_features,
        output_dtype="float32",
        num_threads=2,
        instructions=instructions,
    )
    held = rounded(rows.astype(np.float64), dtype)
    if scales is not None:
        held = np.rint(held / scales[:, None]) * scales[:, None]
    # Not `@`: BLAS has kernels for each CPU, which are wrong in some emulators.
    exact = np.einsum("tk,nk->tn", loaded(given, dtype), held) + bias
    # A number next to the middle of two whole ones may become either.
    bound = 2e-3 if is_int8 else BOUNDS["float32"]
    return distance(output.astype(np.float64), exact, bound)


def attention_error(
    random: np.random.Generator, dtype: Dtype, num_tokens: int, instructions: "_InstructionSet"
) -> float:
    """Causal attention of one prompt, written into a pool of scattered blocks."""
    num_heads, num_kv_heads, size, block_size = 6, 2, 64, 16
    query = rounded(random.normal(size=(num_tokens, num_heads, size)), dtype)
    key, value = (
        rounded(random.normal(size=(num_tokens, num_kv_heads, size)), dtype) for _ in range(2)
    )
    num_blocks = -(-num_tokens // block_size)
    table = random.permutation(num_blocks).astype(np.int32)
    places = np.arange(num_tokens)
    slots = table[places // block_size].astype(np.int64) * block_size + places % block_size
    arrays = [stored(numbers, dtype) for numbers in (query, key, value)]
    pool = np.zeros(num_blocks * block_size * num_kv_heads * 2 * size, arrays[0].dtype)
    output = np.zeros((num_tokens, num_heads, size), arrays[0].dtype)
    cpu.paged_attention(
        dtype=dtype,
        query=arrays[0].ctypes.data,
        query_strides=(num_heads * size, size),
        key=arrays[1].ctypes.data,
        key_strides=(num_kv_heads * size, size),
        value=arrays[2].ctypes.data,
        value_strides=(num_kv_heads * size, size),
        pool=pool.ctypes.data,
        output=output.ctypes.data,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        key_size=size,
        value_size=size,
        num_blocks=num_blocks,
        block_size=block_size,
        block_tables=table,
        query_start=np.array([0, num_tokens], np.int32),
        seq_lens=np.array([num_tokens], np.int32),
        slot_mapping=slots,
        scale=size**-0.5,
        num_threads=2,
        instructions=instructions,
    )
    group = num_heads // num_kv_heads
    scores = np.einsum("thd,shd->hts", query, key.repeat(group, 1)) * size**-0.5
    scores[:, *np.triu_indices(num_tokens, 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    exact = np.einsum("hts,shd->thd", weights, value.repeat(group, 1))
    return distance(loaded(output, dtype), exact, BOUNDS[dtype])


def norm_error(random: np.random.Generator, dtype: Dtype, instructions: "_InstructionSet") -> float:
    """The RMS norm of some rows."""
    x, weight = random.normal(size=(5, 100)), random.normal(size=100).astype(np.float32)
    given = stored(x, dtype)
    output = np.zeros_like(given)
    cpu.rms_norm(
        dtype=dtype,
        num_rows=len(x),
        x=given.ctypes.data,
        output=output.ctypes.data,
        weight=weight,
        epsilon=1e-5,
        instructions=instructions,
    )
    held = loaded(given, dtype)
    exact = held / np.sqrt((held**2).mean(-1, keepdims=True) + 1e-5) * weight
    return distance(loaded(output, dtype), exact, BOUNDS[dtype])


if __name__ == "__main__":
    main()
