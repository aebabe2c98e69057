"""Conversations with images: offline, and over HTTP as OpenAI's clients write them."""

import base64
import struct
import weakref
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any

import pytest
from PIL import Image, ImageOps

from pagedserve import EngineArgs, LLMEngine, RequestError, SamplingParams
from pagedserve.inputs.images import (
    MAX_SUM_PIXELS,
    EncodedImage,
    image_of_part,
    image_of_url,
    images_of_parts,
)
from pagedserve.server.options import ServerArgs
from tests.images.conftest import Family, MakeFamily
from tests.server.conftest import Served
from tests.support.images import picture

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def data_url(image: Image.Image, form: str = "PNG") -> str:
    buffer = BytesIO()
    image.save(buffer, form)
    return f"data:image/{form.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def message(*parts: Any) -> list[dict[str, Any]]:
    """What a user says: texts, images, and parts as they are."""
    content = []
    for part in parts:
        if isinstance(part, Image.Image):
            content.append({"type": "image_url", "image_url": {"url": data_url(part)}})
        else:
            content.append({"type": "text", "text": part} if isinstance(part, str) else part)
    return [{"role": "user", "content": content}]


def rendered(made: Family, *parts: Any) -> tuple[str, list[Image.Image]]:
    """The text that the template makes of a message, and its images."""
    token = made.oracle.token
    words = [token if isinstance(part, Image.Image) else part for part in parts]
    images = [part for part in parts if isinstance(part, Image.Image)]
    return f" w5 {' '.join(words)} w6", images


def answer(made: Family, *parts: Any) -> list[int]:
    return made.oracle.generate(*rendered(made, *parts), 6)[0]


PARTS: list[tuple[Any, ...]] = [
    ("w7 w8", picture(1), "w9"),
    (picture(2), "w3", picture(3, 24, 40), "w4"),
    ("w7 w8 w9",),
]


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "smolvlm"])
def test_conversations_with_images_offline(family: MakeFamily, name: str) -> None:
    made = family(name)
    outputs = made.load().chat([message(*parts) for parts in PARTS], GREEDY, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    assert tokens == [answer(made, *parts) for parts in PARTS]


def test_images_of_pillow_and_templates_of_text(family: MakeFamily) -> None:
    made = family("llava")
    llm = made.load()
    messages = message("w7 w8", {"type": "image", "image": picture(1)}, "w9")
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == answer(made, *PARTS[0])
    template = "{% for message in messages %}w5 {{ message.content }} w6{% endfor %}"
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False, chat_template=template)
    assert list(output.outputs[0].token_ids) == answer(made, *PARTS[0])
    for wrong in ({"type": "image", "image": [picture(1)]}, {"type": "image", "image": "a.png"}):
        with pytest.raises(RequestError, match="image of Pillow"):
            llm.chat(message(wrong), GREEDY, use_tqdm=False)


@pytest.fixture(scope="module")
def served(family: MakeFamily) -> Iterator[tuple[Served, Family]]:
    made = family("qwen2_vl")
    engine = EngineArgs(
        model=str(made.directory),
        max_model_len=128,
        num_gpu_blocks=128,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        max_num_batched_tokens=16,
        max_num_seqs=8,
        limit_mm_per_prompt={"image": 2},
    )
    args = ServerArgs(port=0, uvicorn_log_level="warning")
    with Served(lambda: LLMEngine(engine), args) as server:
        yield server, made


def ask(server: Served, messages: Any, **more: Any) -> Any:
    body = {"messages": messages, "temperature": 0, "max_tokens": 6, "ignore_eos": True}
    return server.http.post("/v1/chat/completions", json=body | {"return_token_ids": True} | more)


def test_chats_with_images_over_http(served: tuple[Served, Family]) -> None:
    server, made = served
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda parts: ask(server, message(*parts)), PARTS * 2))
    for parts, found in zip(PARTS * 2, answers, strict=True):
        assert found.json()["choices"][0]["token_ids"] == answer(made, *parts)
    usage = answers[0].json()["usage"]
    assert usage["prompt_tokens"] == len(answers[0].json()["prompt_token_ids"]) > 10
    server.wait_until_idle()


def turned(orientation: int, *tags: bytes) -> bytes:
    """A PNG whose EXIF has this orientation and further tags."""
    entries = [struct.pack("<HHIHH", 0x0112, 3, 1, orientation, 0), *tags]
    directory = struct.pack("<H", len(entries)) + b"".join(entries) + bytes(4)
    buffer = BytesIO()
    picture(1, 16, 32).save(buffer, "PNG", exif=b"Exif\0\0II*\0\x08\0\0\0" + directory)
    return buffer.getvalue()


@pytest.mark.parametrize("orientation", range(10))
def test_a_photograph_is_turned_upright(orientation: int) -> None:
    content = turned(orientation)
    expected = ImageOps.exif_transpose(Image.open(BytesIO(content)))
    assert EncodedImage(content, (16, 32)).decoded().tobytes() == expected.tobytes()


def test_metadata_that_pillow_cannot_write_are_accepted() -> None:
    content = turned(6, struct.pack("<HHIf", 0x010E, 11, 1, 1.0))  # a description that is a float
    with pytest.raises(AttributeError):
        ImageOps.exif_transpose(Image.open(BytesIO(content)))
    assert EncodedImage(content, (16, 32)).decoded().size == (32, 16)


def test_an_image_with_a_palette_becomes_rgb() -> None:
    with_palette = Image.new("P", (4, 4))
    assert image_of_url(data_url(with_palette, "GIF")).decoded().mode == "RGB"


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB", "L", "I;16"])
def test_transparent_images_are_put_on_white(mode: str) -> None:
    image, buffer = Image.new(mode, (2, 1), 0), BytesIO()
    transparent: dict[str, Any] = {"RGBA": None, "LA": None, "RGB": (0, 0, 0)}
    image.save(buffer, "PNG", transparency=transparent.get(mode, 0))
    assert EncodedImage(buffer.getvalue(), (2, 1)).decoded().tobytes() == b"\xff" * 6


def png_of(width: int, height: int) -> str:
    """A PNG that says how large it is, and has no pixels."""
    content = b"\x89PNG\r\n\x1a\n"
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    for kind, data in ((b"IHDR", header), (b"IDAT", b"")):
        content += struct.pack(">I", len(data)) + kind + data
        content += struct.pack(">I", zlib.crc32(kind + data))
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def test_the_pixels_of_a_conversation_are_bounded() -> None:
    large = {"type": "image_url", "image_url": {"url": png_of(5792, 5792)}}
    assert len(images_of_parts([large] * 4)) == 4
    with pytest.raises(RequestError, match=f"167736320 pixels; at most {MAX_SUM_PIXELS}"):
        images_of_parts([large] * 5)


def test_images_are_decoded_one_at_a_time(
    served: tuple[Served, Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = served
    decode, living, most = EncodedImage.decoded, list[weakref.ref[Any]](), [0]

    def counted(image: EncodedImage) -> Any:
        pixels = decode(image)
        living.append(weakref.ref(pixels))
        most[0] = max(most[0], sum(known() is not None for known in living))
        return pixels

    monkeypatch.setattr(EncodedImage, "decoded", counted)
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda parts: ask(server, message(*parts)), PARTS * 2))
    assert {answer.status_code for answer in answers} == {200}
    assert living
    assert most[0] <= 2  # the one that is prepared, and the next
    server.wait_until_idle()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://example.com/cat.png", "nothing is fetched: accepted are data URLs"),
        ("file:///etc/passwd", "nothing is fetched"),
        (None, "nothing is fetched"),
        ("data:image/png,abc", "must have its image in base64"),
        ("data:image/png;base64,a*b", "no base64"),
        ("data:image/png;base64,aGVsbG8=", "cannot be decoded"),
        ("data:image/svg+xml;base64,PHN2Zy8+", "accepted are PNG, JPEG, WEBP, GIF, BMP"),
        (png_of(6_000, 6_000), "6000 x 6000 pixels"),
        (png_of(1, 201), "1 x 201 pixels; its longer side must be at most 200 times"),
        (png_of(60_000, 60_000), "cannot be decoded (DecompressionBombError)"),
        (png_of(16, 16), "cannot be decoded"),
    ],
)
def test_what_is_no_image_is_refused_by_name(
    served: tuple[Served, Family], url: str | None, said: str
) -> None:
    server, _ = served
    found = ask(server, message("w7", {"type": "image_url", "image_url": {"url": url}}))
    assert found.status_code == 400
    assert said in found.json()["error"]["message"]
    assert ask(server, message("w7 w8")).status_code == 200


@pytest.mark.parametrize("detail", ["auto", "low", "high", "original", None])
def test_detail_has_no_effect(detail: str | None) -> None:
    url = data_url(picture(1))
    plain = image_of_part({"type": "image_url", "image_url": {"url": url}})
    given = {"type": "image_url", "image_url": {"url": url, "detail": detail}}
    assert image_of_part(given) == plain


def test_vllms_name_of_a_pillow_image() -> None:
    image = picture(1)
    assert image_of_part({"type": "image_pil", "image_pil": image}) is image
    with pytest.raises(RequestError, match="must have an image of Pillow in 'image_pil'"):
        image_of_part({"type": "image_pil", "image": image})


def test_what_an_image_cannot_have_is_refused_by_name(served: tuple[Served, Family]) -> None:
    server, made = served
    url = data_url(picture(1))
    best = {"type": "image_url", "image_url": {"url": url, "detail": "best"}}
    for messages, said in (
        (message(*[picture(1)] * 3), "3 images; limit_mm_per_prompt allows 2"),
        (message(best), "detail of an image_url is 'best'; accepted are auto, low, high, original"),
        (message({"type": "video_url", "video_url": {"url": url}}), "accepted are text and image"),
        (message(picture(1), f"w7 {made.oracle.token}"), "1 images and 2 times the image token"),
    ):
        found = ask(server, messages)
        assert found.status_code == 400
        assert said in found.json()["error"]["message"]
    found = server.http.post("/tokenize", json={"messages": message(picture(1))})
    assert found.status_code == 400
    assert "messages has images" in found.json()["error"]["message"]
