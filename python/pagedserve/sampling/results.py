"""What a step gave: sampled tokens and log-probabilities as numpy arrays, no torch."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Log-probabilities of the model: of its logits before any edit, temperature or filter.

    Arrays are dense: ids and ranks are 0 and log-probabilities NaN where a row did not ask; those
    of failed rows mean nothing.  K is the most that a row asked for, V at most; rows that asked
    for fewer have K too.

    Attributes:
        token_logprobs: float32 ``[D]``, of the drawn tokens.
        token_ranks: int32 ``[D]``, 1 more than the number of strictly likelier tokens.
        top_token_ids: int32 ``[S, K]``, likeliest first, of equals the smaller id first.
        top_logprobs: float32 ``[S, K]``.
    """

    token_logprobs: NDArray[np.float32]
    token_ranks: NDArray[np.int32]
    top_token_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest next tokens of rows that draw none.

    Log-probabilities are those of the edited logits, before temperature and filters: a beam search
    with penalties searches what they leave.  Arrays are dense: 0 and NaN where a row did not ask,
    or failed.  M is the most that a row asked for, V at most; rows that asked for fewer have M too.

    Attributes:
        token_ids: int32 ``[S, M]``, likeliest first, of equals the smaller id first.
        logprobs: float32 ``[S, M]``; -inf for tokens that must not come.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


class PositionLogprobs(NamedTuple):
    """What the model said of given tokens at P positions; K is the most asked for.

    Attributes:
        logprobs: float32 ``[P]``.
        ranks: int32 ``[P]``.
        top_token_ids: int32 ``[P, K]``, likeliest first.
        top_logprobs: float32 ``[P, K]``.
    """

    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int32]
    top_token_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SampledRows:
    """What a step's S rows gave; D is the number of tokens drawn.

    Attributes:
        tokens: int32 ``[D]``, row by row; rows with candidates draw none.
        draw_start: int64 ``[S + 1]``; row i drew ``tokens[draw_start[i]:draw_start[i + 1]]``.
        logprobs: of the drawn tokens; None if no row asked.
        candidates: None if no row asked.
        errors: why rows could not be sampled, in one line.  Their tokens are 0 and mean nothing.
    """

    tokens: NDArray[np.int32]
    draw_start: NDArray[np.int64]
    logprobs: SampledLogprobs | None
    candidates: Candidates | None
    errors: dict[int, str]

    @classmethod
    def none(cls) -> "SampledRows":
        """Of a step that samples nothing."""
        return cls.of_nothing(0)

    @classmethod
    def of_nothing(cls, num_rows: int) -> "SampledRows":
        """Of rows whose tokens mean nothing."""
        return cls(np.zeros(num_rows, np.int32), np.arange(num_rows + 1), None, None, {})
