"""Chunked attention: a query attends to the keys of its chunk of positions only.

Rows of a step are split at the chunk boundaries of their sequences.  Each part is a separate row,
whose block table starts with the first block of its chunk, so every backend supports it unchanged.
"""

from functools import partial

import numpy as np
import torch

from pagedserve.attention.metadata import AttentionMetadata, BatchLayout, DeviceRows
from pagedserve.errors import ConfigError


def in_chunks(metadata: AttentionMetadata, chunk: int) -> AttentionMetadata:
    """The same step with rows split at multiples of ``chunk`` positions; computed once per step.

    Raises:
        ConfigError: a block would span two chunks.
    """
    return metadata.once(("chunks", chunk), partial(_cut, metadata, chunk))


def _cut(metadata: AttentionMetadata, chunk: int) -> AttentionMetadata:
    block_size = metadata.layout.block_size
    if chunk % block_size:
        raise ConfigError(
            f"block_size is {block_size}, and the model attends in chunks of {chunk} tokens: "
            "accepted are sizes that divide it"
        )
    # Rows of one query are not split, and a CUDA graph needs theirs on the device.
    rows = None
    if metadata.layout.max_query_len == 1:
        rows = _last_chunks(metadata.rows(), chunk, block_size)
    return AttentionMetadata(cut_layout(metadata.layout, chunk), metadata.slot_mapping, rows)


def cut_layout(layout: BatchLayout, chunk: int) -> BatchLayout:
    """Split rows at multiples of ``chunk`` positions, itself a multiple of the block size."""
    ends = layout.seq_lens.astype(np.int64)
    firsts = ends - np.diff(layout.query_start)
    first_chunks = firsts // chunk
    num_pieces = (ends - 1) // chunk - first_chunks + 1
    rows = np.repeat(np.arange(len(ends)), num_pieces)
    pieces = np.arange(len(rows)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    chunks = first_chunks[rows] + pieces
    begins = np.maximum(firsts[rows], chunks * chunk)
    stops = np.minimum(ends[rows], (chunks + 1) * chunk)
    num_blocks, num_columns = chunk // layout.block_size, layout.block_tables.shape[1]
    columns = chunks[:, None] * num_blocks + np.arange(min(num_blocks, num_columns))
    return BatchLayout(
        query_start=np.cumsum([0, *(stops - begins)]).astype(np.int32),
        seq_lens=(stops - chunks * chunk).astype(np.int32),
        block_tables=layout.block_tables[rows[:, None], np.minimum(columns, num_columns - 1)],
        block_size=layout.block_size,
    )


def _last_chunks(rows: DeviceRows, chunk: int, block_size: int) -> DeviceRows:
    """Rows of at most one query, each with the keys of its query's chunk."""
    chunks = (rows.seq_lens - 1).clamp(min=0) // chunk
    num_blocks, num_columns = chunk // block_size, rows.block_tables.shape[1]
    columns = torch.arange(min(num_blocks, num_columns), device=chunks.device)
    places = (chunks[:, None].long() * num_blocks + columns).clamp(max=num_columns - 1)
    return DeviceRows(
        query_start=rows.query_start,
        seq_lens=rows.seq_lens - chunks * chunk,
        block_tables=rows.block_tables.gather(1, places),
        max_query_len=rows.max_query_len,
        max_seq_len=min(rows.max_seq_len, chunk),
    )
