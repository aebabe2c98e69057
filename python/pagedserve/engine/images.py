"""Images of requests, converted from Pillow images to inputs of the executor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pagedserve._core import SchedulerOutputs
from pagedserve.config import EngineArgs
from pagedserve.engine.request import Request, RequestTable
from pagedserve.errors import PagedServeError, RequestError
from pagedserve.executor.protocol import Executor, HostBuffers
from pagedserve.images import ImageRules
from pagedserve.inputs import TokenizedPrompt, salt_of
from pagedserve.models.image_processor import ImageProcessor, load_image_processor
from pagedserve.models.prompt_images import PromptImages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pagedserve.images import GivenImage


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlacer:
    """Inserts the tokens of images into prompts; thread-safe, and callable during a step.

    Attributes:
        executor: Computes the positions of tokens.
        processor: Image processor.
        rules: Rules for images in prompts.
    """

    executor: Executor
    processor: ImageProcessor
    rules: ImageRules

    def has_any(self, prompt: TokenizedPrompt, images: "Sequence[GivenImage]") -> bool:
        """Whether a prompt has images or image tokens."""
        return bool(images) or self.processor.token_id in prompt.token_ids

    def place(
        self, prompt: TokenizedPrompt, images: "Sequence[GivenImage]", name: str
    ) -> tuple[TokenizedPrompt, PromptImages]:
        """Expand the image tokens of a prompt, add a salt of the images, and preprocess them.

        Raises:
            RequestError: Too many images, or images that the processor does not accept.
        """
        self.rules.check(len(images), name)
        token_ids, placed = self.processor.place(prompt.token_ids, images, name)
        try:
            positions = self.executor.image_positions(token_ids, placed)
        except Exception as error:  # models raise many types
            raise RequestError(f"the images of {name} have no positions: {error}") from error
        contents = b"".join(image.digest for image in placed)
        salt = salt_of(prompt.salt.to_bytes(8, "big") + contents)
        return replace(prompt, token_ids=token_ids, salt=salt), PromptImages(placed, positions)


def image_placer(
    args: EngineArgs, tokenizer: "PreTrainedTokenizerBase", executor: Executor
) -> ImagePlacer | None:
    """Create the image placer; None if the model does not accept images.

    Raises:
        ModelLoadError: The model's image processor cannot be loaded.
    """
    rules = executor.model_info.images
    if isinstance(rules, str):
        return None
    processor = load_image_processor(args, tokenizer)
    return ImagePlacer(executor=executor, processor=processor, rules=rules)


class ImagesFailed(PagedServeError):  # noqa: N818  # it concerns one request, not the engine
    """The image encoder failed for a request.

    Attributes:
        request: Request with the images.
        scheduled: Decisions of the step that needs them.
    """

    def __init__(self, request: Request, scheduled: SchedulerOutputs, error: Exception) -> None:
        super().__init__(f"its images failed: {type(error).__name__}: {error}")
        self.request = request
        self.scheduled = scheduled


def rows_with_images(
    requests: RequestTable, buffers: HostBuffers, num_rows: int
) -> dict[int, Request]:
    """Requests whose prompts have images, by their rows of a step."""
    sequences = requests.by_handles(buffers.row_handles[:num_rows].tolist())
    return {
        row: sequence.request
        for row, sequence in enumerate(sequences)
        if sequence.request.images is not None
    }


def encode_images(
    executor: Executor, scheduled: SchedulerOutputs, requests: Mapping[int, Request]
) -> dict[int, PromptImages]:
    """Run the image encoder for all images with tokens in a step, whose inputs are in the buffers.

    Args:
        executor: Runs the encoder.
        scheduled: Decisions of the step.
        requests: Requests by row, from ``rows_with_images``.

    Returns:
        The images of each row's prompt, by row.

    Raises:
        ImagesFailed: The encoder failed for a request.
    """
    buffers, found = executor.buffers, {}
    for row, request in requests.items():
        assert request.images is not None  # noqa: S101  # ensured by rows_with_images
        start, end = buffers.query_start[row : row + 2].tolist()
        first = int(buffers.positions[start])
        needed = request.images.within(first, first + end - start)
        try:
            if needed:
                executor.encode_images(needed)
        except Exception as error:
            raise ImagesFailed(request, scheduled, error) from error
        found[row] = request.images
    return found
