"""Most likely allowed token, in Triton.

The vocabulary of a row is split, so that few rows occupy a device too; each split gives its largest
logit, and the largest of those is the row's.

Invariants:

1. Of equal logits the smaller id comes first, within a split and among splits.
2. A NaN logit counts only if its token is allowed, and then it is the row's largest.
3. Grids depend on shapes alone, and nothing synchronizes with the device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .call import multiprocessors

if __name__.startswith("kernels."):
    raise ImportError(f"import this module as pagedserve.{__name__}: {__name__} is a second copy")

# Entries of a mask that a program reads at a time: 4,096 tokens, 32 per thread.
WORDS = 128
NUM_WARPS = 4


@triton.jit(do_not_specialize=["split_words"])
def _masked_argmax_kernel(
    logits,
    masks,
    peaks,
    ids,
    vocab_size,
    logits_stride,
    num_words,
    split_words,
    WORDS: tl.constexpr,
):
    """Programs (row, split of its vocabulary)."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * logits_stride
    masks += row * num_words
    first, last = split * split_words, tl.minimum((split + 1) * split_words, num_words)
    # Each lane keeps its own largest, in the order of ids.
    largest = tl.full([WORDS, 32], float("-inf"), tl.float32)
    id_of = tl.zeros([WORDS, 32], tl.int32)
    is_nan = tl.zeros([WORDS, 32], tl.int32)
    bit = tl.arange(0, 32)[None, :]
    for start in tl.range(first, last, WORDS):
        word = start + tl.arange(0, WORDS)
        bits = tl.load(masks + word, mask=word < last, other=0)[:, None] >> bit & 1
        token = word[:, None] * 32 + bit
        # All are read: loads that depend on bits would be of one element each.
        logit = tl.load(logits + token, mask=token < vocab_size, other=float("-inf"))
        logit = tl.where(bits == 1, logit, float("-inf"))
        is_nan |= (logit != logit).to(tl.int32)  # noqa: PLR0124  # true only for NaN
        id_of = tl.where(logit > largest, token, id_of)
        largest = tl.where(logit > largest, logit, largest)
    peak = tl.max(tl.max(largest, 1), 0)
    token = tl.min(tl.min(tl.where(largest == peak, id_of, vocab_size - 1), 1), 0)
    has_nan = tl.max(tl.max(is_nan, 1), 0)
    place = row * tl.num_programs(1) + split
    tl.store(peaks + place, tl.where(has_nan == 1, float("nan"), peak))
    tl.store(ids + place, token)


def masked_argmax(logits: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    """Largest logit of each row among the allowed tokens, and its id.

    Args:
        logits: float32 ``[N, V]``, rows contiguous.
        masks: int32 ``[N, ceil(V / 32)]``, contiguous: token ``t`` is allowed if bit ``t % 32`` of
            entry ``t // 32`` is 1.

    Returns:
        float32 and int64, ``[N]`` each.  Minus infinity and an id below V if no token is allowed;
        NaN and an undefined id if an allowed logit is NaN.

    Raises:
        ValueError: tensors that the kernel would read incorrectly.
    """
    (num_rows, vocab_size), num_words = logits.shape, -(-logits.shape[1] // 32)
    if masks.shape != (num_rows, num_words) or masks.dtype != torch.int32:
        raise ValueError(
            f"masks are {masks.dtype} {list(masks.shape)}; logits {list(logits.shape)} take "
            f"torch.int32 {[num_rows, num_words]}"
        )
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or not masks.is_contiguous():
        raise ValueError("logits must be float32, and their rows and the masks contiguous")
    wanted = triton.cdiv(2 * multiprocessors(logits.device), max(num_rows, 1))
    split_words = WORDS * triton.cdiv(triton.cdiv(num_words, WORDS), wanted)
    num_splits = triton.cdiv(num_words, split_words)
    peaks = logits.new_empty(num_rows, num_splits)
    ids = logits.new_empty(num_rows, num_splits, dtype=torch.int32)
    if num_rows:
        _masked_argmax_kernel[(num_rows, num_splits)](
            logits,
            masks,
            peaks,
            ids,
            vocab_size,
            logits.stride(0),
            num_words,
            split_words,
            WORDS=WORDS,
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )
    largest, split = peaks.max(dim=1)
    return largest, ids.gather(1, split[:, None])[:, 0].long()
