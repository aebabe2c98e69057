"""Image features, computed once by the vision encoder and cached within a limit."""

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
    """Computes features of images, and caches the most recently used.

    Invariant: features of the step that is being prepared are never evicted.
    """

    def __init__(self, model: PreTrainedModel, max_bytes: int) -> None:
        """Start empty; ``max_bytes`` limits the features in host memory."""
        self._model = model
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self._in_use: set[bytes] = set()
        self._num_bytes = 0

    def encode(self, images: Sequence[PlacedImage]) -> None:
        """Compute the features of images, and keep them until the end of the next step."""
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
        """Image inputs of a step; see `step_images`."""
        self._in_use.clear()
        return step_images(rows, query_start, positions, self._kept, self._model.device)
