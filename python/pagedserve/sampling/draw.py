"""Draws tokens at random, all rows at once, each with parameters of its own.

A row is filtered by thresholds: temperature, then top_k, top_p (of what top_k kept), min_p.
Tokens equal to a threshold are all kept.  The draw inverts the cumulative distribution of the
kept tokens in the order of their ids, in float64.

Invariants:

1. A token does not depend on other rows: sums that decide are running sums along a row, which
   round alike in any batch.
2. Tiny differences of logits move a token only at the edges of its interval: the order of
   the intervals is that of ids, not that of probabilities, which nearly equal tokens swap.
"""

import torch
from torch import Tensor

from pagedserve.sampling.batch import RandomRows

# Most likely tokens that top_k and top_p look at, first and second; rows that need more are
# sorted whole, which costs several times the rest of a draw.
_NUM_LIKELIEST = (256, 4096)


def draw(logits: Tensor, rows: RandomRows) -> Tensor:
    """Draw tokens.

    Where no row has a top_k or top_p, and all draw alike, nothing here waits for the device.

    Args:
        logits: float32 ``[N, V]``, edited.  Not changed.
        rows: N parameters.

    Returns:
        int64 ``[D]`` token ids, row by row; those of a row whose maximum is not finite mean
        nothing.
    """
    peaks = logits.amax(dim=-1, keepdim=True).double()
    # The likeliest token weighs 1, so min_p is a threshold as it stands.
    weights = logits.double().sub_(peaks).div_(rows.temperature[:, None]).exp_()
    is_dropped = weights < rows.min_p[:, None]
    if rows.has_tops:
        is_dropped |= logits < _top_threshold(logits, weights, rows)[:, None]
    cumulative = weights.masked_fill_(is_dropped, 0.0).cumsum(dim=-1)
    total = cumulative[:, -1:]
    # Rounding must not push the target past the last kept token.
    target = torch.minimum(rows.uniforms * total, total.nextafter(torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target, right=True)
    if rows.draws_alike:
        return tokens.flatten()
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    return tokens[columns < rows.num_draws[:, None]]


def _top_threshold(logits: Tensor, weights: Tensor, rows: RandomRows) -> Tensor:
    """float32 [N]: the smallest logit that top_k and top_p keep; -inf keeps all."""
    threshold = logits.new_full((len(rows),), -torch.inf)
    filtered = ((rows.top_k < logits.shape[1]) | (rows.top_p < 1)).nonzero()[:, 0]
    for num_likeliest in (*_NUM_LIKELIEST, logits.shape[1]):
        if filtered.numel() == 0:
            break
        found, is_final = _search(
            logits.index_select(0, filtered),
            weights.index_select(0, filtered),
            rows.pick(filtered),
            min(num_likeliest, logits.shape[1]),
        )
        threshold[filtered] = found
        filtered = filtered[~is_final]
    return threshold


def _search(
    logits: Tensor, weights: Tensor, rows: RandomRows, num_likeliest: int
) -> tuple[Tensor, Tensor]:
    """Thresholds [N] as far as the likeliest tokens tell, and whether they tell, bool [N]."""
    vocab_size = logits.shape[1]
    ordered, ids = logits.topk(num_likeliest, dim=-1)
    has_top_k = rows.top_k < vocab_size
    last = rows.top_k.clamp(max=num_likeliest)[:, None] - 1
    kth = torch.where(has_top_k, ordered.gather(1, last)[:, 0], -torch.inf)
    knows_k = ~has_top_k | (rows.top_k <= num_likeliest)
    # Tokens below the k-th weigh nothing; ties with it do.
    total = weights.masked_fill(logits < kth[:, None], 0.0).cumsum(dim=-1)[:, -1]
    mass = weights.gather(1, ids).masked_fill_(ordered < kth[:, None], 0.0).cumsum(dim=-1)
    # The first token whose share reaches top_p is the last that is kept.
    reached = mass >= (rows.top_p * total)[:, None]
    reaches = reached.any(dim=-1)
    first = reached.long().argmax(dim=-1, keepdim=True)
    nucleus = torch.where(reaches, ordered.gather(1, first)[:, 0], -torch.inf)
    nucleus = torch.where(rows.top_p < 1, nucleus, -torch.inf)
    knows_p = (rows.top_p >= 1) | reaches | (num_likeliest == vocab_size)
    return torch.maximum(kth, nucleus), knows_k & knows_p
