"""The allocators and the evictor as classes of their own."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from pagedserve._core import (
    CachedBlockAllocator,
    LRUEvictor,
    Prefix,
    UncachedBlockAllocator,
)
from pagedserve.errors import ConfigError, RequestError


def ids(*token_ids: int) -> NDArray[np.int32]:
    return np.array(token_ids, dtype=np.int32)


def test_blocks_are_handed_out_until_none_is_left_and_come_back() -> None:
    allocator = UncachedBlockAllocator(3)
    blocks = [allocator.allocate() for _ in range(3)]
    assert sorted(blocks, key=str) == [0, 1, 2]
    assert allocator.allocate() is None
    allocator.fork(1)
    allocator.free(1)
    assert (allocator.ref_count(1), allocator.num_free) == (1, 0)
    allocator.free(1)
    assert allocator.allocate() == 1


@pytest.mark.parametrize("make", [UncachedBlockAllocator, lambda n: CachedBlockAllocator(n, 2)])
def test_blocks_that_are_free_or_are_not_there_are_refused(
    make: Callable[[int], UncachedBlockAllocator | CachedBlockAllocator],
) -> None:
    allocator = make(2)
    block = allocator.allocate()
    assert block is not None
    other = 1 - block
    for act in (allocator.free, allocator.fork):
        with pytest.raises(RequestError, match=f"block {other} is free"):
            act(other)
        for missing in (-1, 2, 2**40):
            with pytest.raises(RequestError, match=f"there is no block {missing} among 2"):
                act(missing)
    allocator.free(block)
    with pytest.raises(RequestError, match="is free"):
        allocator.free(block)
    assert allocator.num_free == allocator.num_total == 2


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_blocks is -1"):
        UncachedBlockAllocator(-1)
    with pytest.raises(RequestError, match="block_size is 0"):
        CachedBlockAllocator(4, 0)
    with pytest.raises(RequestError, match="at most"):
        UncachedBlockAllocator(2**40)
    for block_size in (2**40, 2**60):
        with pytest.raises(ConfigError, match=f"no memory for 4 blocks with {block_size} tokens"):
            CachedBlockAllocator(4, block_size)


def cached_chain(allocator: CachedBlockAllocator, *blocks: NDArray[np.int32]) -> list[int]:
    """Registers a prefix of new blocks."""
    prefix = Prefix.root()
    chain: list[int] = []
    for token_ids in blocks:
        block = allocator.allocate(2 * (len(chain) + 1))
        assert block is not None
        prefix = allocator.register(block, prefix, token_ids)
        chain.append(block)
    return chain


def test_a_freed_prefix_is_found_again_and_given_up_from_its_end() -> None:
    allocator = CachedBlockAllocator(3, 2)
    first, second = cached_chain(allocator, ids(1, 2), ids(3, 4))
    allocator.mark_computed(first)
    allocator.free(second, last_access=5)
    allocator.free(first, last_access=5)
    assert (allocator.num_free, allocator.num_cached) == (3, 2)
    assert allocator.find(Prefix.root(), ids(1, 2)) == first
    taken = {allocator.allocate(), allocator.allocate()}
    assert taken == {2, second}  # the blank one, then the end of the prefix
    allocator.acquire(first)
    assert allocator.is_computed(first)
    prefix = allocator.prefix_of(first)
    assert prefix is not None
    assert allocator.find(prefix, ids(3, 4)) is None


def test_tokens_before_adapter_and_salt_must_all_agree() -> None:
    allocator = CachedBlockAllocator(4, 2)
    cached_chain(allocator, ids(1, 2), ids(3, 4))
    assert allocator.find(Prefix.root(), ids(1, 3)) is None
    assert allocator.find(Prefix.root(), ids(3, 4)) is None
    assert allocator.find(Prefix.root(adapter=1), ids(1, 2)) is None
    assert allocator.find(Prefix.root(salt=1), ids(1, 2)) is None


def test_what_cannot_be_registered_or_acquired_is_refused() -> None:
    allocator = CachedBlockAllocator(4, 2)
    (known,) = cached_chain(allocator, ids(1, 2))
    block = allocator.allocate()
    assert block is not None
    with pytest.raises(RequestError, match=f"block {known} holds this prefix already"):
        allocator.register(block, Prefix.root(), ids(1, 2))
    for token_ids in (ids(), ids(1, 2, 3)):
        with pytest.raises(RequestError, match=r"tokens for a block of 1 to 2"):
            allocator.register(block, Prefix.root(), token_ids)
    with pytest.raises(RequestError, match="holds nothing"):
        allocator.acquire(3)
    assert not allocator.reset()
    allocator.free(block)
    allocator.free(known)
    assert allocator.reset()
    assert allocator.find(Prefix.root(), ids(1, 2)) is None


def test_the_evictor_goes_by_age_then_depth_then_order() -> None:
    evictor = LRUEvictor()
    for block, last_access, num_tokens in ((7, 2, 16), (3, 1, 16), (4, 1, 48), (5, 1, 48)):
        evictor.add(block, last_access, num_tokens)
    with pytest.raises(RequestError, match="block 4 was already added"):
        evictor.add(4, 9, 9)
    evictor.remove(5)
    with pytest.raises(RequestError, match="block 5 was not added"):
        evictor.remove(5)
    assert (len(evictor), 4 in evictor, 5 in evictor) == (3, True, False)
    assert [evictor.evict() for _ in range(4)] == [4, 3, 7, None]
