"""How many guesses are worth their time, from what steps took lately.

A step of more tokens takes longer, and how much longer depends on the machine and on the load:
where few rows read all weights a guess costs next to nothing, where many rows compute it costs as
much as a token.  So the number is the one with the most expected tokens a second:
(rows + guesses that will be right) / seconds(tokens).

Costs: some microseconds a step, and none that grows with the rows where nothing can be gained.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

# Measurements of a size that count.
_NUM_KEPT: Final = 5
# Steps after which the seconds of a step without guesses are taken anew.
_MAX_AGE: Final = 256
# How likely the best guesses are right.
CERTAIN: Final = 0.95
# Gains below this share are not worth the trouble.
_LEAST_GAIN: Final = 1.02


def _bucket(num_tokens: int) -> int:
    """Sizes measured together, by the least of them: each alone to 16, then eight to a doubling."""
    shift = max(0, num_tokens.bit_length() - 4)
    return num_tokens >> shift << shift


def _bucket_end(num_tokens: int) -> int:
    """The last size that is measured with this one."""
    shift = max(0, num_tokens.bit_length() - 4)
    return ((num_tokens >> shift) + 1 << shift) - 1


class StepTimes:
    """Seconds of steps by their number of tokens, as measured lately."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._kept: dict[int, deque[float]] = {}
        self._seen_at: dict[int, int] = {}
        self._sizes: list[int] = []
        self._seconds: list[float] = []
        self._num_steps = 0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Count a measurement."""
        size = _bucket(num_tokens)
        self._num_steps += 1
        self._seen_at[size] = self._num_steps
        kept = self._kept.setdefault(size, deque(maxlen=_NUM_KEPT))
        kept.append(seconds)
        place = bisect_left(self._sizes, size)
        if len(kept) == 1:
            self._sizes.insert(place, size)
            self._seconds.insert(place, seconds)
        # What disturbs a step makes it longer.
        self._seconds[place] = sorted(kept)[(len(kept) - 1) // 2]

    def is_known(self, num_tokens: int) -> bool:
        """Whether steps of this size were measured, and not long ago."""
        seen = self._seen_at.get(_bucket(num_tokens))
        return seen is not None and self._num_steps - seen < _MAX_AGE

    def seconds(self, num_tokens: int) -> float:
        """Of a step; between measured sizes by a line, beyond them as the nearest.

        So a size above all that was measured seems cheap, and is tried.  One is measured.
        """
        sizes, size = self._sizes, _bucket(num_tokens)
        place = bisect_left(sizes, size)
        if place == len(sizes):
            return self._seconds[-1]
        if sizes[place] == size or place == 0:
            return self._seconds[place]
        below, above = sizes[place - 1], sizes[place]
        share = (size - below) / (above - below)
        return (1 - share) * self._seconds[place - 1] + share * self._seconds[place]


def can_gain(times: StepTimes, num_rows: int, most: int) -> bool:
    """Whether guesses that are all but certain would make steps of so many rows faster.

    Args:
        times: What steps took.
        num_rows: Rows of one token.
        most: Guesses of all rows together.
    """
    return _best_number(times, num_rows, most, lambda number: CERTAIN * number) > 0


def share_out(
    times: StepTimes, acceptances: Sequence[float], most: Sequence[int], budget: int
) -> list[int]:
    """Guesses of each row.

    Args:
        times: What steps took.
        acceptances: How likely the first guess of each row is right; the i-th is by the i-th power.
        most: Guesses of each row at most.
        budget: Guesses of all rows together at most.
    """
    likeliest = max(acceptances)
    if not _best_number(times, len(acceptances), budget, lambda number: likeliest * number):
        return [0] * len(acceptances)  # so it mostly ends where many rows compute
    gains = sorted(
        (
            (acceptance**place, row)
            for row, (acceptance, number) in enumerate(zip(acceptances, most, strict=True))
            for place in range(1, number + 1)
        ),
        reverse=True,
    )[:budget]
    sums = list(accumulate((gain for gain, _ in gains), initial=0.0))
    number = _best_number(times, len(acceptances), len(gains), sums.__getitem__)
    shares = [0] * len(acceptances)
    for _, row in gains[:number]:
        shares[row] += 1
    return shares


def _best_number(times: StepTimes, num_rows: int, most: int, gain: Callable[[int], float]) -> int:
    """How many guesses, the likeliest first, give the most tokens a second.

    None where a step without guesses has to be measured first.
    """
    if most <= 0 or not times.is_known(num_rows):
        return 0
    best, number = 0, 0
    best_rate = _LEAST_GAIN * num_rows / times.seconds(num_rows)
    while number < most:
        # Of sizes that take as long, the largest.
        number = min(most, max(number + 1, _bucket_end(num_rows + number + 1) - num_rows))
        rate = (num_rows + gain(number)) / times.seconds(num_rows + number)
        if rate > best_rate:
            best, best_rate = number, rate
    return best
