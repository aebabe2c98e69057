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

from pagedserve._core import cpu
from pagedserve.sampling.chunks import in_chunks
from pagedserve.sampling.results import Candidates, PositionLogprobs, SampledLogprobs
from pagedserve.sampling.rows import PromptTargets, RowSampling
from pagedserve.sampling.top_k import logits_in_rust, top_k


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
    for chunk in in_chunks(draws, logits):
        _look_up(found, chunk, logits, tokens, row_of_draw)
    return found


def _look_up(
    found: SampledLogprobs,
    draws: NDArray[np.int64],
    logits: Tensor,
    tokens: NDArray[np.int32],
    row_of_draw: NDArray[np.int64],
) -> None:
    rows = row_of_draw[draws]
    looked_up = _look(logits, tokens[draws], found.top_logprobs.shape[1], rows)
    found.token_logprobs[draws], found.token_ranks[draws] = looked_up[:2]
    found.top_token_ids[rows], found.top_logprobs[rows] = looked_up[2:]


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
    return top_logprobs(logits, targets.token_ids, targets.num_top)


def top_logprobs(logits: Tensor, targets: NDArray[np.int64], num_top: int) -> PositionLogprobs:
    """Log-probability and rank of one token per row, and the most likely tokens.

    Args:
        logits: float32 ``[N, V]``; not modified.
        targets: ``[N]``, token ids.
        num_top: number of most likely tokens; K is this, or V if that is less.

    Returns:
        Results of the N rows; a rank is 1 more than the number of strictly more likely tokens.
    """
    num_top = min(num_top, logits.shape[1])
    rows = np.arange(len(targets))
    chunks = list(in_chunks(rows, logits)) or [rows]
    parts = [_look(logits, targets[chunk], num_top, chunk) for chunk in chunks]
    return PositionLogprobs(*map(np.concatenate, zip(*parts, strict=True)))


def _look(
    logits: Tensor, targets: NDArray[np.integer], num_top: int, rows: NDArray[np.int64]
) -> PositionLogprobs:
    """Look at one chunk: the ``rows`` of the logits, one for each target."""
    look = _in_rust if logits.device.type == "cpu" else _by_torch
    return look(logits, targets, num_top, rows)


def _in_rust(
    logits: Tensor, targets: NDArray[np.integer], num_top: int, rows: NDArray[np.int64]
) -> PositionLogprobs:
    logits = logits.contiguous()
    totals, num_larger = np.empty(len(rows), np.float32), np.empty(len(rows), np.int32)
    cpu.logprobs(
        **logits_in_rust(logits, len(rows) * logits.shape[1]),
        rows=rows.tolist(),
        targets=targets.tolist(),
        sums=totals,
        ranks=num_larger,
    )
    values = logits.numpy()[rows, targets]
    top_values, top_ids = (found.numpy() for found in top_k(logits, num_top, rows.tolist()))
    return PositionLogprobs(
        values - totals, num_larger + 1, top_ids.astype(np.int32), top_values - totals[:, None]
    )


def _by_torch(
    logits: Tensor, targets: NDArray[np.integer], num_top: int, rows: NDArray[np.int64]
) -> PositionLogprobs:
    chunk = logits.index_select(0, torch.from_numpy(rows).to(logits.device))
    total = chunk.logsumexp(dim=-1, keepdim=True)
    columns = torch.from_numpy(targets.astype(np.int64)).to(logits.device)
    value = chunk.gather(1, columns[:, None])
    ranks = 1 + (chunk > value).sum(dim=-1)
    top_values, top_ids = top_k(chunk, num_top)
    found = ((value - total)[:, 0], ranks.int(), top_ids.int(), top_values - total)
    return PositionLogprobs(*(tensor.cpu().numpy() for tensor in found))
