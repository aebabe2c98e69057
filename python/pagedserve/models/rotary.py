"""Rotary position embeddings: the frequencies of a config, and the angles of positions.

The frequencies are computed as transformers does, in float32; powers, cosines and sines are rounded
to float32 from float64, which is within a unit in the last place of torch's, and does not depend on
its build.  Both backends compute them here, so that their tokens are the same.
"""

import math
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from pagedserve.models.load.config_checks import check_positive

RopeType: TypeAlias = Literal["default", "linear", "llama3"]
ROPE_TYPES: Final = get_args(RopeType)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary parameters of a layer.

    Attributes:
        theta: Base of the frequencies.
        kind: How they are scaled.
        factor: Divisor of the scaled frequencies.
        low_freq_factor: Of llama3: wavelengths above the original positions over this are scaled.
        high_freq_factor: Of llama3: those below the original positions over this are not.
        original_positions: Of llama3: positions that the model was first trained for.
        divisors: Divisor of each frequency, as GGUF files store them; empty for none.
    """

    theta: float
    kind: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192
    divisors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: Names the first one that gives no frequencies.
        """
        check_positive({"rope_theta": self.theta, "the factor of rope_parameters": self.factor})
        if self.kind != "llama3":
            return
        names = ("low_freq_factor", "high_freq_factor", "original_positions")
        check_positive({name: getattr(self, name) for name in names})
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor is {self.high_freq_factor}; it must be above "
                f"low_freq_factor, {self.low_freq_factor}"
            )

    def frequencies(self, head_size: int) -> NDArray[np.float32]:
        """Compute the frequencies, float32 ``[head_size / 2]``."""
        exponents = np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size)
        powers: NDArray[np.float64] = np.float64(self.theta) ** exponents.astype(np.float64)
        found: NDArray[np.float32] = np.float32(1) / powers.astype(np.float32)
        if self.divisors:
            divisors: NDArray[np.float32] = np.array(self.divisors, np.float32)
            return found / divisors
        if self.kind == "linear":
            return found / np.float32(self.factor)
        return self._llama3(found) if self.kind == "llama3" else found

    def _llama3(self, found: NDArray[np.float32]) -> NDArray[np.float32]:
        """Scale long wavelengths, and interpolate those between short and long ones."""
        positions = self.original_positions
        longest, shortest = positions / self.low_freq_factor, positions / self.high_freq_factor
        lengths = np.float32(2 * math.pi) / found
        scaled = np.where(lengths > longest, found / np.float32(self.factor), found)
        low, high = np.float32(self.low_freq_factor), np.float32(self.high_freq_factor)
        smooth = (np.float32(positions) / lengths - low) / (high - low)
        between = (1 - smooth) * scaled / np.float32(self.factor) + smooth * scaled
        is_between = ~(lengths < shortest) & ~(lengths > longest)
        return np.where(is_between, between, scaled).astype(np.float32)


def half_angles(
    frequencies: NDArray[np.float32], positions: NDArray[np.int64]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines of positions ``[T]``, ``[T, head_size / 2]`` each."""
    exact = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
    return np.cos(exact).astype(np.float32), np.sin(exact).astype(np.float32)
