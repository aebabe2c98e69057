"""Blocks of whole numbers with scales and zero points, against the weights in float64."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from pagedserve.native.grouped_weights import GroupedWeights


def grouped(
    bits: int, *, is_symmetric: bool, scale: float = 0.01, size: int = 64
) -> GroupedWeights:
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
        groups=np.repeat([1, 0, 2, 0, 1, 2], size)[:192],
    )


def numbers_of(storage: str, content: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Numbers of blocks by the gguf package, or by the definition of those of 64."""
    kind = storage.removesuffix("_64")
    if kind == storage:
        found: NDArray[np.float32] = gguf.quants.dequantize(content, Type[kind])
        return found
    header = {"Q4_0": 2, "Q4_1": 4}[kind]
    blocks = content.reshape(len(content), -1, header + 32)
    octets = blocks[..., header:]
    whole = np.concatenate([octets & 15, octets >> 4], axis=-1).astype(np.float32)
    halves = np.ascontiguousarray(blocks[..., :header]).view(np.float16).astype(np.float32)
    least = halves[..., 1:] if kind == "Q4_1" else -8 * halves
    return np.asarray((halves[..., :1] * whole + least).reshape(len(content), -1))


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("scale", [1e-6, 0.01, 4000.0])
@pytest.mark.parametrize(("bits", "is_symmetric"), [(4, True), (4, False), (8, True)])
def test_blocks_have_the_weights_of_the_numbers(
    bits: int, is_symmetric: bool, scale: float, size: int
) -> None:
    weights = grouped(bits, is_symmetric=is_symmetric, scale=scale, size=size)
    scales, zeros = (each[:, weights.groups] for each in (weights.scales, weights.zeros))
    exact = scales.astype(np.float64) * (weights.numbers.astype(np.int64) - zeros)
    storage, content = weights.blocks()
    assert storage.endswith("_64") == (bits == 4 and size == 64)
    found = numbers_of(storage, content)
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
