"""Images of a prompt: inputs of the vision encoder, and the tokens that represent them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pagedserve.errors import RequestError
from pagedserve.inputs.images import ImageRules
from pagedserve.inputs.prompts import TokenizedPrompt, salt_of

if TYPE_CHECKING:
    from pagedserve.inputs.images import GivenImage


@dataclass(frozen=True, slots=True, eq=False)
class PlacedImage:
    """An image preprocessed by a model's processor, in a prompt.

    Attributes:
        arrays: Inputs of the vision encoder, by the names of its arguments.
        digest: Digest of the arrays; equal ones have equal features.
        places: Int64 ``[N]``, ascending: indices of the prompt's tokens that its N features
            replace.
    """

    arrays: Mapping[str, NDArray[np.generic]]
    digest: bytes
    places: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """All images of a prompt.

    Attributes:
        images: Images in the order of the prompt.
        positions: Int64 ``[3, P]`` of the prompt's P tokens, if the model counts time, height and
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlacer:
    """Inserts the tokens of images into prompts; thread-safe, and callable during a step.

    Attributes:
        token_id: Token of an image.
        rules: Rules for images in prompts.
        preprocess: Expands the image tokens of a named prompt, and preprocesses its images.
        positions: Computes the positions of a prompt's tokens; see ``PromptImages``.
    """

    token_id: int
    rules: ImageRules
    preprocess: (
        "Callable[[Sequence[int], Sequence[GivenImage], str],"
        " tuple[list[int], tuple[PlacedImage, ...]]]"
    )
    positions: Callable[[list[int], tuple[PlacedImage, ...]], NDArray[np.int64] | None]

    def has_any(self, prompt: TokenizedPrompt, images: "Sequence[GivenImage]") -> bool:
        """Whether a prompt has images or image tokens."""
        return bool(images) or self.token_id in prompt.token_ids

    def place(
        self, prompt: TokenizedPrompt, images: "Sequence[GivenImage]", name: str
    ) -> tuple[TokenizedPrompt, PromptImages]:
        """Expand the image tokens of a prompt, add a salt of the images, and preprocess them.

        Raises:
            RequestError: Too many images, or images that the processor does not accept.
        """
        self.rules.check(len(images), name)
        token_ids, placed = self.preprocess(prompt.token_ids, images, name)
        try:
            positions = self.positions(token_ids, placed)
        except Exception as error:  # models raise many types
            raise RequestError(f"the images of {name} have no positions: {error}") from error
        contents = b"".join(image.digest for image in placed)
        salt = salt_of(prompt.salt.to_bytes(8, "big") + contents)
        return replace(prompt, token_ids=token_ids, salt=salt), PromptImages(placed, positions)
