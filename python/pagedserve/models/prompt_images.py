"""The images of a prompt as plain data: what a model is given of them, and where they stand."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class PlacedImage:
    """An image as a model's processor prepared it, in a prompt.

    Attributes:
        arrays: what the model makes features of, by the names of its arguments.
        digest: of them; equal ones have equal features.
        places: int64 ``[N]``, ascending: the tokens of the prompt in whose place its N features
            stand.
    """

    arrays: Mapping[str, NDArray[np.generic]]
    digest: bytes
    places: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """All images of a prompt.

    Attributes:
        images: in the order of the prompt.
        positions: int64 ``[3, P]`` of the prompt's P tokens, where the model counts time, height
            and width; None where a token's position is its place.
    """

    images: tuple[PlacedImage, ...]
    positions: NDArray[np.int64] | None = None

    @property
    def delta(self) -> int:
        """What positions behind the prompt are more than places."""
        if self.positions is None:
            return 0
        num_tokens: int = self.positions.shape[1]
        return int(self.positions.max()) + 1 - num_tokens

    def within(self, first: int, last: int) -> list[PlacedImage]:
        """Those with a token from place ``first`` up to ``last``, that one excluded."""
        return [
            image
            for image in self.images
            if np.searchsorted(image.places, first) < np.searchsorted(image.places, last)
        ]

    def positions_within(self, first: int, last: int) -> NDArray[np.int64]:
        """Positions ``[3, last - first]`` of the tokens from place ``first`` up to ``last``."""
        places = np.arange(first, last, dtype=np.int64)
        positions = np.broadcast_to(places + self.delta, (3, last - first)).copy()
        if self.positions is not None:
            known = self.positions[:, first:last]
            positions[:, : known.shape[1]] = known
        return positions
