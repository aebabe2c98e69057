"""The images of requests, from Pillow's to what the executor is given."""

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
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlacer:
    """Puts the images of prompts in their places; any thread may ask, beside a step.

    Attributes:
        executor: Knows the positions of tokens.
        processor: Prepares images.
        rules: How prompts have images.
    """

    executor: Executor
    processor: ImageProcessor
    rules: ImageRules

    def has_any(self, prompt: TokenizedPrompt, images: "Sequence[Image]") -> bool:
        """Whether a prompt has images, or a place for one."""
        return bool(images) or self.processor.token_id in prompt.token_ids

    def place(
        self, prompt: TokenizedPrompt, images: "Sequence[Image]", name: str
    ) -> tuple[TokenizedPrompt, PromptImages]:
        """The prompt with all tokens of its images, under a salt of theirs, and what they are.

        Raises:
            RequestError: Too many images, or what the processor does not take.
        """
        self.rules.check(len(images), name)
        token_ids, placed = self.processor.place(prompt.token_ids, images, name)
        try:
            positions = self.executor.image_positions(token_ids, placed)
        except Exception as error:  # whatever a model makes of them
            raise RequestError(f"the images of {name} have no positions: {error}") from error
        contents = b"".join(image.digest for image in placed)
        salt = salt_of(prompt.salt.to_bytes(8, "big") + contents)
        return replace(prompt, token_ids=token_ids, salt=salt), PromptImages(placed, positions)


def image_placer(
    args: EngineArgs, tokenizer: "PreTrainedTokenizerBase", executor: Executor
) -> ImagePlacer | None:
    """What places images of prompts; None where the model takes none.

    Raises:
        ModelLoadError: The model's processor of images cannot be loaded.
    """
    rules = executor.model_info.images
    if isinstance(rules, str):
        return None
    processor = load_image_processor(args, tokenizer)
    return ImagePlacer(executor=executor, processor=processor, rules=rules)


class ImagesFailed(PagedServeError):  # noqa: N818  # of one request, and no error of the engine
    """The features of a request's images could not be made.

    Attributes:
        request: Whose they are.
        scheduled: The step that was to have them.
    """

    def __init__(self, request: Request, scheduled: SchedulerOutputs, error: Exception) -> None:
        super().__init__(f"its images failed: {type(error).__name__}: {error}")
        self.request = request
        self.scheduled = scheduled


def rows_with_images(
    requests: RequestTable, buffers: HostBuffers, num_rows: int
) -> dict[int, Request]:
    """The requests whose prompts have images, by their rows of a step."""
    sequences = requests.by_handles(buffers.row_handles[:num_rows].tolist())
    return {
        row: sequence.request
        for row, sequence in enumerate(sequences)
        if sequence.request.images is not None
    }


def encode_images(
    executor: Executor, scheduled: SchedulerOutputs, requests: Mapping[int, Request]
) -> dict[int, PromptImages]:
    """Have the features of all images with tokens in a step, which is in the buffers.

    Args:
        executor: Makes them.
        scheduled: The step.
        requests: By row, as ``rows_with_images`` found them.

    Returns:
        The images of each row's prompt, by row.

    Raises:
        ImagesFailed: Whose could not be made.
    """
    buffers, found = executor.buffers, {}
    for row, request in requests.items():
        assert request.images is not None  # noqa: S101  # by rows_with_images
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
