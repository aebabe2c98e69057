"""Blocks of whole numbers with scales and zero points, against the weights in float64."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from pagedserve.native.grouped_weights import GroupedWeights


def grouped(bits: int, *, is_symmetric: bool, scale: float = 0.01) -> GroupedWeights:
    random = np.random.default_rng(bits)
    zeros = random.integers(0, 16, (70, 3))
    if is_symmetric:
        zeros = np.full((70, 3), 1 << (bits - 1))
    scales = (scale * random.uniform(0.1, 1, (70, 3))).astype(np.float16)
    return GroupedWeights(
        bits=bits,
        numbers=random.integers(0, 1 << bits, (70, 192), np.uint8),
        scales=scales.astype(np.float32),
        zeros=zeros.astype(np.int16),
        groups=np.repeat([1, 0, 2], 64),
    )


@pytest.mark.parametrize("scale", [1e-6, 0.01, 4000.0])
@pytest.mark.parametrize(("bits", "is_symmetric"), [(4, True), (4, False), (8, True)])
def test_blocks_have_the_weights_of_the_numbers(
    bits: int, is_symmetric: bool, scale: float
) -> None:
    weights = grouped(bits, is_symmetric=is_symmetric, scale=scale)
    scales, zeros = (each[:, weights.groups] for each in (weights.scales, weights.zeros))
    exact = scales.astype(np.float64) * (weights.numbers.astype(np.int64) - zeros)
    storage, content = weights.blocks()
    found = gguf.quants.dequantize(content, Type[storage])
    # A float16 minimum is rounded by half of its last bit.
    bound = 0.0 if is_symmetric else 2.0**-11
    assert (np.abs(found - exact) <= (bound * zeros + 1e-6) * scales).all()
    assert np.array_equal(weights.floats(), exact.astype(np.float32))


@pytest.mark.parametrize("scale", [1e-7, 1e5, np.inf, np.nan])
def test_scales_that_float16_does_not_hold_have_no_blocks(scale: float) -> None:
    weights = grouped(4, is_symmetric=True)
    weights.scales[3, 1] = scale
    assert weights.obstacle() == "whose scales do not fit float16"
    with pytest.raises(ValueError, match="scales do not fit float16"):
        weights.blocks()


def test_a_minimum_that_float16_does_not_hold_has_no_block() -> None:
    weights = grouped(4, is_symmetric=False)
    weights.scales[3, 1], weights.zeros[3, 1] = 8192, 8
    assert weights.obstacle() == "whose scales do not fit float16"
