"""Draft tokens from the prediction of a request: those after the place that its output reached.

The output is compared with the prediction token by token.  After a divergence the place is found
again where the newest tokens of the output occur in the prediction, the longest match first and of
equal ones the nearest.  So a prediction may have parts that the output replaces, drops or adds to.

Costs: about a microsecond per token that agrees; after a divergence some ten per token.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

# Positions compared after a divergence, nearest first.
_MAX_PLACES: Final = 32


class Prediction:
    """The prediction of a request, and the place in it that one sequence reached."""

    def __init__(self, token_ids: Sequence[int], min_match: int, max_match: int) -> None:
        """Start before the first token.

        Args:
            token_ids: Tokens of the prediction; not modified.
            min_match: Minimum number of matching tokens after a divergence.
            max_match: Maximum number of tokens compared.
        """
        self._predicted = token_ids
        self._min_match = min_match
        self._max_match = max_match
        self._place = 0  # predicted tokens before the next one
        self._is_lost = False
        self._num_seen = 0
        self._ends: dict[int, list[int]] = {}  # the places after each token, ascending

    def propose(self, token_ids: Sequence[int], most: int) -> list[int]:
        """Return at most `most` tokens that the prediction has next; none after a divergence.

        Args:
            token_ids: New tokens of the sequence, which only grow.
            most: Maximum number of tokens.
        """
        for end in range(self._num_seen + 1, len(token_ids) + 1):
            self._advance(token_ids, end)
        self._num_seen = len(token_ids)
        return [] if self._is_lost else list(self._predicted[self._place : self._place + most])

    def _advance(self, token_ids: Sequence[int], end: int) -> None:
        """Move on by the token before ``end``."""
        place = self._place
        if not self._is_lost and self._predicted[place : place + 1] == [token_ids[end - 1]]:
            self._place += 1
            return
        found = self._best_place(token_ids, end)
        self._is_lost = found is None
        self._place = place if found is None else found

    def _best_place(self, token_ids: Sequence[int], end: int) -> int | None:
        """The place after the best match of the tokens before ``end``; None if there is none."""
        if not self._ends:
            for index, token in enumerate(self._predicted):
                self._ends.setdefault(token, []).append(index + 1)
        places = self._ends.get(token_ids[end - 1], [])
        middle = bisect_left(places, self._place)
        near = places[max(0, middle - _MAX_PLACES // 2) : middle + _MAX_PLACES // 2]
        lengths = {place: self._match_length(token_ids, end, place) for place in near}
        enough = [place for place in near if lengths[place] >= self._min_match]
        return max(
            enough, key=lambda place: (lengths[place], -abs(place - self._place)), default=None
        )

    def _match_length(self, token_ids: Sequence[int], end: int, place: int) -> int:
        most = min(end, place, self._max_match)
        for length in range(most):
            if token_ids[end - 1 - length] != self._predicted[place - 1 - length]:
                return length
        return most
