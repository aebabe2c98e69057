"""Features of images: the model's tower makes them once, and they stay for as long as they fit."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from pagedserve.models.flat_batch import StepImages
from pagedserve.models.image_features import image_features, step_images
from pagedserve.models.prompt_images import PlacedImage, PromptImages


class ImageTower:
    """Makes features of images, and keeps those that were used last.

    Invariant: features of the step that is being prepared are there, whatever the bound.
    """

    def __init__(self, model: PreTrainedModel, max_bytes: int) -> None:
        """Start empty; ``max_bytes`` is what features may take in host memory."""
        self._model = model
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self._in_use: set[bytes] = set()
        self._num_bytes = 0

    def encode(self, images: Sequence[PlacedImage]) -> None:
        """Have the features of images until the end of the next step."""
        for image in images:
            digest = image.digest
            if digest not in self._kept:
                self._kept[digest] = image_features(self._model, image)
                self._num_bytes += self._kept[digest].nbytes
            self._kept.move_to_end(digest)
            self._in_use.add(digest)
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
        """What images mean to a step; see `step_images`."""
        self._in_use.clear()
        return step_images(rows, query_start, positions, self._kept, self._model.device)
