"""Arrival times of requests: a random process with a rate."""

import numpy as np
from numpy.typing import NDArray


def arrival_times(
    num_requests: int, *, rate: float, burstiness: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Generate arrival times with gamma-distributed gaps.

    All gaps are scaled by one factor so that the last request arrives at ``num_requests / rate``:
    with a few hundred requests the rate would otherwise be off by some percent, depending on the
    seed.

    Args:
        num_requests: Number of requests, at least 1.
        rate: Requests per second, above 0.
        burstiness: Shape of the distribution, above 0: 1 is a Poisson process, lower is burstier,
            higher more even.
        rng: Random number generator.

    Returns:
        float64 ``[num_requests]``: seconds from the start of the run, ascending.
    """
    times: NDArray[np.float64] = np.cumsum(rng.gamma(shape=burstiness, size=num_requests))
    if times[-1] == 0:  # with a tiny shape all gaps may underflow
        return times
    times *= num_requests / rate / times[-1]
    return times
