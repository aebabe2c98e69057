"""Results of sampling a step: tokens and log-probabilities as numpy arrays, without torch."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Log-probabilities of the model, from its logits before edits, temperature and filters.

    Arrays are dense: ids and ranks are 0 and log-probabilities NaN for rows that request none;
    those of failed rows are undefined.  K is the maximum requested, V at most; rows that request
    fewer have K too.

    Attributes:
        token_logprobs: float32 ``[D]``, of the sampled tokens.
        token_ranks: int32 ``[D]``, 1 more than the number of strictly more likely tokens.
        top_token_ids: int32 ``[S, K]``, most likely first; of equals the smaller id first.
        top_logprobs: float32 ``[S, K]``.
    """

    token_logprobs: NDArray[np.float32]
    token_ranks: NDArray[np.int32]
    top_token_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Most likely next tokens of rows that sample none.

    Log-probabilities are those of the edited logits, before temperature and filters, so that beam
    search applies penalties.  Arrays are dense: 0 and NaN for rows that request none, or failed.
    M is the maximum requested, V at most; rows that request fewer have M too.

    Attributes:
        token_ids: int32 ``[S, M]``, most likely first; of equals the smaller id first.
        logprobs: float32 ``[S, M]``; -inf for banned tokens.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


class PositionLogprobs(NamedTuple):
    """Log-probabilities of given tokens at P positions; K is the maximum requested.

    Attributes:
        logprobs: float32 ``[P]``.
        ranks: int32 ``[P]``.
        top_token_ids: int32 ``[P, K]``, most likely first.
        top_logprobs: float32 ``[P, K]``.
    """

    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int32]
    top_token_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Results of a step's S rows; D is the number of sampled tokens.

    Attributes:
        tokens: int32 ``[D]``, row by row; rows with candidates sample none.
        draw_start: int64 ``[S + 1]``; row i has ``tokens[draw_start[i]:draw_start[i + 1]]``.
        logprobs: log-probabilities of the sampled tokens; None if no row requests them.
        candidates: None if no row requests them.
        errors: errors of failed rows, in one line each.  Their tokens are 0 and undefined.
        labels: log-probabilities of the labels of rows that have some, float32 ``[K]`` each.
    """

    tokens: NDArray[np.int32]
    draw_start: NDArray[np.int64]
    logprobs: SampledLogprobs | None
    candidates: Candidates | None
    errors: dict[int, str]
    labels: dict[int, NDArray[np.float32]] = field(default_factory=dict)

    @classmethod
    def none(cls) -> "SampledRows":
        """Results of a step that samples nothing."""
        return cls.of_nothing(0)

    @classmethod
    def of_nothing(cls, num_rows: int) -> "SampledRows":
        """Results of rows whose tokens are undefined."""
        return cls(np.zeros(num_rows, np.int32), np.arange(num_rows + 1), None, None, {})
