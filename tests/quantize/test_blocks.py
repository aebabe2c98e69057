"""Blocks as the gguf package reads them, beside those that it makes."""

from collections.abc import Callable

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pagedserve.quantize.blocks import q4_1, q8_0


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
    assert np.array_equal(q8_0(weights), gguf.quants.quantize(weights, Type.Q8_0))


# At a scale of 1000, an outlier may pass the largest float16, and the package warns of its minimum.
@given(st.integers(0, 1000), st.sampled_from([1e-4, 0.03, 1.0, 500.0]))
def test_no_block_of_q4_1_is_worse_than_that_of_the_gguf_package(seed: int, scale: float) -> None:
    weights = rows(seed, scale)
    ours = errors(weights, q4_1(weights))
    theirs = errors(weights, gguf.quants.quantize(weights, Type.Q4_1))
    assert (ours <= theirs * 1.0001 + 1e-12).all()


def test_q4_1_has_smaller_errors() -> None:
    weights = np.random.default_rng(3).standard_normal((64, 512)).astype(np.float32)
    theirs = errors(weights, gguf.quants.quantize(weights, Type.Q4_1)).sum()
    assert errors(weights, q4_1(weights)).sum() < 0.9 * theirs


@pytest.mark.parametrize(("kind", "round_weights"), [(Type.Q8_0, q8_0), (Type.Q4_1, q4_1)])
@pytest.mark.parametrize("scale", [1e-41, 1e-12, 60_000.0])
def test_scales_at_the_ends_of_float16(
    kind: Type, round_weights: Callable[[NDArray[np.float32]], NDArray[np.uint8]], scale: float
) -> None:
    weights = np.linspace(-scale, scale, 64, dtype=np.float32)[None]
    found = gguf.quants.dequantize(round_weights(weights), kind)
    assert np.abs(found - weights).max() <= max(scale / 15, 1e-7)
