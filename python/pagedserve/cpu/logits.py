"""The largest of rows of logits, in one pass over memory."""

import torch
from torch import Tensor

from pagedserve import _core


def likeliest_in_core(logits: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The largest logits, largest first, of equals the smaller id first.

    Args:
        logits: float32 ``[N, V]`` on the CPU, contiguous.
        num: 1 to V; each is put in its place among the others, so it had better be small.

    Returns:
        The logits and int64 ids, both ``[N, num]``; for NaN see ``_core.likeliest_cpu``.

    Raises:
        StepError: for another number.
    """
    ids = torch.empty(logits.shape[0], num, dtype=torch.int64)
    values = torch.empty(logits.shape[0], num)
    _core.likeliest_cpu(
        logits=logits.data_ptr(),
        vocab_size=logits.shape[1],
        num=num,
        ids=ids.view(-1).numpy(),
        values=values.view(-1).numpy(),
        num_threads=torch.get_num_threads(),
    )
    return values, ids
