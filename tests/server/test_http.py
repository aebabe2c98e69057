"""What HTTP says besides bodies: methods, media types, origins, and routes that are not there."""

import gzip
import json
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from pagedserve.server.http.bounds import SMALL_BODY_BYTES
from tests.server.conftest import TEMPLATE, Serve, Served
from tests.server.test_completions import PROMPT
from tests.support.described import Description

ORIGIN = {"Origin": "https://page.example"}


def test_head_is_get_without_a_body(shared: Served) -> None:
    for path in ("/health", "/ping", "/version", "/v1/models", "/metrics"):
        answer = shared.http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
        assert int(answer.headers["content-length"]) > 0
    assert shared.http.head("/nowhere").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", {"POST"}),
        ("PUT", "/v1/chat/completions", {"POST"}),
        ("DELETE", "/health", {"GET"}),
        ("DELETE", "/ping", {"GET", "POST"}),
    ],
)
def test_another_method_is_told_the_right_ones(
    shared: Served, method: str, path: str, allowed: set[str]
) -> None:
    answer = shared.http.request(method, path)
    assert answer.status_code == 405
    assert set(answer.headers["allow"].split(", ")) == allowed
    assert answer.json()["error"]["type"] == "MethodNotAllowedError"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "there is no Content-Type; it must be application/json"),
        ("text/plain", "the Content-Type is 'text/plain'; it must be application/json"),
        ("application/x-www-form-urlencoded", "the Content-Type is 'application/x-www-form-url"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_body_must_say_that_it_is_json(
    shared: Served, path: str, given: str | None, said: str
) -> None:
    headers = {} if given is None else {"Content-Type": given}
    answer = shared.http.post(path, content=b'{"prompt": "x"}', headers=headers)
    assert answer.status_code == 415
    assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/audio/transcriptions"])
def test_a_compressed_body_is_refused(shared: Served, path: str) -> None:
    content = gzip.compress(b'{"prompt": "x"}')
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    answer = shared.http.post(path, content=content, headers=headers)
    assert answer.status_code == 415
    said = "the Content-Encoding is 'gzip'; it must be identity"
    assert answer.json()["error"]["message"] == said


@pytest.mark.parametrize("given", ["identity", "utf-8", ""])
def test_a_body_may_say_that_it_is_not_compressed(shared: Served, given: str) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": given}
    content = b'{"prompt": "x", "max_tokens": 1}'
    assert shared.http.post("/v1/completions", content=content, headers=headers).status_code == 200


def test_json_may_have_parameters(shared: Served) -> None:
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    content = b'{"prompt": "x", "max_tokens": 1}'
    assert shared.http.post("/v1/completions", content=content, headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/v1/moderations", "/v1/images/edits", "/v1/audio/speech"])
def test_what_is_not_here_is_said_in_the_same_shape(shared: Served, path: str) -> None:
    answer = shared.http.post(path, json={"input": "x"})
    name = "audio/speech" if "audio" in path else path.split("/")[2]
    assert answer.status_code == 501
    assert answer.json()["error"] == {
        "message": f"{name} is not supported here",
        "type": "NotImplementedError",
        "param": None,
        "code": 501,
    }


def asked(served: Served) -> httpx.Response:
    """What a browser asks before it sends a request of a page."""
    method = {"Access-Control-Request-Method": "POST"}
    headers = {"Access-Control-Request-Headers": "Authorization, Content-Type"}
    return served.http.options("/v1/completions", headers={**ORIGIN, **method, **headers})


def test_pages_of_other_origins_are_let_in_where_they_are_named(serve: Serve) -> None:
    origins = ("https://page.example", "https://other.example")
    with serve(allowed_origins=origins, allow_credentials=True, api_key=("key",)) as served:
        answer = asked(served)  # without a key, as browsers do
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        assert answer.headers["access-control-allow-credentials"] == "true"
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert "authorization" in answer.headers["access-control-allow-headers"].lower()
        body, key = {"prompt": PROMPT, "stream": True}, {"Authorization": "Bearer key"}
        answer = served.http.post("/v1/completions", json=body, headers=ORIGIN | key)
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        refused = served.http.post("/v1/completions", json=body, headers=ORIGIN)
        assert refused.status_code == 401  # a page may read why
        assert refused.headers["www-authenticate"] == "Bearer"
        assert refused.headers["access-control-allow-origin"] == "https://page.example"
        stranger = {"Origin": "https://stranger.example"}
        answer = served.http.post("/v1/completions", json=body, headers=stranger | key)
        assert "access-control-allow-origin" not in answer.headers


def test_methods_and_headers_of_pages_can_be_fewer(serve: Serve) -> None:
    options = {"allowed_methods": ("GET",), "allowed_headers": ("X-Mine",)}
    with serve(allowed_origins=("*",), **options) as served:
        answer = asked(served)
        assert answer.status_code == 400
        assert answer.headers["access-control-allow-methods"] == "GET"
        assert served.http.get("/version", headers=ORIGIN).headers["access-control-allow-origin"]


def test_without_origins_no_page_is_let_in(shared: Served) -> None:
    assert asked(shared).status_code == 405
    assert "access-control-allow-origin" not in shared.http.get("/version", headers=ORIGIN).headers


def test_every_route_describes_its_answers(tmp_path: Path, serve: Serve) -> None:
    with serve(enable_admin_routes=True, batch_directory=str(tmp_path)) as served:
        description = Description.of(served.http)
    schemas = description.document["components"]["schemas"]
    named = re.findall(r'"#/components/schemas/(\w+)"', json.dumps(description.document))
    assert set(named) <= schemas.keys()
    assert [name for name in schemas if "__" in name] == []  # two classes of one name
    # Generators of clients cannot write these.
    fields = (
        field for schema in schemas.values() for field in schema.get("properties", {}).values()
    )
    assert [field for field in fields if isinstance(field.get("default"), dict)] == []
    for method, path, content in description.routes():
        if described := content.get("application/json"):
            name = described["schema"]["$ref"].rpartition("/")[2]
            assert schemas[name]["properties"], (method, path)
        else:
            assert "text/plain" in content or path.endswith("/content"), (method, path)


def test_chats_and_completions_have_the_fields_that_are_described(serve: Serve) -> None:
    prediction = {"type": "content", "content": "abcdefgh"}
    common: list[dict[str, Any]] = [
        {},
        {"prompt_logprobs": 1, "return_token_ids": True, "echo": True},
        {"n": 2, "temperature": 1},
        {"prediction": prediction},
        {"timeout": 1e-9},
    ]
    messages = [{"role": "user", "content": PROMPT}]
    with serve(enable_prompt_tokens_details=True, chat_template=TEMPLATE) as served:
        served.check_answers()
        for more in (*common, {"logprobs": 2, "echo": True}, {"prompt": [PROMPT, "x"]}):
            assert served.complete(**({"prompt": PROMPT, "max_tokens": 3} | more)).is_success
        for more in (*common, {"logprobs": True, "top_logprobs": 2}):
            body = {"messages": messages, "max_tokens": 3} | more
            assert served.http.post("/v1/chat/completions", json=body).is_success


def test_the_openapi_schema_is_built_once_it_is_requested_and_delays_nothing(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Semaphore(0), threading.Event()

    def openapi(app: FastAPI) -> dict[str, Any]:
        del app
        begun.release()
        assert may_end.wait(60)
        return {"components": {"schemas": {}}}

    monkeypatch.setattr(FastAPI, "openapi", openapi)
    with serve() as served, ThreadPoolExecutor() as pool:
        assert not begun.acquire(blocking=False)
        requested = [pool.submit(served.http.get, "/openapi.json") for _ in range(2)]
        assert begun.acquire(timeout=60)
        assert served.http.get("/health").status_code == 200
        may_end.set()
        first, second = (answer.result().json() for answer in requested)
        assert first == second
        assert "ResponseEvent" in first["components"]["schemas"]
    assert not begun.acquire(blocking=False)


@pytest.mark.parametrize(
    ("path", "maker", "body"),
    [
        ("/v1/completions", "completions.job.completion_params", {"prompt": PROMPT}),
        (
            "/v1/chat/completions",
            "chat.job.chat_params",
            {"messages": [{"role": "user", "content": "x"}]},
        ),
    ],
)
def test_the_parameters_of_a_large_body_are_made_outside_the_event_loop(
    shared: Served, monkeypatch: pytest.MonkeyPatch, path: str, maker: str, body: dict[str, Any]
) -> None:
    threads = []
    make: Any = resolve_name(f"pagedserve.server.{maker}")

    def noted(*given: Any, **named: Any) -> Any:
        threads.append(threading.current_thread().name)
        return make(*given, **named)

    monkeypatch.setattr(f"pagedserve.server.{maker}", noted)
    headers = {"Content-Type": "application/json"}
    for spaces in (0, SMALL_BODY_BYTES):
        content = json.dumps(body | {"max_tokens": 1}) + " " * spaces
        assert shared.http.post(path, content=content, headers=headers).status_code == 200
    assert "pagedserve-server" not in threads[0]
    assert threads[1] == "pagedserve-server-large"


@pytest.mark.parametrize(
    ("writer", "body"),
    [
        ("prompt_logprobs", {"prompt_logprobs": 20}),
        ("completion_logprobs", {"echo": True, "logprobs": 20}),
        ("completion_logprobs", {"echo": True, "logprobs": 20, "stream": True}),
    ],
)
def test_many_log_probabilities_are_written_outside_the_event_loop(
    shared: Served, monkeypatch: pytest.MonkeyPatch, writer: str, body: dict[str, Any]
) -> None:
    threads = []
    write: Any = resolve_name(f"pagedserve.server.completions.job.{writer}")

    def noted(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return write(*given)

    monkeypatch.setattr(f"pagedserve.server.completions.job.{writer}", noted)
    for num_tokens in (5, 60):
        prompt = {"prompt": list(range(1, num_tokens + 1)), "max_tokens": 2}
        begun = len(threads)
        assert shared.complete(**prompt, **body).status_code == 200
        is_aside = ["pagedserve-server" in name for name in threads[begun:]]
        assert is_aside[0] == (num_tokens > 5)


def test_a_missing_package_is_named(shared: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    body = {"prompt": PROMPT, "structured_outputs": {"regex": "a missing package"}}
    answer = shared.http.post("/v1/completions", json=body)
    assert answer.status_code == 501
    assert "structured_outputs needs llguidance, which is not installed" in answer.text
