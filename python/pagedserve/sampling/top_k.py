"""Largest logits of a row, with a defined order of equal ones.

Invariant: of equal logits the smaller id comes first, on every device.

Costs: on the CPU one read of the logits, in Rust: 0.3 ms for 64 rows of 49,152 where torch's
``max`` takes 1.5 and its ``topk`` 2.9 (two cores); on other devices a ``topk`` and a few small
operations, and a kernel for masked logits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pagedserve._core import cpu

# The Rust kernel keeps the best in order: above this, sorting them costs more than reading logits.
_MAX_RUST_K = 64
# Logits that one thread reads before another has woken up.
_FEW_LOGITS = 65536


def argmax(
    logits: Tensor, masks: Tensor | None = None, rows: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Largest logit of each row and its int64 id, ``[N]`` each; otherwise as `top_k`.

    Args:
        logits: float32 ``[N, V]``, or more rows than those of ``rows``.
        masks: int32 ``[N, ceil(V / 32)]``: only tokens whose bit is 1 are considered
            (`compute_masks`); if there is none the logit is minus infinity.
        rows: N row indices of the logits; None for all.
    """
    if logits.device.type != "cpu":
        if rows is not None:
            logits = logits[list(rows)]
        if masks is not None:
            from pagedserve.kernels.masks import (
                masked_argmax,
            )  # needs triton, for GPUs

            return masked_argmax(logits, masks)
        largest, ids = logits.max(dim=-1)
        return largest, ids
    values, ids = _in_rust(logits.contiguous(), 1, masks, rows)
    return values[:, 0], ids[:, 0]


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits, largest first.

    Args:
        logits: float32 ``[N, V]``.
        k: 0 to V.

    Returns:
        The logits and int64 ids, both ``[N, k]``.  For a row with NaN the first value is NaN, and
        the rest is undefined.
    """
    if logits.device.type == "cpu" and logits.is_contiguous() and 0 < k <= _MAX_RUST_K:
        return _in_rust(logits, k)
    return _by_topk(logits, k)


def _in_rust(
    logits: Tensor, k: int, masks: Tensor | None = None, rows: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """The Rust kernel sorts by insertion, so this is for small k."""
    num_rows, vocab_size = logits.shape[0] if rows is None else len(rows), logits.shape[1]
    ids = torch.empty(num_rows, k, dtype=torch.int64)
    values = torch.empty(num_rows, k)
    num_read = num_rows * vocab_size if masks is None else 32 * int(masks.count_nonzero())
    cpu.top_k(
        logits=logits.data_ptr(),
        vocab_size=vocab_size,
        num=k,
        ids=ids.view(-1).numpy(),
        values=values.view(-1).numpy(),
        rows=rows,
        masks=None if masks is None else masks.view(-1).numpy(),
        num_threads=1 if num_read < _FEW_LOGITS else torch.get_num_threads(),
    )
    return values, ids


def _by_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    vocab_size = logits.shape[1]
    values, ids = logits.topk(min(k + 1, vocab_size), dim=-1)
    # topk chooses any of equals: if the next one equals the last, choose again.
    if 0 < k < vocab_size:
        tied = (values[:, k - 1] == values[:, k]).nonzero()[:, 0]
        if tied.numel():
            last = values[tied, k - 1 : k]
            ids[tied, :k] = _first_of_equals(logits[tied], last, k)
    ids = ids[:, :k].sort(dim=-1).values
    values = logits.gather(1, ids)
    order = values.argsort(dim=-1, descending=True, stable=True)
    return values.gather(1, order), ids.gather(1, order)


def _first_of_equals(logits: Tensor, last: Tensor, k: int) -> Tensor:
    """Ids of all logits above `last` [N, 1] and of the first that equal it, int64 [N, k]."""
    # Exact: vocabularies are far smaller than 2 ** 24.
    first = -torch.arange(logits.shape[1], dtype=torch.float32, device=logits.device)
    preference = torch.where(logits > last, 1.0, -torch.inf)
    return torch.where(logits == last, first, preference).topk(k, dim=-1).indices
