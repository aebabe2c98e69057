"""Preprocessing of images with a model's processor of transformers.

Each image is preprocessed separately, so that equal ones are recognized anywhere: a prompt has one
image token for each, and the processor defines the tokens that replace it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from transformers import AutoImageProcessor, PreTrainedConfig
from transformers.models.auto import processing_auto

from pagedserve.config import EngineArgs
from pagedserve.errors import ModelLoadError, RequestError, extra_needed
from pagedserve.inputs.images import decoded
from pagedserve.inputs.prompt_images import PlacedImage
from pagedserve.models.load.files import find_model_files, first_line, quiet_transformers
from pagedserve.tokenizer import Tokenizer

# Keys of a processor's output for text.
_OF_TEXT: Final = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """A preprocessed image without a position.

    Attributes:
        arrays: see `PlacedImage`.
        token_ids: tokens that replace its image token.
    """

    arrays: dict[str, NDArray[np.generic]]
    token_ids: list[int]


class ImageProcessor:
    """Preprocesses the images of prompts; thread-safe.

    Attributes:
        token: placeholder of an image in a text.
        token_id: its id, which also represents each feature of an image in a prompt's tokens.
    """

    def __init__(self, processor: Any) -> None:
        """Store a processor of transformers."""
        self.processor = processor
        self.token: str = processor.image_token
        self.token_id: int = processor.image_token_id

    def place(
        self, token_ids: Sequence[int], images: Sequence[Any], name: str
    ) -> tuple[list[int], tuple[PlacedImage, ...]]:
        """Preprocess the images of a prompt, and expand their image tokens.

        Args:
            token_ids: token ids of the prompt, with one image token for each image.
            images: Pillow images, or encoded files.
            name: name of the prompt in errors.

        Returns:
            The prompt's tokens, and its images.

        Raises:
            RequestError: the numbers of images and image tokens differ, or an image is invalid.
        """
        num_tokens = sum(token == self.token_id for token in token_ids)
        if num_tokens != len(images):
            raise RequestError(
                f"{name} has {len(images)} images and {num_tokens} times the image token "
                f"{self.token!r}; it must have one for each"
            )
        coming = map(decoded, images)  # one at a time
        placed: list[PlacedImage] = []
        expanded: list[int] = []
        for token in token_ids:
            if token != self.token_id:
                expanded.append(token)
                continue
            prepared = self._prepare(next(coming), f"image {len(placed)} of {name}")
            places = np.flatnonzero(np.array(prepared.token_ids) == self.token_id) + len(expanded)
            placed.append(PlacedImage(prepared.arrays, _digest(prepared.arrays), places))
            expanded += prepared.token_ids
        return expanded, tuple(placed)

    def _prepare(self, image: Any, name: str) -> _Prepared:
        try:
            made = self.processor(
                images=[image], text=[self.token], add_special_tokens=False, return_tensors="np"
            )
        except Exception as error:  # processors raise many types
            raise RequestError(
                f"{name} cannot be processed: {type(error).__name__}: {first_line(error)}"
            ) from error
        arrays = {key: np.asarray(value) for key, value in made.items() if key not in _OF_TEXT}
        return _Prepared(arrays, made["input_ids"][0].tolist())


def load_image_processor(args: EngineArgs, tokenizer: Tokenizer) -> ImageProcessor:
    """Load the processor of a model that accepts images; reads no weights.

    Raises:
        ModelLoadError: transformers cannot load it.
        ImportError: a package is missing.
    """
    with quiet_transformers():
        files = find_model_files(args)
        with extra_needed(f"model {args.model!r} for its images", "images"):
            import num2words  # noqa: F401  # some processors need it
            import PIL  # noqa: F401
        try:
            return ImageProcessor(_from_files(files.directory, files.hf_config, tokenizer))
        except Exception as error:  # transformers raises many unrelated types here
            raise ModelLoadError(
                f"model {args.model!r} has no image processor that transformers can load: "
                f"{first_line(error)}"
            ) from error


def _from_files(directory: Path, config: PreTrainedConfig, tokenizer: Tokenizer) -> Any:
    """A processor of images and text only: that of videos would need torchvision."""
    known: Any = processing_auto
    kind = known.processor_class_from_name(known.PROCESSOR_MAPPING_NAMES[config.model_type])
    without_videos = type(kind.__name__, (kind,), {"check_argument_for_proper_class": _take_any})
    parts = {
        "image_processor": AutoImageProcessor.from_pretrained(directory, backend="pil"),
        "tokenizer": tokenizer,
    }
    options, _ = kind.get_processor_dict(directory)
    given = [parts.get(name) for name in kind.get_attributes()]
    return without_videos.from_args_and_dict(given, options)  # type: ignore[attr-defined]


def _take_any(self: object, name: str, part: object) -> None:
    del self, name, part


def _digest(arrays: dict[str, NDArray[np.generic]]) -> bytes:
    """SHA-256 of arrays with their names, types and shapes."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()
