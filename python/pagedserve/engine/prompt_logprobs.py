"""Log-probabilities of prompts: positions of a step to compute, and their results.

Entry i of a request's prompt log-probabilities is that of prompt token i + 1, predicted at
position i.  A prompt computed in chunks gets its entries in order; positions recomputed after a
preemption are skipped.
"""

from collections.abc import Sequence as SequenceOf
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedserve.engine.request import Request, Sequence
from pagedserve.output.logprobs import TokenLogprob
from pagedserve.sampling.results import PositionLogprobs
from pagedserve.sampling.rows import PromptTargets


class ScoredRow(NamedTuple):
    """Positions of one row that need log-probabilities.

    Attributes:
        request: Request of the prompt.
        first: First position in the prompt.
        place: Index of that position in the step's tokens.
        num_positions: Number of positions.
    """

    request: Request
    first: int
    place: int
    num_positions: int

    @property
    def num_top(self) -> int:
        """Number of most likely tokens needed per position."""
        return self.request.params.prompt_logprobs or 0


def scored_rows(
    rows: SequenceOf[Sequence],
    query_start: NDArray[np.int32],
    positions: NDArray[np.int64],
) -> list[ScoredRow]:
    """Rows that need prompt log-probabilities.

    Args:
        rows: Computed part of each prompt row of the step, in order.
        query_start: Start of each row in the step's tokens, [R + 1].
        positions: Position of each of the step's tokens in its sequence, [T].
    """
    scored = []
    for row, sequence in enumerate(rows):
        request = sequence.request
        if request.prompt_logprobs is None:
            continue
        start, end = query_start[row : row + 2].tolist()
        position = int(positions[start])
        first = max(position, len(request.prompt_logprobs))
        last = min(position + end - start, len(request.prompt_token_ids) - 1)
        if first < last:
            place = start + first - position
            scored.append(ScoredRow(request, first, place, last - first))
    return scored


def prompt_targets(scored: SequenceOf[ScoredRow]) -> PromptTargets:
    """All positions to compute, at least one, and the tokens that follow them."""
    index = [np.arange(row.place, row.place + row.num_positions, dtype=np.int32) for row in scored]
    following = [
        row.request.prompt_token_ids[row.first + 1 : row.first + row.num_positions + 1]
        for row in scored
    ]
    return PromptTargets(
        index=np.concatenate(index),
        token_ids=np.concatenate([np.array(tokens, dtype=np.int64) for tokens in following]),
        num_top=max(row.num_top for row in scored),
    )


def record_prompts(scored: SequenceOf[ScoredRow], answers: PositionLogprobs) -> None:
    """Append the computed log-probabilities to each prompt."""
    positions = zip(*answers, strict=True)
    for row in scored:
        own = islice(positions, row.num_positions)
        entries = [TokenLogprob.of(*answer, row.num_top) for answer in own]
        if row.request.prompt_logprobs is not None:
            row.request.prompt_logprobs[row.first :] = entries
