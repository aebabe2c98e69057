"""Number of draft tokens that is worth its time, from recent step durations.

A step of more tokens takes longer, and how much longer depends on the machine and on the load:
where a few rows read all weights a draft token costs next to nothing, where many rows are
compute-bound it costs as much as a token.  So the number is the one with the most expected tokens
per second: (rows + draft tokens expected to be accepted) / seconds(tokens).

Costs: some microseconds per step, independent of the rows if nothing can be gained.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

# Number of recent measurements of a size that count.
_NUM_KEPT: Final = 5
# Steps after which the duration of a step without draft tokens is measured again.
_MAX_AGE: Final = 256
# Highest acceptance probability that is assumed.
CERTAIN: Final = 0.95
# Minimum relative gain.
_LEAST_GAIN: Final = 1.02


def _bucket(num_tokens: int) -> int:
    """Smallest size of the bucket of a size: exact to 16, then eight buckets per octave."""
    shift = max(0, num_tokens.bit_length() - 4)
    return num_tokens >> shift << shift


def _bucket_end(num_tokens: int) -> int:
    """Last size of the bucket."""
    shift = max(0, num_tokens.bit_length() - 4)
    return ((num_tokens >> shift) + 1 << shift) - 1


class StepTimes:
    """Recent durations of steps in seconds, by their number of tokens."""

    def __init__(self) -> None:
        """Start without measurements."""
        self._kept: dict[int, deque[float]] = {}
        self._seen_at: dict[int, int] = {}
        self._sizes: list[int] = []
        self._seconds: list[float] = []
        self._num_steps = 0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Record a measurement."""
        size = _bucket(num_tokens)
        self._num_steps += 1
        self._seen_at[size] = self._num_steps
        kept = self._kept.setdefault(size, deque(maxlen=_NUM_KEPT))
        kept.append(seconds)
        place = bisect_left(self._sizes, size)
        if len(kept) == 1:
            self._sizes.insert(place, size)
            self._seconds.insert(place, seconds)
        # Disturbances only make a step longer.
        self._seconds[place] = sorted(kept)[(len(kept) - 1) // 2]

    def is_known(self, num_tokens: int) -> bool:
        """Whether steps of this size were measured recently."""
        seen = self._seen_at.get(_bucket(num_tokens))
        return seen is not None and self._num_steps - seen < _MAX_AGE

    def seconds(self, num_tokens: int) -> float:
        """Duration of a step: interpolated between measured sizes, beyond them as the nearest.

        So a size above all measured ones seems cheap, is tried, and then is measured.
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
    """Whether nearly certain draft tokens would make steps of this many rows faster.

    Args:
        times: Durations of steps.
        num_rows: Rows of one token.
        most: Maximum draft tokens of all rows together.
    """
    return _best_number(times, num_rows, most, lambda number: CERTAIN * number) > 0


def share_out(
    times: StepTimes, acceptances: Sequence[float], most: Sequence[int], budget: int
) -> list[int]:
    """Distribute draft tokens over rows.

    Args:
        times: Durations of steps.
        acceptances: Acceptance probability of each row's first draft token; the i-th has its i-th
            power.
        most: Maximum draft tokens of each row.
        budget: Maximum draft tokens of all rows together.
    """
    likeliest = max(acceptances)
    if not _best_number(times, len(acceptances), budget, lambda number: likeliest * number):
        return [0] * len(acceptances)  # the usual case for many compute-bound rows
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
    """Number of draft tokens, most likely first, with the most expected tokens per second.

    None if a step without draft tokens has to be measured first.
    """
    if most <= 0 or not times.is_known(num_rows):
        return 0
    best, number = 0, 0
    best_rate = _LEAST_GAIN * num_rows / times.seconds(num_rows)
    while number < most:
        # Of sizes that take equally long, the largest.
        number = min(most, max(number + 1, _bucket_end(num_rows + number + 1) - num_rows))
        rate = (num_rows + gain(number)) / times.seconds(num_rows + number)
        if rate > best_rate:
            best, best_rate = number, rate
    return best
