"""The pools and the order of the moves."""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from pagedserve.cache.engine import CacheEngine
from pagedserve.cache.layers import KVFormat, LayerShape, kv_bytes_per_block
from pagedserve.cache.states import StatePools, StateShape, state_bytes_per_slot

LAYERS = [
    LayerShape(num_kv_heads=2, key_size=3, value_size=3),
    LayerShape(num_kv_heads=1, key_size=4, value_size=2),
]


def no_pairs() -> NDArray[np.int64]:
    return np.zeros((0, 2), dtype=np.int64)


@dataclass
class Moves:
    swap_out: NDArray[np.int64] = field(default_factory=no_pairs)
    swap_in: NDArray[np.int64] = field(default_factory=no_pairs)
    copy: NDArray[np.int64] = field(default_factory=no_pairs)


def make_cache() -> CacheEngine:
    cache = CacheEngine(
        LAYERS,
        num_gpu_blocks=4,
        num_cpu_blocks=3,
        block_size=2,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for pool in cache.gpu_pools:
        pool[:] = torch.arange(4.0)[:, None, None, None]
    for pool in cache.cpu_pools:
        pool[:] = -1
    return cache


def contents(pools: list[torch.Tensor]) -> list[float]:
    """The block contents, which must be the same in every layer."""
    values = [pool[:, 0, 0, 0].tolist() for pool in pools]
    assert all(layer == values[0] for layer in values)
    return values[0]


def test_pools_have_the_shape_of_their_layer() -> None:
    cache = make_cache()
    assert [tuple(pool.shape) for pool in cache.gpu_pools] == [(4, 2, 2, 6), (4, 2, 1, 6)]
    assert [tuple(pool.shape) for pool in cache.cpu_pools] == [(3, 2, 2, 6), (3, 2, 1, 6)]


def test_bytes_of_a_block_are_those_of_the_pools() -> None:
    cache = make_cache()
    expected = sum(pool[0].numel() * 4 for pool in cache.gpu_pools)
    assert kv_bytes_per_block(LAYERS, block_size=2, kv_format=KVFormat(4)) == expected


def test_swap_out_comes_before_swap_in_and_copies_last() -> None:
    cache = make_cache()
    moves = Moves(
        swap_out=np.array([[1, 0]]),  # block 1 leaves,
        swap_in=np.array([[0, 2]]),  # comes back as block 2
        copy=np.array([[2, 3]]),  # and is copied from there
    )
    cache.move([moves])
    assert contents(cache.cpu_pools) == [1, -1, -1]
    assert contents(cache.gpu_pools) == [0, 1, 1, 1]


STATES = (
    (
        StateShape(kind="conv", index=0, shape=(3, 2), dtype="bfloat16"),
        StateShape(kind="recurrent", index=0, shape=(2, 4, 1), dtype="float32"),
    ),
    (StateShape(kind="conv", index=0, shape=(5,), dtype="float32"),),
)


def test_states_have_their_own_shape_and_dtype_and_move_as_blocks_do() -> None:
    pools = StatePools(STATES, num_slots=4, num_cpu_slots=2, device=torch.device("cpu"))
    device = [pool for layer in pools.device for pool in layer]
    host = [pool for layer in pools.host for pool in layer]
    assert [tuple(pool.shape) for pool in device] == [(4, 3, 2), (4, 2, 4, 1), (4, 5)]
    assert [pool.dtype for pool in device] == [torch.bfloat16, torch.float32, torch.float32]
    assert state_bytes_per_slot(STATES) == 3 * 2 * 2 + 2 * 4 * 4 + 5 * 4
    for pool in device:
        pool[:] = torch.arange(4.0).reshape(4, *(1 for _ in pool.shape[1:]))
    pools.move(
        Moves(
            swap_out=np.array([[1, 0], [3, 1]]),
            swap_in=np.array([[0, 2]]),
            copy=np.array([[2, 0], [2, 3]]),
        )
    )
    for pool, expected in [(pool, [1, 1, 1, 1]) for pool in device] + [
        (pool, [1, 3]) for pool in host
    ]:
        assert pool.flatten(1).mean(dim=1).tolist() == expected
