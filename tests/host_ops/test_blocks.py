"""Copies of blocks in host memory against the plain-torch ones."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pagedserve.errors import StepError
from pagedserve.host_ops.blocks import copy_blocks
from pagedserve.kernels import reference

SHAPES = [(3, 2, 6), (16, 1, 128), (1, 1, 1)]  # blocks of layers


def pools(num_blocks: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(num_blocks, *shape).to(dtype) for shape in SHAPES]


@st.composite
def pairs(draw: st.DrawFn, num_sources: int, num_destinations: int) -> NDArray[np.int64]:
    destinations = draw(st.lists(st.integers(0, num_destinations - 1), unique=True))
    sources = [draw(st.integers(0, num_sources - 1)) for _ in destinations]
    return np.array([sources, destinations], dtype=np.int64).T.copy().reshape(-1, 2)


@given(moved=pairs(9, 9), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_copies_within_pools_read_all_sources_first(
    moved: NDArray[np.int64], dtype: torch.dtype
) -> None:
    found = pools(9, dtype)
    expected = [pool.clone() for pool in found]
    copy_blocks(found, found, moved)
    for ours, theirs in zip(found, expected, strict=True):
        reference.copy_blocks(theirs, torch.from_numpy(moved))
        assert torch.equal(ours, theirs)


@given(moved=pairs(9, 5))
def test_copies_to_other_pools(moved: NDArray[np.int64]) -> None:
    sources, found = pools(9, torch.float32), pools(5, torch.float32)
    expected = [pool.clone() for pool in found]
    copy_blocks(sources, found, moved)
    for source, ours, theirs in zip(sources, found, expected, strict=True):
        reference.swap_blocks(source, theirs, torch.from_numpy(moved))
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("pair", [(9, 0), (0, 5), (-1, 0)])
def test_a_block_that_is_not_there_is_refused_and_nothing_is_copied(pair: tuple[int, int]) -> None:
    sources, found = pools(9, torch.float32), pools(5, torch.float32)
    before = [pool.clone() for pool in found]
    with pytest.raises(StepError, match=r"must name blocks below 9 and 5|a block of pairs"):
        copy_blocks(sources, found, np.array([(1, 1), pair]))
    assert all(torch.equal(ours, old) for ours, old in zip(found, before, strict=True))


@pytest.mark.parametrize("shape", [(2, 3), (3, 3)])
def test_pairs_in_another_order_are_refused(shape: tuple[int, int]) -> None:
    found = pools(9, torch.float32)
    before = [pool.clone() for pool in found]
    moved = np.arange(shape[0] * shape[1]).reshape(shape)
    for wrong in (moved, moved.T):
        with pytest.raises(StepError, match="pairs must be contiguous, two block ids a row"):
            copy_blocks(found, found, wrong)
    assert all(torch.equal(ours, old) for ours, old in zip(found, before, strict=True))


def test_pairs_of_another_type_are_refused() -> None:
    found = pools(3, torch.float32)
    with pytest.raises(TypeError):
        copy_blocks(found, found, np.array([[0, 1]], dtype=np.int32))
    with pytest.raises(StepError, match="contiguous, two block ids a row"):
        copy_blocks(found, found, np.zeros((1, 3), dtype=np.int64))
