"""Steps of random rows over pools poisoned with NaN, compared with the reference kernel.

For backends whose pool has the layout of the reference.
"""

import numpy as np
import torch

from pagedserve.attention.backend import AttentionBackend
from pagedserve.attention.metadata import AttentionMetadata, AttentionOptions, BatchLayout
from pagedserve.kernels.reference import paged_attention

Row = tuple[int, int]  # cached keys, queries

HEADS, KV_HEADS, KEY_SIZE = 4, 2, 8


class Step:
    """A step over random rows: cached keys written, everything else in the pool NaN."""

    def __init__(self, rows: list[Row], *, block_size: int = 4, value_size: int = KEY_SIZE) -> None:
        torch.manual_seed(1)
        lengths = [cached + queries for cached, queries in rows]
        counts = [-(-length // block_size) for length in lengths]
        ids = np.random.default_rng(1).permutation(sum(counts) + 2).astype(np.int32)
        # Entries past a row's last block name a block that was never written.
        tables = np.full((len(rows), max(counts)), ids[-1], dtype=np.int32)
        self.pool = torch.full((len(ids), block_size, KV_HEADS, KEY_SIZE + value_size), torch.nan)
        slots: list[int] = []
        for row, (cached, _) in enumerate(rows):
            start = sum(counts[:row])
            tables[row, : counts[row]] = ids[start : start + counts[row]]
            own = [
                int(tables[row, position // block_size]) * block_size + position % block_size
                for position in range(lengths[row])
            ]
            self.pool.flatten(0, 1)[own[:cached]] = torch.randn(
                cached, KV_HEADS, KEY_SIZE + value_size
            )
            slots += own[cached:]
        self.query_start = np.cumsum([0, *(queries for _, queries in rows)]).astype(np.int32)
        self.layout = BatchLayout(
            self.query_start, np.array(lengths, dtype=np.int32), tables, block_size
        )
        num_tokens = len(slots)
        self.query = torch.randn(1, num_tokens, HEADS, KEY_SIZE).transpose(1, 2)
        self.key = torch.randn(1, num_tokens, KV_HEADS, KEY_SIZE).transpose(1, 2)
        self.value = torch.randn(1, num_tokens, KV_HEADS, value_size).transpose(1, 2)
        self.slot_mapping = torch.tensor(slots)

    def compare(self, backend: AttentionBackend, options: AttentionOptions) -> None:
        """Write and attend with a backend, and attend with the reference over what it wrote."""
        caches = self.pool[..., :KEY_SIZE], self.pool[..., KEY_SIZE:]
        got = backend.write_and_attend(
            self.query,
            self.key,
            self.value,
            self.pool,
            metadata=AttentionMetadata(self.layout, self.slot_mapping),
            options=options,
        )
        expected = paged_attention(
            self.query[0].transpose(0, 1),
            *caches,
            block_tables=torch.from_numpy(self.layout.block_tables),
            query_start=torch.from_numpy(self.layout.query_start),
            seq_lens=torch.from_numpy(self.layout.seq_lens),
            scale=options.scale,
            window=options.window,
            softcap=options.softcap,
            sinks=options.sinks,
            alibi=options.alibi,
            causal=options.causal,
        )
        assert not expected.isnan().any()
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
