"""Image features, computed once by the vision encoder and cached within a limit."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from pagedserve.inputs.prompt_images import PlacedImage, PromptImages
from pagedserve.models.forward import StepImages
from pagedserve.models.image_features import image_features, step_images


class ImageTower:
    """Computes features of images, and caches the most recently used.

    Invariant: features of the step that is being encoded are never evicted.

    Attributes:
        lookups: Images that the last step looked up, and how many of them were cached.
    """

    def __init__(self, model: PreTrainedModel, max_bytes: int) -> None:
        """Start empty; ``max_bytes`` limits the features in host memory."""
        self._model = model
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self._in_use: set[bytes] = set()
        self._num_bytes = 0
        self.lookups = (0, 0)

    def encode(
        self,
        rows: Mapping[int, PromptImages],
        query_start: NDArray[np.int32],
        positions: NDArray[np.int64],
    ) -> dict[int, str]:
        """Compute the features of images with tokens in a step.

        Args:
            rows: rows of the step whose prompts have images.
            query_start: int32 ``[R + 1]``, start of each row in the step's tokens.
            positions: int64 ``[T]``, indices of tokens in their sequences.

        Returns:
            Error of each row whose images the encoder failed to compute.
        """
        self._in_use.clear()
        self.lookups = (0, 0)
        failed = {}
        for row, images in rows.items():
            start, end = query_start[row : row + 2].tolist()
            first = int(positions[start])
            try:
                self._encode(images.within(first, first + end - start))
            except Exception as error:  # noqa: BLE001  # models raise many types
                failed[row] = f"its images failed: {type(error).__name__}: {error}"
        return failed

    def _encode(self, images: Sequence[PlacedImage]) -> None:
        for image in images:
            digest = image.digest
            num_queries, num_hits = self.lookups
            self.lookups = (num_queries + 1, num_hits + (digest in self._kept))
            if digest not in self._kept:
                self._kept[digest] = image_features(self._model, image)
                self._num_bytes += self._kept[digest].nbytes
            self._kept.move_to_end(digest)
            self._in_use.add(digest)
        if images:
            self._evict()

    def _evict(self) -> None:
        for digest in [digest for digest in self._kept if digest not in self._in_use]:
            if self._num_bytes <= self._max_bytes:
                break
            self._num_bytes -= self._kept.pop(digest).nbytes

    def of_step(
        self,
        rows: Mapping[int, PromptImages],
        query_start: NDArray[np.int32],
        positions: NDArray[np.int64],
    ) -> StepImages | None:
        """Image inputs of a step whose images are encoded, in host memory; see `step_images`."""
        return step_images(rows, query_start, positions, self._kept, torch.device("cpu"))


def on_device(images: StepImages, device: torch.device) -> StepImages:
    """Copy the image inputs of a step to a device."""
    return StepImages(
        places=images.places.to(device),
        features=[part.to(device) for part in images.features],
        positions=None if images.positions is None else images.positions.to(device),
    )
