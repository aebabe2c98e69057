"""Images of prompts, from Pillow or data URLs, checked before they are decoded.

Pillow is an extra, imported with the first image.
"""

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from pagedserve.errors import RequestError, extra_needed

if TYPE_CHECKING:
    from PIL.Image import Image

    GivenImage: TypeAlias = "Image | EncodedImage"

# Why prompts of most models may not contain images.
TEXT_ALONE: Final = "the model does not accept images"
# Limits of one image: bytes of its file, and pixels after decoding.
MAX_BYTES: Final = 32 << 20
MAX_PIXELS: Final = 1 << 25
# Limit of the longer side, as a multiple of the shorter one: processors that resize the shorter
# side to a fixed length multiply the pixels of a thin image.
MAX_ASPECT_RATIO: Final = 200
# Limit for all images of a conversation; each is decoded after the previous one is preprocessed.
MAX_SUM_PIXELS: Final = 1 << 27
# Values of OpenAI's hint on the size and cost of an image.
_DETAILS: Final = ("auto", "low", "high", "original")
_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
# Tag of EXIF, and what turns an image upright by its value; others leave it unchanged.
_ORIENTATION: Final = 0x0112
_TURNS: Final = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
_DATA: Final = "data:"
_BASE64: Final = ";base64"
# Characters of a URL that an error message quotes.
_SHOWN_LENGTH: Final = 40


class ImageRules(NamedTuple):
    """Rules for images in prompts.

    Attributes:
        token: Placeholder of an image in the text.
        most: Maximum number of images per prompt.
    """

    token: str
    most: int

    def check(self, num_images: int, name: str) -> None:
        """Check the number of images of a prompt; ``name`` is its name in errors.

        Raises:
            RequestError: There are too many.
        """
        if num_images > self.most:
            raise RequestError(
                f"{name} has {num_images} images; limit_mm_per_prompt allows {self.most}"
            )


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image file, decoded when its pixels are needed.

    Attributes:
        content: Bytes of the file.
        size: Width and height from its header.
    """

    content: bytes
    size: tuple[int, int]

    def decoded(self) -> "Image":
        """Decode to a Pillow image, upright and in RGB, on white where it is transparent.

        Raises:
            RequestError: The file cannot be decoded.
        """
        from PIL import Image

        with _decoding():
            opened = Image.open(BytesIO(self.content), formats=_FORMATS)
            # Not ImageOps.exif_transpose, which writes all of the metadata anew and may fail.
            turn = _TURNS.get(opened.getexif().get(_ORIENTATION, 1))
            image = _on_white(opened) if opened.has_transparency_data else opened.convert("RGB")
            return image if turn is None else image.transpose(Image.Transpose[turn])


def decoded(image: "GivenImage") -> "Image":
    """Return the Pillow image of either kind."""
    return image.decoded() if isinstance(image, EncodedImage) else image


def images_of(given: Any, name: str) -> "tuple[GivenImage, ...]":
    """Return the images of a prompt's ``multi_modal_data``; none where that is None.

    Args:
        given: A Pillow image, or a list of them.
        name: Name of the prompt in errors.

    Raises:
        RequestError: Any other value, or an image that is too large.
    """
    images = () if given is None else given if isinstance(given, list | tuple) else (given,)
    if not images:
        return ()
    with extra_needed("an image in a prompt", "images"):
        from PIL.Image import Image
    for image in images:
        if not isinstance(image, Image | EncodedImage):
            raise RequestError(
                f"multi_modal_data of {name} has a {type(image).__name__}; it must be "
                '{"image": ...} with an image of Pillow or a list of them'
            )
        _check_size(image.size, name)
    return tuple(images)


def image_of_url(url: object) -> EncodedImage:
    """Return the image of a data URL; reads only its header.

    Raises:
        RequestError: A URL of another kind, since nothing is downloaded, or not an image.
    """
    if not isinstance(url, str) or not url.lower().startswith(_DATA):
        raise RequestError(
            f"image_url is {_shown(url)}; nothing is fetched: accepted are data URLs such as "
            "data:image/png;base64,...",
            param="messages",
        )
    head, _, content = url.partition(",")
    if not head.lower().endswith(_BASE64):
        raise RequestError(
            f"image_url is {_shown(url)}; a data URL must have its image in base64",
            param="messages",
        )
    if len(content) > MAX_BYTES * 4 // 3 + 4:
        raise RequestError(
            f"an image has {len(content) * 3 // 4} bytes; at most {MAX_BYTES} are accepted",
            param="messages",
        )
    try:
        return _encoded(base64.b64decode(content, validate=True))
    except binascii.Error as error:
        raise RequestError(f"an image_url is no base64: {error}", param="messages") from error


def images_of_parts(parts: Sequence[Mapping[str, Any]]) -> "list[GivenImage]":
    """Return the images of all parts of a conversation.

    Raises:
        RequestError: An invalid part, or more pixels than a conversation may have.
    """
    images = [image_of_part(part) for part in parts]
    sent = [image.size for image in images if isinstance(image, EncodedImage)]
    num_pixels = sum(width * height for width, height in sent)
    if num_pixels > MAX_SUM_PIXELS:
        raise RequestError(
            f"the images of the conversation have {num_pixels} pixels; at most {MAX_SUM_PIXELS} "
            "are accepted",
            param="messages",
        )
    return images


def image_of_part(part: Mapping[str, Any]) -> "GivenImage":
    """Return the image of a content part: ``image_url`` with a data URL, or ``image`` of Pillow.

    vLLM's name of ``image`` is ``image_pil``.

    Raises:
        RequestError: The part has no valid image.
    """
    kind = part["type"]
    if kind != "image_url":
        if isinstance(part.get(kind), list | tuple | None):
            raise RequestError(f"a part of type {kind!r} must have an image of Pillow in {kind!r}")
        (image,) = images_of(part[kind], "a message")
        return image
    given = part.get("image_url")
    detail = given.get("detail") if isinstance(given, Mapping) else None
    if detail is not None and detail not in _DETAILS:
        raise RequestError(
            f"detail of an image_url is {detail!r:.80}; accepted are {', '.join(_DETAILS)}, all "
            "without effect: the model's processor chooses",
            param="messages",
        )
    return image_of_url(given.get("url") if isinstance(given, Mapping) else given)


def _encoded(content: bytes) -> EncodedImage:
    with extra_needed("an image in a message", "images"):
        from PIL import Image
    with _decoding(), Image.open(BytesIO(content), formats=_FORMATS) as opened:
        _check_size(opened.size, "a message")
        return EncodedImage(content, opened.size)


def _on_white(image: "Image") -> "Image":
    from PIL.Image import new

    image, white = image.convert("RGBA"), new("RGB", image.size, "white")
    white.paste(image, mask=image)
    return white


@contextmanager
def _decoding() -> Iterator[None]:
    """Convert decoding errors in this context to ``RequestError``.

    Raises:
        RequestError: The decoder raised any exception.
    """
    try:
        yield
    except RequestError:
        raise
    except Exception as error:
        raise RequestError(
            f"an image cannot be decoded ({type(error).__name__}); accepted are "
            f"{', '.join(_FORMATS)}",
            param="messages",
        ) from error


def _check_size(size: Sequence[int], name: str) -> None:
    width, height = size
    if not 0 < width * height <= MAX_PIXELS:
        raise RequestError(
            f"an image of {name} has {width} x {height} pixels; accepted are 1 to {MAX_PIXELS}"
        )
    if max(size) > MAX_ASPECT_RATIO * min(size):
        raise RequestError(
            f"an image of {name} has {width} x {height} pixels; its longer side must be at most "
            f"{MAX_ASPECT_RATIO} times the shorter one"
        )


def _shown(url: object) -> str:
    text = url if isinstance(url, str) else repr(url)
    return repr(text if len(text) <= _SHOWN_LENGTH else f"{text[:_SHOWN_LENGTH]}...")
