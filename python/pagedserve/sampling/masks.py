"""Masks of allowed tokens, packed as in `compute_masks`."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def unpack_masks(masks: Tensor, vocab_size: int) -> Tensor:
    """Unpack masks int32 ``[N, ceil(V / 32)]`` to bool ``[N, V]``: the allowed tokens."""
    if masks.device.type == "cpu":
        words: NDArray[np.int32] = masks.numpy()
        bits = np.unpackbits(words.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))
    places = torch.arange(8, dtype=torch.uint8, device=masks.device)
    is_set = (masks.view(torch.uint8)[:, :, None] >> places & 1).bool()
    return is_set.view(len(masks), -1)[:, :vocab_size]
