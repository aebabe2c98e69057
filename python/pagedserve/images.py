"""Images of prompts, as Python has them or data URLs bring them, checked before they are decoded.

Pillow is an extra, and loaded with the first image.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pagedserve.checks as checks
from pagedserve.errors import RequestError, extra_needed

if TYPE_CHECKING:
    from PIL.Image import Image

# Why prompts of most models may have no images.
TEXT_ALONE: Final = "the model takes text alone"
# Of a prompt, where nobody says.
MAX_IMAGES: Final = 16
# Of one image: its file, and what it is decoded to.
MAX_BYTES: Final = 32 << 20
MAX_PIXELS: Final = 1 << 25
_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_DATA: Final = "data:"
_BASE64: Final = ";base64"
# Characters of a URL that a message repeats.
_SHOWN_LENGTH: Final = 40


def limit_of_images(name: str, value: object) -> dict[str, int]:
    """The check of an option: a mapping of ``image`` to the most images of a prompt."""
    limits = checks.mapping(name, value)
    if set(limits) - {"image"}:
        checks.refuse(name, value, 'a mapping like {"image": 4}')
    return {kind: checks.count(0)(name, most) for kind, most in limits.items()}


class ImageRules(NamedTuple):
    """How prompts have images.

    Attributes:
        token: Stands for an image in a text.
        most: Images of a prompt.
    """

    token: str
    most: int

    def check(self, num_images: int, name: str) -> None:
        """Check that a prompt has no more images than it may; ``name`` is what an error calls it.

        Raises:
            RequestError: It has more.
        """
        if num_images > self.most:
            raise RequestError(
                f"{name} has {num_images} images; limit_mm_per_prompt allows {self.most}"
            )


def images_of(given: Any, name: str) -> "tuple[Image, ...]":
    """The images of a prompt's ``multi_modal_data``; none where that is None.

    Args:
        given: An image of Pillow, or a list of them.
        name: What an error calls the prompt.

    Raises:
        RequestError: Something else, or an image that is too large.
    """
    images = () if given is None else given if isinstance(given, list | tuple) else (given,)
    if not images:
        return ()
    with extra_needed("an image in a prompt", "images"):
        from PIL.Image import Image
    for image in images:
        if not isinstance(image, Image):
            raise RequestError(
                f"multi_modal_data of {name} has a {type(image).__name__}; it must be "
                '{"image": ...} with an image of Pillow or a list of them'
            )
        _check_size(image.size, name)
    return tuple(images)


def image_of_url(url: object) -> "Image":
    """The image of a data URL, upright and in RGB.

    Raises:
        RequestError: Another kind of URL, which would have to be fetched, or what is no image.
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
        return _decoded(base64.b64decode(content, validate=True))
    except binascii.Error as error:
        raise RequestError(f"an image_url is no base64: {error}", param="messages") from error


def image_of_part(part: Mapping[str, Any]) -> "Image":
    """The image of a message's part: ``image_url`` with a data URL, or ``image`` with Pillow's.

    Raises:
        RequestError: What it has instead.
    """
    if part["type"] == "image":
        if isinstance(part.get("image"), list | tuple | None):
            raise RequestError("a part of type 'image' must have an image of Pillow in 'image'")
        (image,) = images_of(part["image"], "a message")
        return image
    given = part.get("image_url")
    detail = given.get("detail", "auto") if isinstance(given, Mapping) else "auto"
    if detail != "auto":
        raise RequestError(
            f"detail of an image_url is {detail!r}; the model's processor chooses: leave it out",
            param="messages",
        )
    return image_of_url(given.get("url") if isinstance(given, Mapping) else given)


def _decoded(content: bytes) -> "Image":
    with extra_needed("an image in a message", "images"):
        from PIL import Image, ImageOps
    try:
        opened = Image.open(BytesIO(content), formats=_FORMATS)
        _check_size(opened.size, "a message")  # known before the pixels are
        return ImageOps.exif_transpose(opened).convert("RGB")
    except RequestError:
        raise
    except Exception as error:  # whatever a decoder makes of bytes
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


def _shown(url: object) -> str:
    text = url if isinstance(url, str) else repr(url)
    return repr(text if len(text) <= _SHOWN_LENGTH else f"{text[:_SHOWN_LENGTH]}...")
