"""``GroupedWeights``: whole numbers with scales and zero points of groups of inputs.

They become blocks like those of GGUF, which the kernels multiply, each with the scale of its
group: 4 bits in blocks of 64 inputs where groups are multiples of these.  Numbers of 4 bits are
exact in them and so are float16 scales; the minimum of a block with a zero point is rounded to
float16, by at most a 2048th of ``scale * zero``.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pagedserve.native.stored import BLOCK_WEIGHTS, BLOCKS

# Largest rounding of a float16 number, as a fraction of it.
_ROUNDING: Final = 2.0**-11
_LARGEST: Final = float(np.finfo(np.float16).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedWeights:
    """A matrix of N rows of K weights, each ``scale * (number - zero)`` of its row and group.

    Attributes:
        bits: Bits of a number: 4 or 8.
        numbers: Numbers, uint8 ``[N, K]``.
        scales: Scales, float32 ``[N, G]``.
        zeros: Zero points, int16 ``[N, G]``.
        groups: Group of each input, int64 ``[K]``.
    """

    bits: int
    numbers: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zeros: NDArray[np.int16]
    groups: NDArray[np.int64]

    def obstacle(self) -> str | None:
        """Why no blocks hold these weights, as a relative clause; None if `blocks` makes them."""
        if len(self.groups) % BLOCK_WEIGHTS:
            return f"whose {len(self.groups)} inputs are no whole blocks of {BLOCK_WEIGHTS}"
        if not self._are_shared_by(BLOCK_WEIGHTS):
            return f"of which {BLOCK_WEIGHTS} adjacent inputs have several groups"
        if (storage := self._storage()) is None:
            return "whose numbers have 8 bits and zero points"
        if not self._fits_float16(has_minima=storage.startswith("Q4_1")):
            return "whose scales do not fit float16"
        return None

    def blocks(self) -> tuple[str, NDArray[np.uint8]]:
        """Make blocks; return the name of their storage, and their bytes ``[N, bytes]``.

        Raises:
            ValueError: There is an `obstacle`.
        """
        storage = self._storage()
        if storage is None or self.obstacle() is not None:
            raise ValueError(f"no blocks hold weights {self.obstacle()}")
        size = self._block_weights()
        groups = self.groups[::size]
        numbers = self.numbers.reshape(len(self.numbers), -1, size)
        made = np.empty(numbers.shape[:2], BLOCKS[storage])
        scales = self.scales.astype(np.float16)
        made["scale"] = scales[:, groups]
        if storage.startswith("Q4_1"):
            made["minimum"] = (scales.astype(np.float32) * -self.zeros)[:, groups]
        if storage == "Q8_0":
            made["numbers"] = (numbers ^ 0x80).view(np.int8)
        else:
            made["numbers"] = numbers[..., : size // 2] | numbers[..., size // 2 :] << 4
        return storage, made.view(np.uint8)

    def floats(self) -> NDArray[np.float32]:
        """The weights, float32 ``[N, K]``; infinite or no numbers where scales are too large."""
        centred = self.numbers.astype(np.float32)
        centred -= self.zeros[:, self.groups]
        with np.errstate(over="ignore", invalid="ignore"):
            centred *= self.scales[:, self.groups]
        return centred

    def _storage(self) -> str | None:
        """Storage of the blocks by their numbers; None if no storage has these."""
        is_symmetric = bool((self.zeros == 1 << (self.bits - 1)).all())
        if self.bits == 8:  # noqa: PLR2004
            return "Q8_0" if is_symmetric else None
        size = self._block_weights()
        suffix = f"_{size}" if size > BLOCK_WEIGHTS else ""
        return ("Q4_0" if is_symmetric else "Q4_1") + suffix

    def _block_weights(self) -> int:
        """Weights of a block."""
        is_wide = self.bits == 4 and self._are_shared_by(2 * BLOCK_WEIGHTS)  # noqa: PLR2004
        return 2 * BLOCK_WEIGHTS if is_wide else BLOCK_WEIGHTS

    def _are_shared_by(self, size: int) -> bool:
        """Whether groups are whole blocks of that many adjacent inputs."""
        if len(self.groups) % size:
            return False
        blocks = self.groups.reshape(-1, size)
        return bool((blocks == blocks[:, :1]).all())

    def _fits_float16(self, *, has_minima: bool) -> bool:
        """Whether float16 holds the scales, but for a rounding, and minima if there are any."""
        with np.errstate(over="ignore", invalid="ignore"):
            scales = self.scales.astype(np.float16).astype(np.float32)
            is_near = np.abs(scales - self.scales) <= _ROUNDING * np.abs(self.scales)
            is_finite = np.abs(scales * self.zeros) <= _LARGEST
        return bool(is_near.all() and (is_finite.all() or not has_minima))
