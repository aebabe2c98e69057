"""Images of a prompt as plain data: inputs of the vision encoder, and image tokens."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class PlacedImage:
    """An image preprocessed by a model's processor, in a prompt.

    Attributes:
        arrays: inputs of the vision encoder, by the names of its arguments.
        digest: digest of the arrays; equal ones have equal features.
        places: int64 ``[N]``, ascending: indices of the prompt's tokens that its N features
            replace.
    """

    arrays: Mapping[str, NDArray[np.generic]]
    digest: bytes
    places: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """All images of a prompt.

    Attributes:
        images: images in the order of the prompt.
        positions: int64 ``[3, P]`` of the prompt's P tokens, if the model counts time, height and
            width; None if a token's position is its index.
    """

    images: tuple[PlacedImage, ...]
    positions: NDArray[np.int64] | None = None

    @property
    def delta(self) -> int:
        """Difference of positions and indices after the prompt."""
        if self.positions is None:
            return 0
        num_tokens: int = self.positions.shape[1]
        return int(self.positions.max()) + 1 - num_tokens

    def within(self, first: int, last: int) -> list[PlacedImage]:
        """Images with a token from index ``first`` up to ``last``, excluded."""
        return [
            image
            for image in self.images
            if np.searchsorted(image.places, first) < np.searchsorted(image.places, last)
        ]

    def positions_within(self, first: int, last: int) -> NDArray[np.int64]:
        """Positions ``[3, last - first]`` of the tokens from index ``first`` up to ``last``."""
        places = np.arange(first, last, dtype=np.int64)
        positions = np.broadcast_to(places + self.delta, (3, last - first)).copy()
        if self.positions is not None:
            known = self.positions[:, first:last]
            positions[:, : known.shape[1]] = known
        return positions
