"""Images of requests, converted from Pillow images to inputs of the executor."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pagedserve.config import EngineArgs
from pagedserve.errors import RequestError
from pagedserve.executor.protocol import Executor
from pagedserve.images import ImageRules
from pagedserve.inputs import TokenizedPrompt, salt_of
from pagedserve.models.prompt_images import PromptImages
from pagedserve.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pagedserve.images import GivenImage
    from pagedserve.models.image_processor import ImageProcessor


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlacer:
    """Inserts the tokens of images into prompts; thread-safe, and callable during a step.

    Attributes:
        executor: Computes the positions of tokens.
        processor: Image processor.
        rules: Rules for images in prompts.
    """

    executor: Executor
    processor: "ImageProcessor"
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


def image_placer(args: EngineArgs, tokenizer: Tokenizer, executor: Executor) -> ImagePlacer | None:
    """Create the image placer; None if the model does not accept images.

    Raises:
        ModelLoadError: The model's image processor cannot be loaded.
    """
    rules = executor.model_info.images
    if isinstance(rules, str):
        return None
    from pagedserve.models.image_processor import load_image_processor

    processor = load_image_processor(args, tokenizer)
    return ImagePlacer(executor=executor, processor=processor, rules=rules)
