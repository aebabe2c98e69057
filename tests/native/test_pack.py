"""Packed rows of a file: against the `gguf` package and what torch's path packs."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pagedserve import StepError
from pagedserve._core.cpu import PackedWeights, instruction_sets, pack_layers
from pagedserve.models.fused.cpu.packing import pack, pack_gated, quantize
from pagedserve.native.stored import BLOCK_FORMATS, STORAGES

TYPES = {name: gguf.GGMLQuantizationType[name] for name in STORAGES}
DTYPES: dict[Any, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
DEPTH = 512
MIXED = ["Q4_K", "Q6_K", "Q5_0"]


def stored_rows(name: str, num_rows: int, seed: int) -> NDArray[np.uint8]:
    """Random rows, uint8 [rows, bytes], whose scales are finite and small."""
    random = np.random.default_rng(seed)
    weights, num_bytes = STORAGES[name]
    if weights == 1:
        numbers = random.normal(size=(num_rows, DEPTH)).astype(np.float32)
        kept: NDArray[Any] = gguf.quants.quantize(numbers, TYPES[name])
        return np.ascontiguousarray(kept).view(np.uint8).reshape(num_rows, -1)
    blocks = random.integers(0, 256, (num_rows, DEPTH // weights, num_bytes), np.uint8)
    scales = random.normal(scale=0.02, size=(*blocks.shape[:2], 2)).astype(np.float16)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(name, (0, 2))
    two = name in ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")
    for which, place in enumerate(places[: 1 + two]):
        blocks[..., place : place + 2] = scales[..., which : which + 1].view(np.uint8)
    return blocks.reshape(num_rows, -1)


def dequantized(rows: NDArray[np.uint8], name: str) -> NDArray[np.float32]:
    found: NDArray[np.float32] = gguf.quants.dequantize(rows, TYPES[name])
    return found.reshape(len(rows), DEPTH)


@contextmanager
def stored(parts: Sequence[tuple[NDArray[Any], str, int]]) -> Iterator[list[Any]]:
    """A file for each part, whose rows follow some other bytes; yields the parts' arguments."""
    with ExitStack() as stack:
        rows = []
        for numbers, name, size in parts:
            file = stack.enter_context(tempfile.TemporaryFile())
            file.write(bytes(5) + numbers.tobytes())
            file.flush()
            rows.append((file.fileno(), 5, len(numbers), name, None, size))
        yield rows


def byte_panels(sections: list[tuple[str, int]]) -> int:
    """Bytes of the panels of sections."""
    return sum(
        -(-num // 64) * 64 * DEPTH // STORAGES[name][0] * STORAGES[name][1]
        for name, num in sections
    )


def packed(
    parts: list[tuple[NDArray[np.uint8], str, int]], dtype: Any, **options: Any
) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
    num_rows = sum(len(rows) for rows, _, _ in parts)
    size = -(-num_rows // 64) * 64 * DEPTH
    scales = None
    sections = options.pop("sections", None)
    if sections is not None:
        panels: NDArray[Any] = np.full(byte_panels(sections), 7, np.uint8)
    elif options.pop("int8", False):
        panels = np.full(size, 7, np.int8)
        scales = np.zeros(num_rows, np.float32)
    else:
        panels = np.full(size * DTYPES[dtype].itemsize // 4, 7, np.uint32)
    is_gated = options.pop("is_gated", False)
    with stored(parts) as rows:
        layer = (panels, dtype, rows, DEPTH, is_gated, scales, sections)
        odd = pack_layers([layer], num_threads=2, **options)
    assert odd == [[0] * len(parts)]
    return panels, scales


def numbers_of(
    panels: NDArray[Any], num_rows: int, dtype: Any = "float32", **options: Any
) -> NDArray[np.float32]:
    """Rows of packed weights in float32, read back by the kernel."""
    weights = PackedWeights(
        panels, dtype=dtype, in_features=DEPTH, out_features=num_rows, **options
    )
    rows = torch.empty(num_rows, DEPTH, dtype=DTYPES[dtype])
    weights.gather(np.arange(num_rows, dtype=np.int32), rows.data_ptr())
    return rows.float().numpy()


@pytest.mark.parametrize("instructions", instruction_sets())
@pytest.mark.parametrize("name", STORAGES)
def test_dequantised_numbers_are_those_of_the_gguf_package(name: str, instructions: str) -> None:
    rows = stored_rows(name, 70, seed=len(name))
    panels, _ = packed([(rows, name, 0)], "float32", instructions=instructions)
    assert np.array_equal(numbers_of(panels, 70), dequantized(rows, name))


@pytest.mark.parametrize("dtype", DTYPES)
def test_panels_of_parts_are_those_of_torch(dtype: str) -> None:
    parts = [(stored_rows("Q6_K", 40, 1), "Q6_K", 0), (stored_rows("BF16", 50, 2), "BF16", 0)]
    whole = np.concatenate([dequantized(rows, name) for rows, name, _ in parts])
    panels, _ = packed(parts, dtype)
    expected = pack(torch.from_numpy(whole).to(DTYPES[dtype]))
    assert expected.nbytes == panels.nbytes
    again = numbers_of(panels, 90, dtype)
    assert np.array_equal(again, torch.from_numpy(whole).to(DTYPES[dtype]).float().numpy())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gated_layer_computes_what_torch_packs(dtype: Any) -> None:
    gate, up = (stored_rows(name, 96, seed) for name, seed in (("Q4_K", 3), ("F16", 4)))
    panels, _ = packed([(gate, "Q4_K", 0), (up, "F16", 0)], dtype, is_gated=True)
    ours = PackedWeights(panels, dtype=dtype, in_features=DEPTH, out_features=192, gate="silu")
    gates, ups = (
        torch.from_numpy(dequantized(rows, name)).to(DTYPES[dtype])
        for rows, name in ((gate, "Q4_K"), (up, "F16"))
    )
    theirs = pack_gated(gates, ups, "silu")
    x = torch.randn(3, DEPTH, generator=torch.Generator().manual_seed(5)).to(DTYPES[dtype])
    outputs = []
    for layer in (ours, theirs):
        output = torch.empty(3, 96)
        layer.multiply(
            num_rows=3,
            x=x.data_ptr(),
            x_stride=DEPTH,
            output=output.data_ptr(),
            output_stride=96,
            output_dtype="float32",
        )
        outputs.append(output)
    assert torch.equal(*outputs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_weights_are_those_of_torch(dtype: str) -> None:
    rows = stored_rows("Q5_1", 70, 6)
    rows[3] = 0
    panels, scales = packed([(rows, "Q5_1", 0)], dtype, int8=True)
    assert scales is not None
    expected = quantize(torch.from_numpy(dequantized(rows, "Q5_1")).to(DTYPES[dtype]))
    assert np.array_equal(scales, expected.scales.numpy())
    values = panels.reshape(2, DEPTH, 64).swapaxes(1, 2).reshape(128, DEPTH)
    assert np.array_equal(values[:70], expected.values.numpy())
    assert not values[70:].any()


def test_interleaved_heads_are_put_in_order() -> None:
    rows = stored_rows("Q8_0", 64, 7)
    panels, _ = packed([(rows, "Q8_0", 16)], "float32")
    heads = dequantized(rows, "Q8_0").reshape(4, 8, 2, DEPTH)
    assert np.array_equal(numbers_of(panels, 64), heads.swapaxes(1, 2).reshape(64, DEPTH))


@pytest.mark.parametrize("name", sorted(BLOCK_FORMATS))
def test_blocks_are_the_numbers_of_the_gguf_package(name: str) -> None:
    rows = stored_rows(name, 70, seed=9)
    sections = [(name, 70)]
    panels, _ = packed([(rows, name, 0)], "float32", sections=sections)
    found = numbers_of(panels, 70, sections=sections)
    assert np.array_equal(found, dequantized(rows, name))
    panels, _ = packed([(rows[:64], name, 16)], "float32", sections=[(name, 64)])
    heads = dequantized(rows[:64], name).reshape(4, 8, 2, DEPTH)
    found = numbers_of(panels, 64, sections=[(name, 64)])
    assert np.array_equal(found, heads.swapaxes(1, 2).reshape(64, DEPTH))


@pytest.mark.parametrize("instructions", instruction_sets())
@pytest.mark.parametrize("name", ["F32", "BF16", "Q4_1", "Q6_K", "Q2_K"])
def test_other_rows_become_the_q8_0_blocks_of_the_gguf_package(
    name: str, instructions: str
) -> None:
    numbers = np.random.default_rng(11).normal(size=(30, DEPTH)).astype(np.float32)
    stored_so = gguf.quants.quantize(numbers, TYPES["Q8_0"])
    parts = [(stored_rows(name, 40, 10), name, 0), (stored_so, "Q8_0", 0)]
    panels, _ = packed(parts, "float32", sections=[("Q8_0", 70)], instructions=instructions)
    made = gguf.quants.quantize(dequantized(parts[0][0], name), TYPES["Q8_0"])
    expected = dequantized(np.concatenate([made, stored_so]), "Q8_0")
    assert np.array_equal(numbers_of(panels, 70, sections=[("Q8_0", 70)]), expected)


def quantized(x: NDArray[np.float32]) -> NDArray[np.float64]:
    """Rows as multiples of a 127th of the largest magnitude of each 32 numbers."""
    groups = x.reshape(len(x), -1, 32).astype(np.float64)
    scales = np.abs(groups).max(axis=2, keepdims=True) / 127
    return np.asarray((np.round(groups / scales) * scales).reshape(x.shape))


@pytest.mark.parametrize("instructions", instruction_sets())
@pytest.mark.parametrize("names", [*([name] for name in sorted(BLOCK_FORMATS)), MIXED])
def test_products_are_those_of_quantized_rows(names: list[str], instructions: Any) -> None:
    parts = [(stored_rows(name, 64, seed), name, 0) for seed, name in enumerate(names)]
    sections = [(name, 64) for name in names]
    panels, _ = packed(parts, "float32", sections=sections, instructions=instructions)
    num_rows = 64 * len(names)
    layer = PackedWeights(
        panels,
        dtype="float32",
        in_features=DEPTH,
        out_features=num_rows,
        sections=sections,
    )
    held = numbers_of(panels, num_rows, sections=sections).astype(np.float64)
    x = np.random.default_rng(8).normal(size=(31, DEPTH)).astype(np.float32)
    output = np.empty((31, num_rows), np.float32)
    layer.multiply(
        num_rows=31,
        x=x.ctypes.data,
        x_stride=DEPTH,
        output=output.ctypes.data,
        output_stride=num_rows,
        output_dtype="float32",
        num_threads=2,
        instructions=instructions,
    )
    rows = quantized(x)
    magnitudes = np.abs(rows) @ np.abs(held.T)
    assert (np.abs(output - rows @ held.T) <= 1e-5 * magnitudes).all()


def test_numbers_that_are_not_finite_are_counted() -> None:
    numbers = np.ones((2, DEPTH), np.float32)
    numbers[1, 5:7] = np.nan, np.inf
    numbers[0, 0] = 1e30
    panels = np.zeros(64 * DEPTH // 2, np.uint32)
    with stored([(numbers[row : row + 1], "F32", 0) for row in range(2)]) as rows:
        layer: Any = (panels, "float16", rows, DEPTH, False, None, None)
        assert pack_layers([layer]) == [[1, 2]]


def test_several_layers_are_those_of_as_many_calls() -> None:
    parts = [(stored_rows("Q4_1", num_rows, num_rows), "Q4_1", 0) for num_rows in (64, 200, 3)]
    alone = [packed([part], "bfloat16")[0] for part in parts]
    together = [np.full_like(panels, 7) for panels in alone]
    with stored(parts) as rows:
        layers: Any = [
            (panels, "bfloat16", [part], DEPTH, False, None, None)
            for panels, part in zip(together, rows, strict=True)
        ]
        assert pack_layers(layers, num_threads=2) == [[0], [0], [0]]
    for left, right in zip(alone, together, strict=True):
        assert np.array_equal(left, right)


def test_a_file_that_ends_before_its_rows_is_an_error() -> None:
    rows = stored_rows("F32", 64, 8)
    with stored([(rows, "F32", 0)]) as ((file, offset, _, *rest),):
        layer: Any = (
            np.zeros(128 * DEPTH, np.uint32),
            "float32",
            [(file, offset, 65, *rest)],
            DEPTH,
            False,
            None,
            None,
        )
        with pytest.raises(OSError, match="ends before its rows"):
            pack_layers([layer])


def test_a_closed_file_is_an_error() -> None:
    rows = stored_rows("F32", 64, 8)
    with stored([(rows, "F32", 0)]) as stored_parts:
        pass
    layer: Any = (
        np.zeros(64 * DEPTH, np.uint32),
        "float32",
        stored_parts,
        DEPTH,
        False,
        None,
        None,
    )
    with pytest.raises(OSError, match="descriptor"):
        pack_layers([layer])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": []}, "must have a part"),
        ({"rows": [(-1, 0, 64, "F32", None, 0)]}, "the file descriptor"),
        ({"rows": [(9, 0, 64, "Q9", None, 0)]}, 'storage is "Q9"; it must be one of'),
        ({"rows": [(9, 0, -1, "F32", None, 0)]}, "number of rows"),
        ({"rows": [(9, 0, 64, "Q4_K", None, 0)], "in_features": 32}, "whole blocks of 256"),
        ({"panels": np.zeros(5, np.uint32)}, "must have 32768 elements"),
        ({"panels": np.zeros(5, np.int64)}, "uint32"),
        ({"is_gated": True}, "gated layer two"),
        ({"scales": np.zeros(3, np.float32)}, "int8"),
        ({"sections": [("Q9", 64)]}, 'format of a section is "Q9"; it must be one of'),
        ({"sections": [("Q8_0", 64)]}, "uint8"),
        (
            {"sections": [("Q8_0", 64)], "panels": np.zeros(5, np.uint8)},
            "must have 34816 bytes; got 5",
        ),
        (
            {"sections": [("Q4_0", 64)], "panels": np.zeros(18432, np.uint8)},
            "must be stored as Q4_0",
        ),
        (
            {
                "sections": [("Q8_0", 64)],
                "panels": np.zeros(34816, np.uint8),
                "scales": np.zeros(64, np.float32),
            },
            "scales must be 64 numbers for sections of I8Rows or I8Turned, and none for others",
        ),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {
        "panels": np.zeros(64 * DEPTH, np.uint32),
        "dtype": "float32",
        "rows": [(9, 0, 64, "F32", None, 0)],
        "in_features": DEPTH,
        "is_gated": False,
        "scales": None,
        "sections": None,
    } | change
    layer: Any = tuple(given.values())
    with pytest.raises(StepError, match=words):
        pack_layers([layer])
