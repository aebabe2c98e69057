"""Blocks as the gguf package reads them, beside those that it makes."""

from typing import Any, Literal

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pagedserve._core import cpu
from pagedserve.errors import StepError
from pagedserve.native.rounding import rounded_to_blocks


def rows(seed: int, scale: float) -> NDArray[np.float32]:
    """Rows of ordinary weights, of outliers, of one number and of none."""
    numbers = np.random.default_rng(seed).standard_normal((6, 96)).astype(np.float32)
    numbers[1, ::17] *= 20
    numbers[2] = numbers[2, 0]
    numbers[3, 32:64] = 0
    return numbers * np.float32(scale)


def errors(weights: NDArray[np.float32], stored: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Sum of squared errors of each block of Q4_1."""
    found = gguf.quants.dequantize(stored, Type.Q4_1).astype(np.float64)
    blocks: NDArray[np.float64] = np.square(found - weights).reshape(-1, 32).sum(axis=1)
    return blocks


@given(st.integers(0, 1000), st.sampled_from([1e-4, 0.03, 1.0, 1000.0]))
def test_q8_0_has_the_bytes_of_the_gguf_package(seed: int, scale: float) -> None:
    weights = rows(seed, scale)
    assert np.array_equal(
        rounded_to_blocks(weights, "Q8_0"), gguf.quants.quantize(weights, Type.Q8_0)
    )


# At a scale of 1000, an outlier may pass the largest float16, and the package warns of its minimum.
@given(st.integers(0, 1000), st.sampled_from([1e-4, 0.03, 1.0, 500.0]))
def test_no_block_of_q4_1_is_worse_than_that_of_the_gguf_package(seed: int, scale: float) -> None:
    weights = rows(seed, scale)
    ours = errors(weights, rounded_to_blocks(weights, "Q4_1"))
    theirs = errors(weights, gguf.quants.quantize(weights, Type.Q4_1))
    assert (ours <= theirs * 1.0001 + 1e-12).all()


def test_q4_1_has_smaller_errors() -> None:
    weights = np.random.default_rng(3).standard_normal((64, 512)).astype(np.float32)
    theirs = errors(weights, gguf.quants.quantize(weights, Type.Q4_1)).sum()
    assert errors(weights, rounded_to_blocks(weights, "Q4_1")).sum() < 0.9 * theirs


@pytest.mark.parametrize("blocks", ["Q8_0", "Q4_1"])
@pytest.mark.parametrize("scale", [1e-41, 1e-12, 60_000.0])
def test_scales_at_the_ends_of_float16(blocks: Literal["Q8_0", "Q4_1"], scale: float) -> None:
    weights = np.linspace(-scale, scale, 64, dtype=np.float32)[None]
    found = gguf.quants.dequantize(rounded_to_blocks(weights, blocks), Type[blocks])
    assert np.abs(found - weights).max() <= max(scale / 15, 1e-7)


@pytest.mark.parametrize(("storage", "num_bytes"), [("Q8_0", 34), ("Q4_1", 20)])
def test_blocks_are_the_same_with_any_instructions(
    storage: Literal["Q8_0", "Q4_1"], num_bytes: int
) -> None:
    weights = rows(5, 0.3)
    expected = rounded_to_blocks(weights, storage).reshape(-1)
    found = np.empty(weights.size // 32 * num_bytes, np.uint8)
    for instructions in cpu.instruction_sets():
        cpu.round_to_blocks(weights.reshape(-1), storage, found, instructions=instructions)
        assert np.array_equal(found, expected), instructions


@pytest.mark.parametrize(
    ("storage", "num_weights", "num_bytes", "words"),
    [
        ("Q4_K", 256, 144, "blocks must be Q8_0 or Q4_1; got Q4K"),
        ("F32", 32, 128, 'storage is "F32"; it must be one of'),
        ("Q8_0", 48, 34, "whole blocks of 32, and the output 34 bytes; got 48 and 34"),
        ("Q4_1", 64, 34, "whole blocks of 32, and the output 40 bytes; got 64 and 34"),
    ],
)
def test_what_cannot_be_rounded_is_refused(
    storage: Any, num_weights: int, num_bytes: int, words: str
) -> None:
    numbers, blocks = np.zeros(num_weights, np.float32), np.zeros(num_bytes, np.uint8)
    with pytest.raises(StepError, match=words):
        cpu.round_to_blocks(numbers, storage, blocks)
