"""Bodies that nobody thought of: made from /openapi.json, or from the names of fields alone."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from pagedserve.server.chat.protocol import ChatBody
from pagedserve.server.completions.protocol import CompletionBody
from pagedserve.server.messages.protocol import CountTokensBody, MessagesBody, MessagesErrorBody
from pagedserve.server.ollama.protocol import GenerateBody, OllamaChatBody, OllamaErrorBody
from pagedserve.server.protocol import ABSENT, ErrorBody
from pagedserve.server.responses.protocol import ResponsesBody
from pagedserve.server.tokens.protocol import TokenizeBody
from tests.server.conftest import TEMPLATE, Serve, Served
from tests.support.examples import examples

# One server for all examples: hypothesis must not begin anew with each.
quick = settings(
    max_examples=examples(60, all_of_them=2000),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
STATUSES = {200, 400, 404, 413, 422, 503}


@pytest.fixture
def fuzzed(serve: Serve) -> Iterator[Served]:
    with serve(chat_template=TEMPLATE, enable_admin_routes=True) as served:
        yield served
        served.wait_until_idle()
        assert served.http.get("/health").status_code == 200
        assert served.complete(prompt="x", max_tokens=2).status_code == 200


def without_timeout(case: schemathesis.Case[Any]) -> schemathesis.Case[Any]:
    """A request that reaches its timeout may be answered with 503 (docs/messages.md)."""
    if isinstance(case.body, dict):
        case.body.pop("timeout", None)
    return case


def schema_conformance(
    ctx: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case[Any]
) -> bool | None:
    """Compare responses with their schemas, except streams of events.

    The schema of these is that of the events' data, which ``test_events.py`` compares; newer
    versions of schemathesis take it for the schema of events with their names.
    """
    (kind,) = response.headers.get("content-type", [""])
    if kind.startswith("text/event-stream"):
        return None
    return response_schema_conformance(ctx, response, case)


def test_a_stream_of_events_is_left_out_of_the_comparison(fuzzed: Served) -> None:
    schema = schemathesis.openapi.from_url(f"{fuzzed.http.base_url}/openapi.json")
    said = [{"role": "user", "content": "x"}]
    body: dict[str, Any] = {"model": "formula", "messages": said, "max_tokens": 1, "stream": True}
    case = schema["/v1/messages"]["POST"].Case(body=body, media_type="application/json")
    case.call_and_validate(checks=[schema_conformance])


@pytest.mark.parametrize("mode", schemathesis.GenerationMode)
def test_answers_are_those_of_the_schema(fuzzed: Served, mode: schemathesis.GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{fuzzed.http.base_url}/openapi.json")
    checks = [
        not_a_server_error,
        status_code_conformance,
        content_type_conformance,
        schema_conformance,
    ]

    @quick
    @given(case=schema.as_strategy(generation_mode=mode).map(without_timeout))
    def calls(case: schemathesis.Case[Any]) -> None:
        case.call_and_validate(checks=checks)

    calls()


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 300)
    | st.integers()
    | st.floats()
    | st.text(max_size=9)
    | st.just("\ud800"),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "name"]), JSON, max_size=3), max_size=3
)
ITEMS = st.lists(
    st.dictionaries(
        st.sampled_from(["type", "role", "content", "call_id", "name", "arguments", "output"]),
        JSON | st.sampled_from(["message", "function_call", "function_call_output", "user"]),
        max_size=5,
    ),
    max_size=3,
)


def bodies(kind: type[BaseModel]) -> st.SearchStrategy[dict[str, Any]]:
    """Fields with any values, and often what it takes to be answered."""
    names = st.sampled_from([*kind.model_fields, *ABSENT, "other"])
    good = st.fixed_dictionaries(
        {"prompt": st.text(max_size=9) | st.lists(st.integers(0, 256), min_size=1, max_size=9)}
        if "prompt" in kind.model_fields
        else {"messages": MESSAGES}
        if "messages" in kind.model_fields
        else {"input": st.text(max_size=9) | ITEMS}
    )
    most = "max_tokens" if "max_tokens" in kind.model_fields else "max_output_tokens"
    short: st.SearchStrategy[dict[str, Any]]
    if "options" in kind.model_fields:
        short = st.just({"options": {"num_predict": 9}})
    else:
        short = st.fixed_dictionaries({}, optional={most: st.integers(0, 9)})
    return st.builds(
        lambda *parts: {name: value for part in parts for name, value in part.items()},
        good,
        short,
        st.dictionaries(names, JSON, max_size=4),
    )


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/completions", CompletionBody),
        ("/v1/chat/completions", ChatBody),
        ("/tokenize", TokenizeBody),
        ("/v1/messages", MessagesBody),
        ("/v1/messages/count_tokens", CountTokensBody),
        ("/v1/responses", ResponsesBody),
        ("/api/chat", OllamaChatBody),
        ("/api/generate", GenerateBody),
    ],
)
def test_whatever_comes_is_answered_or_refused(
    fuzzed: Served, path: str, kind: type[BaseModel]
) -> None:
    @quick
    @example({"prompt": "x", "messages": [], "model": "\ud800"})
    @example({"prompt": "x", "messages": [], "\ud800": 1})
    @given(body=bodies(kind) | JSON)
    def sends(body: Any) -> None:
        headers = {"Content-Type": "application/json"}
        answer = fuzzed.http.post(path, content=json.dumps(body), headers=headers)
        assert answer.status_code in STATUSES, answer.text
        if kind in (MessagesBody, CountTokensBody):
            check_message(answer)
        elif kind in (OllamaChatBody, GenerateBody):
            check_lines(answer)
        else:
            check(answer)

    sends()


def check_message(answer: httpx.Response) -> None:
    """A response of the Messages API is what it states."""
    if answer.status_code != 200:
        error = MessagesErrorBody.model_validate_json(answer.content)
        assert error.request_id == answer.headers["request-id"]
        assert error.error.message
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.text.endswith('data: {"type": "message_stop"}\n\n')
    else:
        assert answer.json()


def check_lines(answer: httpx.Response) -> None:
    """A response of Ollama's API is what it states."""
    if answer.status_code != 200:
        assert OllamaErrorBody.model_validate_json(answer.content).error
    else:
        lines = [json.loads(line) for line in answer.text.splitlines()]
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]


def check(answer: httpx.Response) -> None:
    """An answer is what it says that it is."""
    if answer.status_code != 200:
        error = ErrorBody.model_validate_json(answer.content).error
        assert error.code == answer.status_code
        assert error.message
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in answer.text.split("\n\n")[-3]
    else:
        assert answer.json()
