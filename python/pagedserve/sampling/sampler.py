"""Draws one token a row, all rows at once, each with parameters of its own.

A row is filtered by thresholds on its logits: temperature, then top_k, top_p (of what top_k
kept), min_p.  Tokens equal to a threshold are all kept.  The draw inverts the cumulative
distribution of the kept tokens in the order of their ids, in float64.

Invariants:

1. A row's token depends on its logits, parameters and `uniform`, never on other rows.
2. Tiny differences of logits move a token only at the edges of its interval: the order of
   the intervals is that of ids, not that of probabilities, which nearly equal tokens swap.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedserve.sampling.batch import RandomRows, RowSampling

# Most likely tokens that top_k and top_p look at, first and second; rows that need more are
# sorted whole, which for 64 rows of 49,152 costs several times a step's other work.
_NUM_CANDIDATES = (256, 4096)
# Most float64 elements of an intermediate array (32 MB).
_MAX_ELEMENTS = 1 << 22


class Sampler:
    """Logits to tokens."""

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[RowSampling]) -> NDArray[np.int32]:
        """Sample one token a row.

        Args:
            logits: float ``[S, V]``; not changed.
            rows: S parameters.

        Returns:
            int32 ``[S]`` token ids.
        """
        if any(row.banned_token_ids for row in rows):
            logits = _ban(logits, rows)
        tokens = logits.argmax(dim=-1)
        if not all(row.is_greedy for row in rows):
            random = RandomRows.of(rows, vocab_size=logits.shape[1], device=logits.device)
            chunk = max(1, _MAX_ELEMENTS // logits.shape[1])
            for start in range(0, len(random), chunk):
                part = random.pick(slice(start, start + chunk))
                tokens[part.index] = _draw(logits[part.index], part)
        sampled: NDArray[np.int32] = tokens.to(torch.int32).cpu().numpy()
        return sampled


def _ban(logits: Tensor, rows: Sequence[RowSampling]) -> Tensor:
    pairs = [(index, token) for index, row in enumerate(rows) for token in row.banned_token_ids]
    index, token = torch.tensor(pairs, device=logits.device).unbind(1)
    return logits.index_put((index, token), logits.new_tensor(-torch.inf))


def _draw(logits: Tensor, rows: RandomRows) -> Tensor:
    """Logits [N, V] of the rows -> int64 [N]."""
    scaled = logits.double() / rows.temperature[:, None]
    scaled -= scaled.amax(dim=-1, keepdim=True)
    # The likeliest token now has 0, so min_p is a threshold as it stands.
    threshold = torch.maximum(rows.min_p.log(), _top_threshold(scaled, rows))
    weights = scaled.exp().masked_fill_(scaled < threshold[:, None], 0.0)
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1]
    # Rounding must not push the target past the last kept token.
    target = torch.minimum(rows.uniform * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]


def _top_threshold(scaled: Tensor, rows: RandomRows) -> Tensor:
    """float64 [N]: the smallest logit that top_k and top_p keep; -inf keeps all."""
    vocab_size = scaled.shape[1]
    threshold = scaled.new_full((len(rows),), -torch.inf)
    filtered = ((rows.top_k < vocab_size) | (rows.top_p < 1)).nonzero()[:, 0]
    if filtered.numel() == 0:
        return threshold
    for num_candidates in (*_NUM_CANDIDATES, vocab_size):
        found, is_final = _search(
            scaled[filtered], rows.pick(filtered), min(num_candidates, vocab_size)
        )
        threshold[filtered] = found
        filtered = filtered[~is_final]
        if filtered.numel() == 0:
            break
    return threshold


def _search(scaled: Tensor, rows: RandomRows, num_candidates: int) -> tuple[Tensor, Tensor]:
    """Thresholds [N] as far as the likeliest candidates tell, and whether they tell, [N]."""
    ordered = scaled.topk(num_candidates, dim=-1).values
    has_top_k = rows.top_k < scaled.shape[1]
    last = (rows.top_k.clamp(max=num_candidates) - 1)[:, None]
    kth = torch.where(has_top_k, ordered.gather(1, last)[:, 0], -torch.inf)
    knows_k = ~has_top_k | (rows.top_k <= num_candidates)
    # Candidates below the k-th weigh nothing; ties with it do.
    total = scaled.exp().masked_fill_(scaled < kth[:, None], 0.0).sum(dim=-1)
    weights = ordered.exp().masked_fill_(ordered < kth[:, None], 0.0)
    share = weights.cumsum(dim=-1) / total[:, None]
    # The first candidate whose share reaches top_p is the last that is kept.
    reached = share >= rows.top_p[:, None]
    first = reached.long().argmax(dim=-1, keepdim=True)
    nucleus = torch.where(reached.any(dim=-1), ordered.gather(1, first)[:, 0], -torch.inf)
    nucleus = torch.where(rows.top_p < 1, nucleus, -torch.inf)
    knows_p = (rows.top_p >= 1) | reached.any(dim=-1) | (num_candidates == scaled.shape[1])
    return torch.maximum(kth, nucleus), knows_k & knows_p
