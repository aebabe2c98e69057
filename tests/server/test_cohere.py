"""Embeddings in Cohere's form are those of ``LLM.embed``."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedserve import LLM
from tests.server.conftest import Served
from tests.server.test_pooling import TEXTS, serving, vectors

ROUTE = "/v2/embed"
PROMPTS = {"query": "query: ", "passage": "passage: ", "classification": "class: "}


@pytest.fixture(scope="module")
def offline(minilm: Path) -> LLM:
    return LLM(str(minilm), use_tqdm_on_load=False)


@pytest.fixture(scope="module")
def served(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of MiniLM with prompts."""
    directory = tmp_path_factory.mktemp("prompts")
    for file in minilm.iterdir():
        (directory / file.name).symlink_to(file)
    named = directory / "config_sentence_transformers.json"
    named.unlink(missing_ok=True)
    named.write_text(json.dumps({"prompts": PROMPTS}))
    with serving(directory) as served:
        yield served
        served.wait_until_idle()


def embed(served: Served, **body: Any) -> dict[str, Any]:
    answer = served.http.post(ROUTE, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_types_of_embeddings(served: Served, offline: LLM) -> None:
    exact = vectors(offline, TEXTS)
    found = embed(served, texts=TEXTS, embedding_types=["float", "base64", "binary", "ubinary"])
    embeddings = found["embeddings"]
    np.testing.assert_allclose(np.array(embeddings["float"]), exact, atol=1e-5)
    decoded = [np.frombuffer(base64.b64decode(text), "<f4") for text in embeddings["base64"]]
    np.testing.assert_allclose(np.array(decoded), exact, atol=1e-5)
    signs = np.array(embeddings["float"]) >= 0
    bits = np.unpackbits(np.array(embeddings["ubinary"], np.uint8), axis=1)
    assert (bits == signs).all()
    assert (np.array(embeddings["binary"]) + 128 == np.array(embeddings["ubinary"])).all()
    assert found["texts"] == TEXTS
    assert found["response_type"] == "embeddings_by_type"
    assert found["meta"]["billed_units"]["input_tokens"] == found["usage"]["prompt_tokens"]
    assert embed(served, texts=TEXTS)["embeddings"].keys() == {"float"}


@pytest.mark.parametrize(
    ("input_type", "prefix"),
    [
        ("search_query", "query: "),
        ("search_document", "passage: "),
        ("classification", "class: "),
        ("clustering", ""),
    ],
)
def test_what_a_vector_is_for_names_the_prompt(
    served: Served, offline: LLM, input_type: str, prefix: str
) -> None:
    found = embed(served, texts=TEXTS[:1], input_type=input_type)["embeddings"]["float"]
    np.testing.assert_allclose(found, vectors(offline, [prefix + TEXTS[0]]), atol=1e-5)


def test_texts_in_parts(served: Served, offline: LLM) -> None:
    parts = [{"type": "text", "text": text} for text in TEXTS[:2]]
    found = embed(served, inputs=[{"content": parts}])
    np.testing.assert_allclose(
        found["embeddings"]["float"], vectors(offline, ["\n".join(TEXTS[:2])]), atol=1e-5
    )


def test_long_texts_are_shortened_unless_that_is_refused(served: Served) -> None:
    shortened: list[tuple[dict[str, Any], int]] = [
        ({}, 256),
        ({"max_tokens": 9}, 9),
        ({"max_tokens": 999}, 256),
        ({"truncate_prompt_tokens": 7}, 7),
    ]
    for more, wanted in shortened:
        found = embed(served, texts=["word " * 300], **more)
        assert found["usage"]["prompt_tokens"] == wanted


@pytest.mark.parametrize(
    ("body", "refusal"),
    [
        ({}, "give either texts or inputs"),
        ({"texts": []}, "texts has 0 prompts"),
        ({"texts": ["a"], "inputs": [{"content": []}]}, "give either texts or inputs"),
        ({"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types"),
        ({"texts": ["a"], "embedding_types": []}, "embedding_types"),
        ({"texts": ["a"], "truncate": "START"}, "truncate"),
        ({"texts": ["word " * 300], "truncate": "NONE"}, "302 tokens; it must have at most 256"),
        (
            {"texts": ["a"], "truncate": "NONE", "max_tokens": 3},
            "max_tokens is given with",
        ),
        ({"texts": ["a"], "output_dimension": 8}, "dimensions is 8"),
        ({"texts": ["a"], "images": ["x"]}, "images is no field of this request"),
    ],
)
def test_requests_that_cannot_be_are_refused(
    served: Served, body: dict[str, Any], refusal: str
) -> None:
    answer = served.http.post(ROUTE, json=body)
    assert answer.status_code == 400
    assert refusal in answer.json()["error"]["message"]
