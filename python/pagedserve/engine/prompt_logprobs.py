"""Log-probabilities of prompts: which positions of a step to ask about, and where answers go.

Entry i of a request's prompt log-probabilities is that of prompt token i + 1, foretold at
position i.  A prompt computed in chunks gets its entries in order; what is computed again after
a preemption is not asked again.
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
    """Positions of one row to ask about.

    Attributes:
        request: Whose prompt it is.
        first: The first position in the prompt.
        place: Where that lies in the step's tokens.
        num_positions: How many of them.
    """

    request: Request
    first: int
    place: int
    num_positions: int

    @property
    def num_top(self) -> int:
        """Likeliest tokens wanted of each position."""
        return self.request.params.prompt_logprobs or 0


def scored_rows(
    rows: SequenceOf[Sequence],
    query_start: NDArray[np.int32],
    positions: NDArray[np.int64],
) -> list[ScoredRow]:
    """The rows to ask about.

    Args:
        rows: What each prompt row of the step computes, in order.
        query_start: Where each begins in the step's tokens, [R + 1].
        positions: Place of each of the step's tokens in its sequence, [T].
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
    """All positions to ask about, at least one, and the tokens that follow them."""
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
    """Give each prompt what the answers say of it."""
    positions = zip(*answers, strict=True)
    for row in scored:
        own = islice(positions, row.num_positions)
        entries = [TokenLogprob.of(*answer, row.num_top) for answer in own]
        if row.request.prompt_logprobs is not None:
            row.request.prompt_logprobs[row.first :] = entries
