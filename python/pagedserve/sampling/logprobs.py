"""Log-probabilities in outputs: of sampled or given tokens, and of the most likely.

Invariants:

1. Log-probabilities are logits minus their log-sum-exp, without an array of all of them.  Only
   those of candidates are torch's log-softmax: in float32 over a large vocabulary it is some 6e-6
   too high, but its sums then equal those of transformers' beam search.
2. Intermediate arrays hold one chunk of rows.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedserve.sampling.results import Candidates, PositionLogprobs, SampledLogprobs
from pagedserve.sampling.rows import PromptTargets, RowSampling
from pagedserve.sampling.top_k import top_k

# Maximum elements of an intermediate array.  On a CPU a few float64 arrays of it (4 MB each) stay
# in
# the cache, and cost half of what arrays of 32 MB do; on other devices fewer, larger operations are
# faster.
_MAX_ELEMENTS_CPU = 1 << 19
_MAX_ELEMENTS = 1 << 22


def rows_per_chunk(logits: Tensor) -> int:
    """Number of rows of logits ``[N, V]`` per chunk."""
    most = _MAX_ELEMENTS_CPU if logits.device.type == "cpu" else _MAX_ELEMENTS
    return max(1, most // logits.shape[1])


def sampled_logprobs(
    logits: Tensor,
    rows: Sequence[RowSampling],
    *,
    tokens: NDArray[np.int32],
    row_of_draw: NDArray[np.int64],
) -> SampledLogprobs | None:
    """Log-probabilities of sampled tokens.

    Args:
        logits: float32 ``[S, V]``, of the model.
        rows: parameters of the S rows.
        tokens: ``[D]``, the sampled tokens.
        row_of_draw: ``[D]``, their rows.

    Returns:
        None if no row requests them.
    """
    asked = np.array([-1 if row.num_logprobs is None else row.num_logprobs for row in rows])
    draws = (asked[row_of_draw] >= 0).nonzero()[0]
    if not draws.size:
        return None
    num_top = min(int(asked.max()), logits.shape[1])
    found = SampledLogprobs(
        np.full(len(tokens), np.nan, dtype=np.float32),
        np.zeros(len(tokens), dtype=np.int32),
        np.zeros((len(rows), num_top), dtype=np.int32),
        np.full((len(rows), num_top), np.nan, dtype=np.float32),
    )
    size = rows_per_chunk(logits)
    for start in range(0, len(draws), size):
        _look_up(found, draws[start : start + size], logits, tokens, row_of_draw)
    return found


def _look_up(
    found: SampledLogprobs,
    draws: NDArray[np.int64],
    logits: Tensor,
    tokens: NDArray[np.int32],
    row_of_draw: NDArray[np.int64],
) -> None:
    rows = row_of_draw[draws]
    targets = torch.from_numpy(tokens[draws]).to(logits.device, torch.int64)
    chunk = logits.index_select(0, torch.from_numpy(rows).to(logits.device))
    looked_up = top_logprobs(chunk, targets, found.top_logprobs.shape[1])
    arrays = [array.cpu().numpy() for array in looked_up]
    found.token_logprobs[draws], found.token_ranks[draws] = arrays[:2]
    found.top_token_ids[rows], found.top_logprobs[rows] = arrays[2:]


def empty_candidates(rows: Sequence[RowSampling], *, vocab_size: int) -> Candidates | None:
    """Allocate the candidates; None if no row requests them."""
    most = min(max((row.num_candidates for row in rows), default=0), vocab_size)
    if most == 0:
        return None
    shape = (len(rows), most)
    return Candidates(np.zeros(shape, dtype=np.int32), np.full(shape, np.nan, dtype=np.float32))


def fill_candidates(candidates: Candidates, rows: NDArray[np.int64], logits: Tensor) -> None:
    """Fill in these rows from their edited logits, float32 ``[len(rows), V]``, one chunk."""
    _, ids = top_k(logits, candidates.logprobs.shape[1])
    values = logits.log_softmax(dim=-1).gather(1, ids)
    candidates.token_ids[rows] = ids.cpu().numpy()
    candidates.logprobs[rows] = values.cpu().numpy()


def prompt_logprobs(targets: PromptTargets, logits: Tensor) -> PositionLogprobs:
    """Log-probabilities of prompt tokens from the model's logits, float32 ``[P, V]``."""
    token_ids = torch.from_numpy(targets.token_ids).to(logits.device)
    found = top_logprobs(logits, token_ids, targets.num_top)
    return PositionLogprobs(*(array.cpu().numpy() for array in found))


def top_logprobs(
    logits: Tensor, targets: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probability and rank of one token per row, and the most likely tokens.

    Args:
        logits: float32 ``[N, V]``; not modified.
        targets: int64 ``[N]``, token ids.
        num_top: number of most likely tokens; K is this, or V if that is less.

    Returns:
        float32 ``[N]`` log-probabilities of the targets, int32 ``[N]`` ranks (1 more than the
        number of strictly more likely tokens), int32 ``[N, K]`` most likely token ids and float32
        ``[N, K]`` their log-probabilities.
    """
    size = rows_per_chunk(logits)
    num_top = min(num_top, logits.shape[1])
    chunks = zip(logits.split(size), targets.split(size), strict=True)
    parts = [_top_of_chunk(*chunk, num_top) for chunk in chunks]
    logprobs, ranks, top_ids, top = (torch.cat(column) for column in zip(*parts, strict=True))
    return logprobs, ranks, top_ids, top


def _top_of_chunk(
    logits: Tensor, targets: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = logits.logsumexp(dim=-1, keepdim=True)
    value = logits.gather(1, targets[:, None])
    ranks = 1 + (logits > value).sum(dim=-1)
    top_values, top_ids = top_k(logits, num_top)
    return (value - total)[:, 0], ranks.int(), top_ids.int(), top_values - total
