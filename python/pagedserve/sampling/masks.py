"""Masks of allowed tokens, packed as in `compute_masks`."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def tokens_of(masks: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """List the allowed tokens of masks ``[N, ceil(V / 32)]`` with few tokens.

    Returns:
        int64 ``[N, K]``, ascending along a row, and bool ``[N, K]``, which entries are tokens; K is
        the maximum of a row, at least 1.
    """
    row, word = np.nonzero(masks)
    octets = masks[row, word].view(np.uint8).reshape(-1, 4)
    found, bit = np.nonzero(np.unpackbits(octets, axis=1, bitorder="little"))
    counts = np.bincount(row[found], minlength=len(masks))
    is_there = np.arange(max(1, counts.max())) < counts[:, None]
    tokens = np.zeros(is_there.shape, np.int64)
    tokens[is_there] = word[found] * 32 + bit
    return tokens, is_there


def unpack_masks(masks: Tensor, vocab_size: int) -> Tensor:
    """Unpack masks int32 ``[N, ceil(V / 32)]`` to bool ``[N, V]``: the allowed tokens."""
    if masks.device.type == "cpu":
        words: NDArray[np.int32] = masks.numpy()
        bits = np.unpackbits(words.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))
    places = torch.arange(8, dtype=torch.uint8, device=masks.device)
    is_set = (masks.view(torch.uint8)[:, :, None] >> places & 1).bool()
    return is_set.view(len(masks), -1)[:, :vocab_size]
