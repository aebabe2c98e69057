"""Numerics check of a prompt with an image over paged KV, against the model's forward pass.

The image is preprocessed as in requests; the reference gets the processor's output for the whole
prompt.  The prompt is computed in two chunks, split within the image, together with a text.
"""

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pagedserve.config import EngineArgs
from pagedserve.config.precision import Quantization
from pagedserve.errors import PagedServeError, UnsupportedModelError
from pagedserve.inputs.prompt_images import PromptImages
from pagedserve.models.check.numerics import prompt_of, using_attention
from pagedserve.models.check.paged_logits import paged_logits
from pagedserve.models.check.probe import QUANTIZED_TOLERANCE, Probe, ProbeResult
from pagedserve.models.families.towers import why_no_images
from pagedserve.models.image_features import image_features, image_positions
from pagedserve.models.image_processor import ImageProcessor, load_image_processor
from pagedserve.models.load.files import architecture_of, first_line
from pagedserve.models.tokenizer.transformers_tokenizer import load_transformers_tokenizer

# Size of the image: so flat that processors which tile images produce few tiles.
_SIZE: Final = (192, 48)
# Tokens before and after the image.
_NUM_TOKENS: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCheck:
    """Reference results of a prompt with an image.

    Attributes:
        token: placeholder of an image in a text.
        prompt: token ids of the prompt.
        images: images of the prompt.
        rows: positions whose logits are compared.
        expected: their logits float32 ``[rows, V]``.
        probe: probe of the same model with text; its second prompt is in the batch.
    """

    token: str
    prompt: Tensor
    images: PromptImages
    rows: Tensor
    expected: Tensor
    probe: Probe

    def check(self, model: PreTrainedModel, bound: float | None) -> None:
        """Compare the logits over paged KV; ``bound`` None uses that of the text.

        Raises:
            UnsupportedModelError: they differ by more.
        """
        text, (image,) = self.probe.numerics, self.images.images
        cut = (int(image.places[0]) + int(image.places[-1]) + 1) // 2
        found, _ = paged_logits(
            model,
            self.probe.result.layers,
            [self.prompt, text.prompts[1]],
            [cut, len(text.prompts[1]) - 1],
            text.backend,
            rows=[self.rows, text.rows[1]],
            selects_logits=text.selects_logits,
            states=self.probe.result.states,
            images={0: self.images},
            features={image.digest: image_features(model, image)},
        )
        # Both are rounded, and each may differ by the bound for text.
        accepted = text.bound * (1 + text.is_exact) if bound is None else bound
        error = text.measure(found, self.expected)
        if not error <= accepted:
            raise UnsupportedModelError(
                f"with an image its logits differ from those of its original forward pass by "
                f"{error:.1e} (accepted: {accepted:.1e})"
            )


@torch.inference_mode()
def make_image_check(
    model: PreTrainedModel, processor: ImageProcessor, probe: Probe, max_model_len: int
) -> ImageCheck:
    """Compute the reference with the model's forward pass.

    Args:
        model: as transformers built it.
        processor: image processor of the model.
        probe: probe of the model with text.
        max_model_len: maximum tokens of a sequence.

    Raises:
        UnsupportedModelError: the processor's tokens of the prompt differ from ours, or are too
            many.
    """
    image = _stripes()
    tokenizer = processor.processor.tokenizer
    words = tokenizer.decode(prompt_of(model, _NUM_TOKENS).tolist(), skip_special_tokens=True)
    written = f"{words} {processor.token} {words}"
    inputs = processor.processor(images=[image], text=[written], return_tensors="pt")
    inputs = inputs.to(model.device, model.dtype)
    tokens = tokenizer(written, verbose=False).input_ids
    prompt, images = processor.place(tokens, [image], "the prompt")
    if prompt != inputs["input_ids"][0].tolist():
        raise UnsupportedModelError("its processor makes other tokens of an image in a prompt")
    if len(prompt) > max_model_len:
        raise UnsupportedModelError(
            f"a small image takes {len(prompt)} tokens, and max_model_len is {max_model_len}"
        )
    with using_attention(model, "eager"):
        own: Any = model
        logits = own(**inputs, use_cache=False).logits[0].float()
    rows = torch.tensor([*range(0, len(prompt), 5), len(prompt) - 1])
    return ImageCheck(
        token=processor.token,
        prompt=torch.tensor(prompt, device=model.device),
        images=PromptImages(images, image_positions(model, prompt, images)),
        rows=rows,
        expected=logits[rows.to(model.device)],
        probe=probe,
    )


def image_check_of(
    model: PreTrainedModel, args: EngineArgs, probe: Probe, max_model_len: int
) -> ImageCheck | str:
    """Create the reference for a model that may accept images, or the reason for refusing them.

    Args:
        model: as transformers built it.
        args: options that name the model.
        probe: probe of the model with text.
        max_model_len: maximum tokens of a sequence.
    """
    reason = why_no_images(model.config)
    if reason is not None:
        return reason
    try:
        processor = load_image_processor(args, load_transformers_tokenizer(args))
        return make_image_check(model, processor, probe, max_model_len)
    except ImportError:
        raise
    except Exception as error:  # noqa: BLE001  # models and processors raise many types
        return _refusal(model, error)


def check_images(
    model: PreTrainedModel,
    images: ImageCheck | str,
    probe: Probe,
    quantization: Quantization | None,
) -> ProbeResult:
    """Add to a probe's result whether prompts may have images.

    Args:
        model: model, whose modules may have been replaced.
        images: the reference, or the reason why there is none.
        probe: probe of the model with text.
        quantization: quantization of the replaced modules.
    """
    if isinstance(images, str):
        return replace(probe.result, image_refusal=images)
    try:
        images.check(model, None if quantization is None else QUANTIZED_TOLERANCE)
    except Exception as error:  # noqa: BLE001  # as above
        return replace(probe.result, image_refusal=_refusal(model, error))
    return replace(probe.result, image_token=images.token)


def _refusal(model: PreTrainedModel, error: Exception) -> str:
    reason = first_line(error)
    if not isinstance(error, PagedServeError):
        reason = f"{type(error).__name__}: {reason}"
    return f"images are not taken with {architecture_of(model.config)}: {reason}"


def _stripes() -> Any:
    from PIL import Image

    width, height = _SIZE
    colours = bytes((7 * place * place + 31 * place) % 251 for place in range(3 * width * height))
    return Image.frombytes("RGB", _SIZE, colours)
