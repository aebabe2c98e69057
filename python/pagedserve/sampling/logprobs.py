"""Log-probabilities in outputs: of sampled or given tokens, and of the most likely.

Invariants:

1. Log-probabilities are logits minus their log-sum-exp, without an array of all of them.
2. Intermediate arrays hold one chunk of rows.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagedserve.sampling.chunks import in_chunks
from pagedserve.sampling.on_host import HOST
from pagedserve.sampling.ops import Array, SamplingOps
from pagedserve.sampling.results import Candidates, PositionLogprobs, SampledLogprobs
from pagedserve.sampling.rows import PromptTargets, RowSampling


def sampled_logprobs(
    logits: Array,
    rows: Sequence[RowSampling],
    *,
    tokens: NDArray[np.int32],
    row_of_draw: NDArray[np.int64],
    ops: SamplingOps,
) -> SampledLogprobs | None:
    """Log-probabilities of sampled tokens.

    Args:
        logits: float32 ``[S, V]``, of the model.
        rows: parameters of the S rows.
        tokens: ``[D]``, the sampled tokens.
        row_of_draw: ``[D]``, their rows.
        ops: operations on the logits.

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
    for chunk in in_chunks(draws, logits.shape[1], ops):
        index = row_of_draw[chunk]
        looked_up = ops.top_logprobs(logits, index, tokens[chunk], num_top)
        found.token_logprobs[chunk], found.token_ranks[chunk] = looked_up[:2]
        found.top_token_ids[index], found.top_logprobs[index] = looked_up[2:]
    return found


def empty_candidates(rows: Sequence[RowSampling], *, vocab_size: int) -> Candidates | None:
    """Allocate the candidates; None if no row requests them."""
    most = min(max((row.num_candidates for row in rows), default=0), vocab_size)
    if most == 0:
        return None
    shape = (len(rows), most)
    return Candidates(np.zeros(shape, dtype=np.int32), np.full(shape, np.nan, dtype=np.float32))


def prompt_logprobs(
    targets: PromptTargets, logits: Array, ops: SamplingOps = HOST
) -> PositionLogprobs:
    """Log-probabilities of prompt tokens from the model's logits, float32 ``[P, V]``."""
    return top_logprobs(logits, targets.token_ids, targets.num_top, ops)


def top_logprobs(
    logits: Array, targets: NDArray[np.int64], num_top: int, ops: SamplingOps = HOST
) -> PositionLogprobs:
    """Log-probability and rank of one token per row, and the most likely tokens.

    Args:
        logits: float32 ``[N, V]``; not modified.
        targets: ``[N]``, token ids.
        num_top: number of most likely tokens; K is this, or V if that is less.
        ops: operations on the logits.

    Returns:
        Results of the N rows; a rank is 1 more than the number of strictly more likely tokens.
    """
    num_top = min(num_top, logits.shape[1])
    rows = np.arange(len(targets))
    chunks = list(in_chunks(rows, logits.shape[1], ops)) or [rows]
    parts = [ops.top_logprobs(logits, chunk, targets[chunk], num_top) for chunk in chunks]
    return PositionLogprobs(*map(np.concatenate, zip(*parts, strict=True)))
