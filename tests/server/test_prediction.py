"""Predicted outputs over HTTP: the same text in fewer steps, and their counts in the usage."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from pagedserve.server.options import ServerArgs
from tests.server.conftest import TEMPLATE, Served
from tests.support.drafts import NGRAM, draft_always
from tests.support.formula import FormulaModel

# Visible text of random letters, of which most are not forced.
HELD: dict[str, Any] = {
    "model": "formula",
    "messages": [{"role": "user", "content": "Go."}],
    "temperature": 0.8,
    "seed": 5,
    "max_tokens": 60,
    "extra_body": {"structured_outputs": {"regex": "[a-z]{40}"}},
}


@pytest.fixture(scope="module")
def predicting() -> Iterator[Served]:
    args = ServerArgs(port=0, uvicorn_log_level="warning", chat_template=TEMPLATE)
    with Served(lambda: FormulaModel().engine(speculative_config=NGRAM), args) as running:
        draft_always(running.engine)
        yield running
        running.wait_until_idle()


def client_of(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.http.base_url}/v1", api_key="none")


def ask(served: Served, content: Any = None, **more: Any) -> Any:
    given = {} if content is None else {"prediction": {"type": "content", "content": content}}
    with client_of(served) as client:
        answer = client.chat.completions.create(**HELD | given | more)
        return list(answer) if more.get("stream") else answer


def test_usage_counts_the_tokens_of_a_prediction(predicting: Served) -> None:
    plain = ask(predicting)
    assert plain.usage.completion_tokens_details is None
    text = plain.choices[0].message.content
    before = predicting.engine.stats.num_steps
    for content in (text, [{"type": "text", "text": part} for part in (text[:9], text[9:])]):
        found = ask(predicting, content)
        assert found.choices[0].message.content == text
        details = found.usage.completion_tokens_details
        assert details.accepted_prediction_tokens >= 30
        assert details.rejected_prediction_tokens <= 1
    assert predicting.engine.stats.num_steps - before < 2 * 15
    other = ask(predicting, f"{text[:5]}{'!' * 30}")
    assert other.choices[0].message.content == text
    assert other.usage.completion_tokens_details.accepted_prediction_tokens <= 5


def test_a_stream_has_the_counts_at_its_end(predicting: Served) -> None:
    text = ask(predicting).choices[0].message.content
    options = {"stream": True, "stream_options": {"include_usage": True}, "n": 2}
    chunks = ask(predicting, text, **options)
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts[0] == text != texts[1]
    assert chunks[-1].usage.completion_tokens_details.accepted_prediction_tokens >= 30


def test_completions_take_predictions_too(predicting: Served) -> None:
    body: dict[str, Any] = {"prompt": "Go.", "max_tokens": 50, "temperature": 0.8, "seed": 5}
    body["structured_outputs"] = {"regex": "[a-z]{40}"}
    text = predicting.complete(**body).json()["choices"][0]["text"]
    prediction = {"type": "content", "content": text}
    answer = predicting.complete(**body, prediction=prediction).json()
    assert answer["choices"][0]["text"] == text
    assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] >= 30


def test_without_draft_tokens_it_is_passed_over(shared: Served) -> None:
    plain = ask(shared)
    found = ask(shared, plain.choices[0].message.content)
    assert found.choices == plain.choices
    details = found.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == details.rejected_prediction_tokens == 0


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("text", "prediction"),
        ({"type": "text", "content": "x"}, "prediction.type"),
        ({"type": "content", "content": [{"type": "image", "text": "x"}]}, "prediction.content"),
        ({"type": "content", "content": "x" * 3000}, "prediction has 3000 characters"),
    ],
)
def test_an_invalid_prediction_is_refused_by_name(shared: Served, given: Any, error: str) -> None:
    body = {"messages": [{"role": "user", "content": "Go."}], "prediction": given}
    answer = shared.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert error in answer.json()["error"]["message"]
    empty = body | {"prediction": {"type": "content", "content": ""}, "max_tokens": 2}
    assert shared.http.post("/v1/chat/completions", json=empty).status_code == 200
