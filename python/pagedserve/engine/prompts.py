"""Log-probabilities of prompts: which positions of a step to ask about, and where answers go.

Entry i of a request's prompt log-probabilities is that of prompt token i + 1, foretold at
position i.  A prompt computed in chunks gets its entries in order; what is computed again after
a preemption is not asked again.
"""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedserve.engine.requests import LivingSequence
from pagedserve.output.logprobs import TokenLogprob
from pagedserve.output.processor import NewPromptLogprobs
from pagedserve.output.state import OutputState
from pagedserve.sampling.results import PositionLogprobs
from pagedserve.sampling.rows import PromptTargets


class ScoredRow(NamedTuple):
    """Positions of one row to ask about.

    Attributes:
        state: Whose prompt it is.
        first: The first position in the prompt.
        place: Where that lies in the step's tokens.
        num_positions: How many of them.
    """

    state: OutputState
    first: int
    place: int
    num_positions: int

    @property
    def num_top(self) -> int:
        """Likeliest tokens wanted of each position."""
        return self.state.num_prompt_logprobs or 0


def scored_rows(
    rows: Sequence[LivingSequence],
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
    for row, (request, _) in enumerate(rows):
        state = request.output
        if state.prompt_logprobs is None:
            continue
        start, end = query_start[row : row + 2].tolist()
        position = int(positions[start])
        first = max(position, len(state.prompt_logprobs))
        last = min(position + end - start, len(state.prompt_token_ids) - 1)
        if first < last:
            place = start + first - position
            scored.append(ScoredRow(state, first, place, last - first))
    return scored


def prompt_targets(scored: Sequence[ScoredRow]) -> PromptTargets | None:
    """All positions to ask about and the tokens that follow them; None for none."""
    if not scored:
        return None
    index = [np.arange(one.place, one.place + one.num_positions, dtype=np.int32) for one in scored]
    following = [
        one.state.prompt_token_ids[one.first + 1 : one.first + one.num_positions + 1]
        for one in scored
    ]
    return PromptTargets(
        index=np.concatenate(index),
        token_ids=np.concatenate([np.array(one, dtype=np.int64) for one in following]),
        num_top=max(one.num_top for one in scored),
    )


def prompt_logprobs(
    scored: Sequence[ScoredRow], answers: PositionLogprobs | None
) -> list[NewPromptLogprobs]:
    """What the answers say of each prompt."""
    if answers is None:
        return []
    found = []
    positions = zip(*answers, strict=True)
    for one in scored:
        own = islice(positions, one.num_positions)
        entries = [TokenLogprob.of(*answer, one.num_top) for answer in own]
        found.append(NewPromptLogprobs(one.state, one.first, entries))
    return found
