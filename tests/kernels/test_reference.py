"""The plain-torch kernels against loops that spell out every element."""

import math
from typing import Any

import pytest
import torch

from pagedserve.kernels.reference import (
    add_norm,
    copy_blocks,
    paged_attention,
    rotate_and_write,
    swap_blocks,
    swiglu,
    write_cache,
)


def test_write_cache_skips_negative_slots_and_touches_nothing_else() -> None:
    pool = torch.full((3, 4, 2, 8), torch.nan)
    key, value = torch.randn(3, 2, 5), torch.randn(3, 2, 3)
    write_cache(key, value, pool[..., :5], pool[..., 5:], torch.tensor([7, -1, 0]))
    assert torch.equal(pool[1, 3, :, :5], key[0])
    assert torch.equal(pool[1, 3, :, 5:], value[0])
    assert torch.equal(pool[0, 0, :, :5], key[2])
    assert int(pool.isnan().all(dim=-1).all(dim=-1).sum()) == 10


def test_copy_reads_all_sources_before_it_writes() -> None:
    cache = torch.arange(4.0)[:, None].repeat(1, 3)
    copy_blocks(cache, torch.tensor([[0, 1], [1, 2], [2, 0]]))
    assert cache[:, 0].tolist() == [2, 0, 1, 3]


def test_swap_copies_between_pools_of_different_sizes() -> None:
    source, destination = torch.arange(4.0)[:, None], torch.full((2, 1), -1.0)
    swap_blocks(source, destination, torch.tensor([[3, 0]]))
    assert destination[:, 0].tolist() == [3, -1]
    assert source[:, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("with_alibi", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_paged_attention_equals_scalar_loops(
    window: int | None, softcap: float | None, with_sinks: bool, *, with_alibi: bool, causal: bool
) -> None:
    torch.manual_seed(0)
    key_cache, value_cache = (
        torch.full((6, 4, 2, 5), torch.nan),
        torch.full((6, 4, 2, 3), torch.nan),
    )
    tables = torch.tensor([[5, 2], [0, 5]])  # the second entry of row 1 is stale
    query_start, seq_lens = torch.tensor([0, 3, 4]), torch.tensor([7, 2])
    for row, length in enumerate(seq_lens.tolist()):
        for position in range(length):
            key_cache[tables[row, position // 4], position % 4] = torch.randn(2, 5)
            value_cache[tables[row, position // 4], position % 4] = torch.randn(2, 3)
    query = torch.randn(4, 4, 5)
    sinks = torch.randn(4) if with_sinks else None
    alibi = torch.tensor([0.5, 0.25, 0.125, 0.0625]) if with_alibi else None
    result = paged_attention(
        query,
        key_cache,
        value_cache,
        block_tables=tables,
        query_start=query_start,
        seq_lens=seq_lens,
        scale=0.7,
        window=window,
        softcap=softcap,
        sinks=sinks,
        alibi=alibi,
        causal=causal,
    )
    for token, (row, position) in enumerate([(0, 4), (0, 5), (0, 6), (1, 1)]):
        for head in range(4):
            weights, values = [], []
            for key_position in range(position + 1 if causal else int(seq_lens[row])):
                if window is not None and abs(key_position - position) >= window:
                    continue
                block, offset = tables[row, key_position // 4], key_position % 4
                score = 0.7 * float(query[token, head] @ key_cache[block, offset, head // 2])
                if softcap is not None:
                    score = softcap * math.tanh(score / softcap)
                if alibi is not None:
                    score -= float(alibi[head]) * (position - key_position)
                weights.append(math.exp(score))
                values.append(value_cache[block, offset, head // 2])
            total = sum(weights) + (math.exp(float(sinks[head])) if sinks is not None else 0)
            expected = sum(
                (w / total * v for w, v in zip(weights, values, strict=True)), torch.zeros(3)
            )
            torch.testing.assert_close(result[token, head], expected, rtol=1e-5, atol=1e-6)


def test_bounds_that_are_too_small_are_refused_and_empty_rows_are_left_alone() -> None:
    caches = torch.randn(2, 4, 1, 5), torch.randn(2, 4, 1, 3)
    output = torch.full((4, 1, 3), torch.nan)
    arguments: dict[str, Any] = {
        "block_tables": torch.tensor([[0], [9], [1]]),
        "query_start": torch.tensor([0, 2, 2, 3]),
        "seq_lens": torch.tensor([3, 0, 4]),
        "scale": 1.0,
    }
    query = torch.randn(4, 1, 5)
    assert paged_attention(query, *caches, output=output, **arguments) is output
    assert not output[:3].isnan().any()
    assert output[3].isnan().all()
    paged_attention(query, *caches, max_query_len=2, max_seq_len=4, **arguments)
    with pytest.raises(ValueError, match="max_query_len is 1, but a row has 2"):
        paged_attention(query, *caches, max_query_len=1, **arguments)
    with pytest.raises(ValueError, match="max_seq_len is 3, but a row has 4"):
        paged_attention(query, *caches, max_seq_len=3, **arguments)


def test_the_norm_is_of_the_sum_and_the_sum_is_kept() -> None:
    residual, weight = torch.tensor([[1.0, -3.0]]), torch.tensor([2.0, 5.0])
    normed = add_norm(torch.tensor([[2.0, 7.0]]), residual, weight, 0.5)
    assert residual.tolist() == [[3.0, 4.0]]
    root = math.sqrt((9 + 16) / 2 + 0.5)
    assert normed[0].tolist() == pytest.approx([2 * 3 / root, 5 * 4 / root])


def test_pairs_are_turned_by_their_angle_and_the_rest_stays() -> None:
    # A query head and a KV head of 5 elements, of which 4 turn: (0, 2) by one angle, (1, 3) by two.
    qkv = torch.arange(15.0)[None]
    angles = torch.tensor([[0.3, 0.7, 0.3, 0.7]])
    pool = torch.full((1, 4, 1, 10), torch.nan)
    query = rotate_and_write(
        qkv, angles.cos(), angles.sin(), pool[..., :5], pool[..., 5:], torch.tensor([2])
    )

    def turned(first: float) -> list[float]:
        pairs = [
            complex(first + i, first + i + 2) * complex(math.cos(a), math.sin(a))
            for i, a in enumerate((0.3, 0.7))
        ]
        return [*(pair.real for pair in pairs), *(pair.imag for pair in pairs), first + 4]

    assert query[0, 0].tolist() == pytest.approx(turned(0))
    assert pool[0, 2, 0].tolist() == pytest.approx([*turned(5), 10, 11, 12, 13, 14])
    assert bool(pool[0, [0, 1, 3]].isnan().all())


def test_a_gate_multiplies() -> None:
    found = swiglu(torch.tensor([[0.5, -2.0, 3.0, 4.0]]))
    gates = [0.5 / (1 + math.exp(-0.5)), -2 / (1 + math.exp(2))]
    assert found[0].tolist() == pytest.approx([gates[0] * 3, gates[1] * 4])
