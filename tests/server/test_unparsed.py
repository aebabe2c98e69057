"""What is counted of a body before it is parsed: against its values, and character by character."""

import json
from collections.abc import Iterable
from random import Random
from typing import Any, Final

import pytest

from pagedserve.errors import RequestError
from pagedserve.server.chat.protocol import ChatBody
from pagedserve.server.completions.protocol import CompletionBody
from pagedserve.server.http.body import read_body
from pagedserve.server.http.bounds import MAX_STRINGS, MODEL_LENGTH
from pagedserve.server.http.unparsed import marks_outside_strings
from pagedserve.server.pooling.protocol import EmbeddingBody

_LENGTH: Final = 32_768


def naive_marks(content: bytes) -> bytes:
    """The marks outside strings, character by character."""
    marks, is_open, is_escaped = bytearray(), False, False
    for character in content:
        if character == ord('"') and not is_escaped:
            is_open = not is_open
        is_escaped = is_open and character == ord("\\") and not is_escaped
        if not is_open and character in b'",[]{}':
            marks.append(character)
    return bytes(marks)


def assert_marks(content: bytes, sizes: Iterable[int], wanted: bytes) -> None:
    for size in sizes:
        found = b"".join(marks.tobytes() for marks, _ in marks_outside_strings(content, size))
        assert found == wanted, (size, content)


def marks_of(value: Any) -> str:
    """The marks of a parsed document, as ``json.dumps`` would write them."""
    if isinstance(value, str):
        return '"'
    if isinstance(value, dict):
        return "{" + ",".join('"' + marks_of(item) for item in value.values()) + "}"
    return "[" + ",".join(map(marks_of, value)) + "]" if isinstance(value, list) else ""


def random_json(rng: Random, depth: int = 3) -> Any:
    text = "".join(rng.choices('\\\\"",[]{}aé\n', k=rng.randrange(12)))
    if depth == 0:
        return rng.choice((text, 1, None, -2.5))
    values = [random_json(rng, rng.randrange(depth)) for _ in range(rng.randrange(5))]
    if rng.random() < 0.5:
        return values
    return {f"{text}{index}": value for index, value in enumerate(values)}


def test_the_marks_of_json_are_those_of_its_values() -> None:
    rng = Random(0)
    for _ in range(50):
        content = json.dumps(random_json(rng), ensure_ascii=rng.random() < 0.5).encode()
        wanted = marks_of(json.loads(content)).encode()
        assert_marks(content, range(1, len(content) + 1), wanted)


def test_the_marks_of_other_bodies_are_those_that_a_parser_would_see() -> None:
    rng = Random(1)
    for _ in range(500):
        content = bytes(rng.choices(b'\\\\\\"",[]{}a:', k=rng.randrange(40)))
        assert_marks(content, (1, 2, 3, 5, 8, 64), naive_marks(content))


@pytest.mark.parametrize("costly", ['""', "[]", "{}"])
def test_what_is_no_number_has_the_smaller_bound(costly: str) -> None:
    numbers = ",5" * (2 * MAX_STRINGS)
    most = MAX_STRINGS - 3  # the body, its field's name and its list
    for number, said in ((most, "user has"), (most + 1, f"{MAX_STRINGS} strings, lists and obj")):
        content = f'{{"user": [{",".join([costly] * number)}{numbers}]}}'.encode()
        with pytest.raises(RequestError, match=said):
            read_body(content, EmbeddingBody, {})


def test_longer_strings_than_any_text_are_not_parsed() -> None:
    sizes, text = {MODEL_LENGTH: _LENGTH}, rb"\ud83d\ude00" * (16 * _LENGTH)
    body = read_body(b'{"prompt": "' + text + b'"}', CompletionBody, sizes)
    assert body.model_dump()["prompt"] == "\U0001f600" * (16 * _LENGTH)
    with pytest.raises(RequestError, match=f"a string of more than {12 * 16 * _LENGTH} bytes"):
        read_body(b'{"prompt": "' + text + b"x" * (1 << 18) + b'"}', CompletionBody, sizes)
    content = b'{"prompt": "x"' + b" " * (8 << 20) + b"}"
    assert isinstance(read_body(content, CompletionBody, sizes), CompletionBody)
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (20 << 20)}}
    content = json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode()
    assert isinstance(read_body(content, ChatBody, sizes), ChatBody)
