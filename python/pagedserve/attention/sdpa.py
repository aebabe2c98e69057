"""Paged attention by torch's attention function alone, each call over exactly the keys it needs.

The buckets of `pagedserve.attention.torch` pad rows to share calls, so that nearly every call has a
mask.  Here only rows of equal lengths share one, and nothing is padded: on a CPU the result of a
row does not depend on the others, and decode rows and whole prompts need no mask, as torch's fused
GPU kernels take none.  A step of many rows is many calls: buckets are faster there.

Options that torch's function does not support are refused.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pagedserve.attention.backend import AttentionBackend
from pagedserve.attention.metadata import AttentionMetadata, AttentionOptions, BatchLayout
from pagedserve.attention.torch import write_to_pool
from pagedserve.errors import UnsupportedModelError

# Maximum queries of one masked call: limits the mask to a few MB.
_MAX_QUERIES: Final = 256


class SdpaBackend(AttentionBackend):
    """torch's scaled dot product attention, on any device."""

    name = "sdpa"

    def obstacle(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Support all tensors."""

    def write_and_attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pool: Tensor,
        *,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> Tensor:
        """See `AttentionBackend`."""
        _check(options)
        write_to_pool(key, value, pool, metadata.slot_mapping)
        tokens = query[0].transpose(0, 1)
        output = query.new_empty(*tokens.shape[:2], value.shape[-1])
        make = partial(_plan, metadata.layout, options, query.device)
        for call in metadata.once((self.name, options.window, options.causal), make):
            result = _attend(tokens, pool, key.shape[-1], call, options.scale)
            output.index_copy_(0, call.tokens, result)
        return output


BACKEND: Final = SdpaBackend()


class _Run(NamedTuple):
    """Consecutive queries of a row, with the keys that any of them attends to.

    Attributes:
        position: position of the first query.
        num_queries: number of queries.
        first_key: position of the first key.
        end_key: one past the last.
        has_mask: whether some of these keys are hidden from some of the queries, other than by a
            causal sequence from its begin.
    """

    position: int
    num_queries: int
    first_key: int
    end_key: int
    has_mask: bool


@dataclass(frozen=True, slots=True)
class _Call:
    """Equal runs of some rows.

    Attributes:
        tokens: int64 ``[rows * queries]``, their tokens in the step.
        blocks: int64 ``[rows, blocks]``, blocks of their keys.
        keys: their keys in these blocks.
        mask: bool ``[queries, keys]``, whether a query attends to a key; None without a mask.
        is_causal: whether query n attends to keys 0 to n.
    """

    tokens: Tensor
    blocks: Tensor
    keys: slice
    mask: Tensor | None
    is_causal: bool


def _check(options: AttentionOptions) -> None:
    added = {
        "softcap": options.softcap,
        "sinks": options.sinks,
        "alibi": options.alibi,
        "position_bias": options.position_bias,
    }
    names = [name for name, value in added.items() if value is not None]
    if names:
        raise UnsupportedModelError(
            f"the model's attention has {' and '.join(names)}, which torch's attention function "
            "does not support: give another attention_backend than 'sdpa' or leave it out"
        )


def _plan(layout: BatchLayout, options: AttentionOptions, device: torch.device) -> list[_Call]:
    """Group equal runs of the rows of a step."""
    places: dict[_Run, list[tuple[int, int]]] = defaultdict(list)
    starts = layout.query_start.tolist()
    for row, seq_len in enumerate(layout.seq_lens.tolist()):
        start, first = starts[row], seq_len - (starts[row + 1] - starts[row])
        for run in _runs(first, seq_len, options):
            places[run].append((row, start + run.position - first))
    return [_call(run, of_run, layout, options, device) for run, of_run in places.items()]


def _runs(first: int, seq_len: int, options: AttentionOptions) -> Iterator[_Run]:
    """Split the queries of a row, from position ``first`` on, where they need a mask."""
    window, causal = options.window or seq_len, options.causal
    if window >= seq_len and (first == 0 or not causal):
        yield _Run(first, seq_len - first, 0, seq_len, has_mask=False)
        return
    for position in range(first, seq_len, _MAX_QUERIES):
        end = min(position + _MAX_QUERIES, seq_len)
        end_key = end if causal else min(end + window - 1, seq_len)
        first_key = max(0, position - window + 1)
        yield _Run(position, end - position, first_key, end_key, has_mask=end > position + 1)


def _call(
    run: _Run,
    places: list[tuple[int, int]],
    layout: BatchLayout,
    options: AttentionOptions,
    device: torch.device,
) -> _Call:
    """A run of several rows, given as pairs of row and first token."""
    rows, tokens = np.array(places, dtype=np.int64).T
    block_size = layout.block_size
    first_block, end_block = run.first_key // block_size, -(-run.end_key // block_size)
    blocks = layout.block_tables[rows, first_block:end_block].astype(np.int64)
    tokens = (tokens[:, None] + np.arange(run.num_queries)).reshape(-1)
    begin = run.first_key - first_block * block_size
    return _Call(
        tokens=torch.from_numpy(tokens).to(device),
        blocks=torch.from_numpy(blocks).to(device),
        keys=slice(begin, begin + run.end_key - run.first_key),
        mask=_mask(run, options, device) if run.has_mask else None,
        is_causal=options.causal and not run.has_mask and run.num_queries > 1,
    )


def _mask(run: _Run, options: AttentionOptions, device: torch.device) -> Tensor:
    queries = torch.arange(run.position, run.position + run.num_queries, device=device)
    keys = torch.arange(run.first_key, run.end_key, device=device)
    distances = queries[:, None] - keys
    window = options.window or run.end_key
    visible = distances.abs() < window
    return visible & (distances >= 0) if options.causal else visible


def _attend(query: Tensor, pool: Tensor, key_size: int, call: _Call, scale: float) -> Tensor:
    """Queries ``[T, H, D]`` over the pool: ``[rows * queries, H, Dv]``."""
    num_rows, num_kv_heads = len(call.blocks), pool.shape[2]
    gathered = pool.index_select(0, call.blocks.flatten()).unflatten(0, call.blocks.shape)
    gathered = gathered.flatten(1, 2)[:, call.keys].transpose(1, 2)  # [rows, Hkv, keys, D + Dv]
    key, value = gathered[..., :key_size], gathered[..., key_size:]
    queries = query.index_select(0, call.tokens).unflatten(0, (num_rows, -1)).transpose(1, 2)
    num_heads, num_queries = queries.shape[1:3]
    if num_queries == 1:  # the heads of a group are queries of their KV head
        queries = queries.reshape(num_rows, num_kv_heads, -1, key_size)
    result = functional.scaled_dot_product_attention(
        queries,
        key,
        value,
        attn_mask=call.mask,
        is_causal=call.is_causal,
        scale=scale,
        enable_gqa=queries.shape[1] != num_kv_heads,
    )
    result = result.reshape(num_rows, num_heads, num_queries, -1)
    return result.transpose(1, 2).flatten(0, 1)
