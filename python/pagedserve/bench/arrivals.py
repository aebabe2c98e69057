"""When requests are sent: a random process with a rate."""

import numpy as np
from numpy.typing import NDArray


def arrival_times(
    num_requests: int, *, rate: float, burstiness: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Times of arrivals whose gaps follow a gamma distribution.

    All gaps are stretched by one factor so that the last request comes at ``num_requests / rate``:
    with a few hundred requests the rate would otherwise be off by some percent, another one for
    each seed.

    Args:
        num_requests: How many, at least 1.
        rate: Requests a second, above 0.
        burstiness: The shape of the distribution, above 0: 1 makes a Poisson process, less makes
            bursts, more makes the gaps alike.
        rng: Where the random numbers come from.

    Returns:
        float64 ``[num_requests]``: seconds from the start of the run, ascending.
    """
    times: NDArray[np.float64] = np.cumsum(rng.gamma(shape=burstiness, size=num_requests))
    if times[-1] == 0:  # with a tiny shape all gaps can be too small for a number
        return times
    times *= num_requests / rate / times[-1]
    return times
