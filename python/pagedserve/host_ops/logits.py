"""The largest logits of each row, in one pass over memory."""

import torch
from torch import Tensor

from pagedserve._core import cpu


def top_k_on_host(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits, largest first; of equal ones the smaller id first.

    Args:
        logits: float32 ``[N, V]`` on the CPU, contiguous.
        k: 1 to V.  The kernel sorts by insertion, so this is for small k.

    Returns:
        The logits and int64 ids, both ``[N, k]``; of a row that holds NaN the first value is NaN,
        and nothing else means anything.

    Raises:
        StepError: for another number.
    """
    ids = torch.empty(logits.shape[0], k, dtype=torch.int64)
    values = torch.empty(logits.shape[0], k)
    cpu.top_k(
        logits=logits.data_ptr(),
        vocab_size=logits.shape[1],
        num=k,
        ids=ids.view(-1).numpy(),
        values=values.view(-1).numpy(),
        num_threads=torch.get_num_threads(),
    )
    return values, ids
