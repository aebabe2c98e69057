"""Rows cut at chunks against the rule that they stand for: the keys of a query's own chunk."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedserve.attention.chunks import in_chunks
from pagedserve.attention.metadata import AttentionMetadata, BatchLayout

BLOCK_SIZE = 4


def keys_of(layout: BatchLayout) -> list[list[tuple[int, int]]]:
    """What each token of a step sees, as blocks and places in them."""
    found = []
    for row, seq_len in enumerate(layout.seq_lens.tolist()):
        start, end = layout.query_start[row : row + 2].tolist()
        for query in range(end - start):
            last = seq_len - (end - start) + query
            places = range(last + 1)
            table = layout.block_tables[row]
            found.append([(int(table[at // BLOCK_SIZE]), at % BLOCK_SIZE) for at in places])
    return found


def layout_of(rows: list[tuple[int, int]]) -> BatchLayout:
    """Rows of (cached keys, queries), each over blocks of its own."""
    lengths = [sum(row) for row in rows]
    width = -(-max(lengths) // BLOCK_SIZE)
    return BatchLayout(
        query_start=np.cumsum([0, *(queries for _, queries in rows)]).astype(np.int32),
        seq_lens=np.array(lengths, dtype=np.int32),
        block_tables=np.arange(len(rows) * width, dtype=np.int32).reshape(-1, width),
        block_size=BLOCK_SIZE,
    )


@settings(max_examples=60)
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=6),
    chunk=st.sampled_from([4, 8, 20, 400]),
)
def test_a_query_sees_the_keys_of_its_chunk(rows: list[tuple[int, int]], chunk: int) -> None:
    layout = layout_of(rows)
    metadata = AttentionMetadata(layout, torch.arange(int(layout.query_start[-1])))
    found = keys_of(in_chunks(metadata, chunk).layout)
    expected = [keys[(len(keys) - 1) // chunk * chunk :] for keys in keys_of(layout)]
    assert found == expected


@settings(max_examples=40)
@given(
    cached=st.lists(st.integers(0, 60), min_size=1, max_size=6),
    chunk=st.sampled_from([4, 12, 400]),
)
def test_decode_rows_are_cut_alike_on_the_device(cached: list[int], chunk: int) -> None:
    layout = layout_of([(keys, 1) for keys in cached])
    cut = in_chunks(AttentionMetadata(layout, torch.arange(len(cached))), chunk)
    rows = cut.rows()
    on_device = BatchLayout(
        rows.query_start.numpy(), rows.seq_lens.numpy(), rows.block_tables.numpy(), BLOCK_SIZE
    )
    assert keys_of(on_device) == keys_of(cut.layout)
    assert rows.max_seq_len <= chunk
