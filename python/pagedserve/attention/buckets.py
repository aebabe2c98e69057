"""Rows of a step grouped into buckets, each served by one attention call.

Owns the plan: the rows of each bucket, the slots of their keys and the mask.  It is computed once
per step (per distinct sliding window) and reused by every layer.

Invariants:

1. A gathered slot always belongs to its row and has been written: positions past the row's keys
   read the row's newest key instead, and are masked.  So the contents of other slots (stale values,
   NaN) cannot affect a result, not even as ``0 * NaN``.
2. Every query belongs to exactly one bucket.

Costs, measured on two cores with SmolLM2-135M's shapes (3 KV heads of size 64): 64 decode rows with
15,000 keys take 1.75 ms per layer in 8 to 12 buckets, 6.5 ms in one bucket (2.3 times the keys,
padded) and 2.5 ms one by one.  Gathers of more than some 20 MB are slow in any number: each call
then pays for fresh pages.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedserve.attention.metadata import BatchLayout

# Padding, in gathered keys, that costs as much as one more call.
_PADDING_KEYS = 320
# Maximum gathered keys of a bucket of several rows.
_MAX_KEYS = 4096
# A key is gathered once and scored once per query; about this many queries cost as much as the
# gather.
_QUERIES_PER_GATHER = 8
# Maximum queries of one masked call: limits the mask to a few tens of MB.
_MAX_QUERIES = 256
# Rows without cached keys skip the gather from this many queries on.
_MIN_FRESH_QUERIES = 8


@dataclass(frozen=True, slots=True)
class Span:
    """A run of queries of one row in one bucket.

    Attributes:
        row: index of the row in the step.
        token: index of the first query in the step's tokens.
        position: position of the first query in its sequence.
        num_queries: length of the run.
        first_key: first position that any of the queries attends to.
        end_key: one past the last.
    """

    row: int
    token: int
    position: int
    num_queries: int
    first_key: int
    end_key: int

    @property
    def num_keys(self) -> int:
        """Number of keys from the first to the last that are attended to."""
        return self.end_key - self.first_key


@dataclass(frozen=True, slots=True)
class FreshBucket:
    """Rows without cached keys: plain causal attention over the step's own keys.

    Attributes:
        tokens: int64 ``[rows * queries]`` tokens of the step, short rows padded with their last; a
            slice if the bucket is one row.
        num_rows: rows.
        kept: int64 indices into ``rows * queries`` that are not padding; None if all.
        written: tokens of the step that the kept results belong to.
    """

    tokens: Tensor | slice
    num_rows: int
    kept: Tensor | None
    written: Tensor | slice


@dataclass(slots=True)
class PagedBucket:
    """Rows whose keys are gathered from the pool; caches masks for layers.

    Attributes:
        tokens: int64 ``[rows * queries]``, padded as in FreshBucket.
        slots: int64 ``[rows * keys]``.
        query_positions: int64 ``[rows, queries]``.
        key_positions: int64 ``[rows, keys]``.
        mask: ``[rows, 1, queries, keys]``, 0 where visible and -inf elsewhere.
        num_rows: rows.
        kept: int64 indices into ``rows * queries`` that are not padding; None if all.
        written: tokens of the step that the kept results belong to.
    """

    tokens: Tensor
    slots: Tensor
    query_positions: Tensor
    key_positions: Tensor
    mask: Tensor
    num_rows: int
    kept: Tensor | None
    written: Tensor
    _folded: dict[int, Tensor] = field(default_factory=dict)

    def folded_mask(self, num_groups: int) -> Tensor:
        """The mask for query heads folded into queries, ``[rows, 1, groups * queries, keys]``."""
        if self.mask.shape[2] == 1 or num_groups == 1:
            return self.mask
        if num_groups not in self._folded:
            self._folded[num_groups] = self.mask.repeat(1, 1, num_groups, 1)
        return self._folded[num_groups]


Bucket = FreshBucket | PagedBucket


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Parameters of a plan besides the step.

    Attributes:
        window: sliding window of the layers it is for; None is full attention.
        causal: whether queries do not attend to later keys.
        allow_fresh: whether rows without cached keys may use the step's keys directly.
        dtype: of the masks.
        device: of the indices and masks.
    """

    window: int | None
    causal: bool
    allow_fresh: bool
    dtype: torch.dtype
    device: torch.device


def plan_buckets(layout: BatchLayout, options: PlanOptions) -> list[Bucket]:
    """Group the rows of a step.

    Args:
        layout: the rows; each has at least one query and at least as many keys.
        options: window, dtype and device.

    Returns:
        Buckets that cover every query once.
    """
    fresh: list[Span] = []
    paged: list[Span] = []
    starts = layout.query_start.tolist()
    for row, seq_len in enumerate(layout.seq_lens.tolist()):
        num_queries = starts[row + 1] - starts[row]
        whole = Span(row, starts[row], seq_len - num_queries, num_queries, 0, seq_len)
        if _is_fresh(whole, options):
            fresh.append(whole)
        else:
            paged.extend(_split(whole, options))
    buckets: list[Bucket] = [_fresh_bucket(spans, options) for spans in _group(fresh)]
    buckets.extend(_paged_bucket(spans, layout, options) for spans in _group(paged))
    return buckets


def _is_fresh(span: Span, options: PlanOptions) -> bool:
    fits_window = options.window is None or span.num_queries <= options.window
    long_enough = span.num_queries >= _MIN_FRESH_QUERIES
    return options.allow_fresh and span.position == 0 and long_enough and fits_window


def _split(span: Span, options: PlanOptions) -> Iterator[Span]:
    """Split a row's queries into runs, each with only the keys that they attend to."""
    window = options.window
    for offset in range(0, span.num_queries, _MAX_QUERIES):
        position = span.position + offset
        num_queries = min(_MAX_QUERIES, span.num_queries - offset)
        first_key = 0 if window is None else max(0, position - window + 1)
        end_key = position + num_queries
        if not options.causal:
            end_key = min(span.end_key, end_key + (window or span.end_key) - 1)
        yield Span(span.row, span.token + offset, position, num_queries, first_key, end_key)


def _weight(num_queries: int, num_keys: int) -> float:
    return num_keys * (1 + (num_queries - 1) / _QUERIES_PER_GATHER)


def _group(spans: list[Span]) -> Iterator[list[Span]]:
    """Split the spans, ordered by size, where padding would cost more than another call."""
    group: list[Span] = []
    most_keys, exact = 0, 0.0
    for span in sorted(spans, key=lambda s: (s.num_queries, s.num_keys), reverse=True):
        weight = _weight(span.num_queries, span.num_keys)
        keys = max(most_keys, span.num_keys)
        if group:
            padded = (len(group) + 1) * _weight(group[0].num_queries, keys)
            if padded > _MAX_KEYS or padded - exact - weight > _PADDING_KEYS:
                yield group
                group, keys, exact = [], span.num_keys, 0.0
        group.append(span)
        most_keys, exact = keys, exact + weight
    if group:
        yield group


@dataclass(frozen=True, slots=True)
class _Queries:
    """The queries of a group of spans, padded: [rows, queries] arrays."""

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    is_real: NDArray[np.bool_]

    @classmethod
    def of(cls, spans: list[Span]) -> "_Queries":
        lengths = _column([span.num_queries for span in spans])
        index = np.arange(int(lengths.max()))[None, :]
        clamped = np.minimum(index, lengths - 1)
        return cls(
            tokens=_column([span.token for span in spans]) + clamped,
            positions=_column([span.position for span in spans]) + clamped,
            is_real=np.broadcast_to(index < lengths, clamped.shape),
        )

    def kept(self, device: torch.device) -> tuple[Tensor | None, Tensor]:
        """Indices that are not padding (None if all are), and the tokens they belong to."""
        if bool(self.is_real.all()):
            return None, _to(self.tokens.reshape(-1), device)
        kept = np.flatnonzero(self.is_real)
        return _to(kept, device), _to(self.tokens.reshape(-1)[kept], device)


def _fresh_bucket(spans: list[Span], options: PlanOptions) -> FreshBucket:
    if len(spans) == 1:
        tokens = slice(spans[0].token, spans[0].token + spans[0].num_queries)
        return FreshBucket(tokens, 1, None, tokens)
    queries = _Queries.of(spans)
    kept, written = queries.kept(options.device)
    index = _to(queries.tokens.reshape(-1), options.device)
    return FreshBucket(index, len(spans), kept, written)


def _paged_bucket(spans: list[Span], layout: BatchLayout, options: PlanOptions) -> PagedBucket:
    queries = _Queries.of(spans)
    kept, written = queries.kept(options.device)
    num_keys = _column([span.num_keys for span in spans])
    first = _column([span.first_key for span in spans])
    keys = first + np.arange(int(num_keys.max()))[None, :]
    # Past the row's keys: read its newest one, which the mask hides (invariant 1).
    readable = np.minimum(keys, first + num_keys - 1)
    rows = _column([span.row for span in spans])
    blocks = layout.block_tables[rows, readable // layout.block_size].astype(np.int64)
    slots = blocks * layout.block_size + readable % layout.block_size
    query_positions = _to(queries.positions, options.device)
    key_positions = _to(keys, options.device)
    ends = _to(first + num_keys, options.device)
    return PagedBucket(
        tokens=_to(queries.tokens.reshape(-1), options.device),
        slots=_to(slots.reshape(-1), options.device),
        query_positions=query_positions,
        key_positions=key_positions,
        mask=_mask(query_positions, key_positions, ends, options),
        num_rows=len(spans),
        kept=kept,
        written=written,
    )


def _mask(
    query_positions: Tensor, key_positions: Tensor, ends: Tensor, options: PlanOptions
) -> Tensor:
    """Mask of queries [rows, queries] and keys [rows, keys]; `ends` [rows, 1] follow the last."""
    query_position = query_positions[:, None, :, None]
    key_position = key_positions[:, None, None, :]
    if options.causal:
        hidden = key_position > query_position
    else:
        hidden = (key_position >= ends[:, None, None, :]).expand(
            -1, -1, query_positions.shape[1], -1
        )
    if options.window is not None:
        hidden = hidden | ((key_position - query_position).abs() >= options.window)
    mask = torch.zeros(hidden.shape, dtype=options.dtype, device=options.device)
    return mask.masked_fill_(hidden, -torch.inf)


def _column(values: list[int]) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)[:, None]


def _to(array: NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
