"""Each bound on what a client may send: refused just beyond it, served up to it, streams go on."""

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import httpx
import pytest

from pagedserve.server.decisions.protocol import DecisionBody
from pagedserve.server.http import bounds, connection
from pagedserve.server.http.body import read_body
from pagedserve.server.http.bounds import (
    BOUNDS,
    MAX_DEPTH,
    MAX_VALUES,
    MODEL_LENGTH,
    VOCABULARY,
    Bound,
)
from pagedserve.server.http.json_document import parsed
from pagedserve.server.options import ServerArgs
from pagedserve.server.pooling.protocol import EmbeddingBody
from tests.server.conftest import TEMPLATE, Served
from tests.server.test_completions import PROMPT, encode, text_after
from tests.server.test_life import slowly
from tests.support.formula import FormulaModel
from tests.support.pages import LIMITS, with_bounds

LENGTH: Final = 32_768
ENGINE: Final = {"max_model_len": LENGTH, "num_gpu_blocks": 30_000}
ROUTES: Final = {
    "completion": "/v1/completions",
    "chat": "/v1/chat/completions",
    "message": "/v1/messages",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
    "input": "/v1/embeddings",
    "score": "/score",
    "rerank": "/rerank",
    "decision": "/v1/systemone",
    "abort": "/abort_requests",
    "load": "/v1/load_lora_adapter",
    "ollama": "/api/chat",
}
GOOD: Final[dict[str, dict[str, Any]]] = {
    "completion": {"prompt": PROMPT, "max_tokens": 1},
    "chat": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "message": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "tokenize": {"messages": [{"role": "user", "content": "x"}]},
    "detokenize": {},
    "input": {},
    "score": {"text_1": "x", "text_2": "x"},
    "rerank": {"query": "x"},
    "decision": {"questions": {"q": {"type": "noul"}}},
    "abort": {},
    "load": {"lora_name": "x", "lora_path": "x"},
    "ollama": {"model": "formula", "messages": [{"role": "user", "content": "x"}], "stream": False},
}


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or None}}


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"} | fields]}


def structured(**given: Any) -> dict[str, Any]:
    return {"structured_outputs": given}


def stopped(stop: str | list[str]) -> dict[str, Any]:
    return {"options": {"num_predict": 1, "stop": stop}}


def choice(num_chars: int) -> list[str]:
    """So many characters, of which none must follow at the start: those take long to compile."""
    return ["x", "y" * (num_chars - 1)]


def texts(number: int) -> list[str]:
    return [f"w{index}" for index in range(number)]


# Of each bound a route, and the fields of a body that has so many.
CASES: Final[dict[tuple[str, str], tuple[str, Callable[[int], dict[str, Any]]]]] = {
    ("model", "characters"): ("completion", lambda n: {"model": "x" * n}),
    ("cache_salt", "characters"): ("completion", lambda n: {"cache_salt": "x" * n}),
    ("prompt", "prompts"): ("completion", lambda n: {"prompt": ["x"] * n}),
    ("input", "prompts or items"): ("input", lambda n: {"input": ["x"] * n}),
    ("stop", "characters"): ("completion", lambda n: {"stop": "x" * n}),
    ("stop", "strings"): ("completion", lambda n: {"stop": texts(n)}),
    ("stop[]", "characters"): ("completion", lambda n: {"stop": ["x", "x" * n]}),
    ("stop_token_ids", "token ids"): ("completion", lambda n: {"stop_token_ids": [5] * n}),
    ("allowed_token_ids", "token ids"): ("completion", lambda n: {"allowed_token_ids": [5] * n}),
    ("logit_bias", "token ids"): (
        "completion",
        lambda n: {"logit_bias": {str(token): 1 for token in range(n)}},
    ),
    ("bad_words", "words"): ("completion", lambda n: {"bad_words": texts(n)}),
    ("bad_words[]", "characters"): ("completion", lambda n: {"bad_words": ["x", "x" * n]}),
    ("guided_choice", "choices"): ("completion", lambda n: {"guided_choice": texts(n)}),
    ("guided_choice[]", "characters"): ("completion", lambda n: {"guided_choice": choice(n)}),
    ("guided_json", "characters"): ("completion", lambda n: {"guided_json": "x" * n}),
    ("guided_regex", "characters"): ("completion", lambda n: {"guided_regex": "(" * n}),
    ("guided_grammar", "characters"): ("completion", lambda n: {"guided_grammar": "x" * n}),
    ("structured_outputs.choice", "choices"): ("completion", lambda n: structured(choice=texts(n))),
    ("structured_outputs.choice[]", "characters"): (
        "completion",
        lambda n: structured(choice=choice(n)),
    ),
    ("structured_outputs.json", "characters"): ("completion", lambda n: structured(json="x" * n)),
    ("structured_outputs.regex", "characters"): ("completion", lambda n: structured(regex="(" * n)),
    ("structured_outputs.grammar", "characters"): (
        "completion",
        lambda n: structured(grammar="x" * n),
    ),
    ("stop_sequences", "strings"): ("message", lambda n: {"stop_sequences": texts(n)}),
    ("stop_sequences[]", "characters"): ("message", lambda n: {"stop_sequences": ["x" * n]}),
    ("options.stop", "characters"): ("ollama", lambda n: stopped("x" * n)),
    ("options.stop", "strings"): ("ollama", lambda n: stopped(texts(n))),
    ("options.stop[]", "characters"): ("ollama", lambda n: stopped(["x", "x" * n])),
    ("system", "parts"): ("message", lambda n: {"system": [{"type": "text", "text": "x"}] * n}),
    ("state", "elements"): ("decision", lambda n: {"state": [1] * n}),
    ("messages", "messages"): (
        "chat",
        lambda n: {"messages": [{"role": "user", "content": "x"}] * n},
    ),
    ("messages[].role", "characters"): ("chat", lambda n: message(role="x" * n)),
    ("messages[].name", "characters"): ("chat", lambda n: message(name="x" * n)),
    ("messages[].tool_call_id", "characters"): ("chat", lambda n: message(tool_call_id="x" * n)),
    ("messages[].content", "parts"): (
        "chat",
        lambda n: message(content=[{"type": "text", "text": "x"}] * n),
    ),
    ("messages[].tool_calls", "calls"): (
        "chat",
        lambda n: message(role="assistant", tool_calls=[{"function": {"name": "x"}}] * n),
    ),
    ("chat_template", "characters"): ("chat", lambda n: {"chat_template": "x" * n}),
    ("chat_template_kwargs", "variables"): (
        "chat",
        lambda n: {"chat_template_kwargs": dict.fromkeys(texts(n), 1)},
    ),
    ("chat_template_args", "variables"): (
        "chat",
        lambda n: {"chat_template_args": dict.fromkeys(texts(n), 1)},
    ),
    ("tools", "tools"): (
        "chat",
        lambda n: {"tools": [*map(tool, texts(n))], "tool_choice": "none"},
    ),
    ("text_1", "texts"): ("score", lambda n: {"text_1": texts(n)}),
    ("text_2", "texts"): ("score", lambda n: {"text_2": texts(n)}),
    ("queries", "texts"): ("score", lambda n: {"queries": texts(n)}),
    ("items", "texts"): ("score", lambda n: {"items": texts(n)}),
    ("data_1", "texts"): ("score", lambda n: {"data_1": texts(n)}),
    ("data_2", "texts"): ("score", lambda n: {"data_2": texts(n)}),
    ("documents", "documents"): ("rerank", lambda n: {"documents": texts(n)}),
    ("tokens", "token ids"): ("detokenize", lambda n: {"tokens": [5] * n}),
    ("request_ids", "ids"): ("abort", lambda n: {"request_ids": texts(n)}),
    ("request_ids[]", "characters"): ("abort", lambda n: {"request_ids": ["x" * n]}),
    ("lora_name", "characters"): ("load", lambda n: {"lora_name": "x" * n}),
    ("lora_path", "characters"): ("load", lambda n: {"lora_path": "x" * n}),
}
# What the server of these tests answers below the bound, where that is no 200: another reason.
ELSEWHERE: Final = {
    "model": 404,  # there is none of that name
    "input": 400,  # the model generates
    "state": 400,  # has more tokens than elements
    "text_1": 400,
    "text_2": 400,
    **dict.fromkeys(("queries", "items", "data_1", "data_2"), 400),
    "documents": 400,
    "lora_name": 400,  # enable_lora is not given
    "lora_path": 400,
    "guided_json": 400,  # is no schema
    "guided_regex": 400,
    "guided_grammar": 400,
    "structured_outputs.json": 400,
    "structured_outputs.regex": 400,
    "structured_outputs.grammar": 400,
    "chat_template": 400,  # is taken from nobody
    "logit_bias": 400,  # more than the vocabulary
}


@pytest.fixture(scope="module")
def large() -> Iterator[Served]:
    args = ServerArgs(
        port=0,
        uvicorn_log_level="warning",
        chat_template=TEMPLATE,
        enable_admin_routes=True,
        max_num_queued_reqs=3000,
    )
    with Served(partial(FormulaModel().engine, **ENGINE), args) as running:
        running.http.timeout = httpx.Timeout(300)
        yield running
        running.wait_until_idle()


def post(served: Served, route: str, fields: dict[str, Any]) -> httpx.Response:
    return served.http.post(ROUTES[route], json=GOOD[route] | fields)


def most_of(bound: Bound) -> int:
    sizes = {MODEL_LENGTH: LENGTH, VOCABULARY: FormulaModel.vocab_size}
    return sizes[bound.most] if isinstance(bound.most, str) else bound.most


def test_every_bound_has_a_case() -> None:
    assert {(bound.path, bound.unit) for bound in BOUNDS} == CASES.keys()


@pytest.mark.parametrize("bound", BOUNDS, ids=lambda bound: f"{bound.path} {bound.unit}")
def test_a_bound_is_where_it_is_said_to_be(large: Served, bound: Bound) -> None:
    route, fields = CASES[bound.path, bound.unit]
    most = most_of(bound)
    name = re.split(r"[.\[]", bound.path)[0]
    refused = post(large, route, fields(most + 1))
    found = refused.json()["error"]
    error = {"message": found} if route == "ollama" else found
    assert (refused.status_code, error.get("param", name)) == (400, name)
    # Errors of the others name it in the text alone.
    assert ("param" in error) == (route not in {"message", "ollama"})
    assert error["message"].startswith(name)
    assert f" has {most + 1} {bound.unit}; at most {most} are accepted" in error["message"]
    answered = post(large, route, fields(most))
    assert "at most" not in answered.text
    assert answered.status_code == ELSEWHERE.get(bound.path, 200), answered.text


HOSTILE: Final[dict[str, tuple[str, Callable[[], bytes], str]]] = {
    "prompts": ("completion", lambda: b'{"prompt": [' + b"{}," * 300_000 + b"{}]}", "strings"),
    "objects": ("completion", lambda: b'{"prompt": [' + b"{}," * 60_000 + b"{}]}", "prompt"),
    "texts": ("completion", lambda: b'{"prompt": [' + b'"",' * 60_000 + b'""]}', "prompt has"),
    "stop ids": ("completion", lambda: b'{"stop_token_ids": [' + b"1," * 200_000 + b"1]}", "stop"),
    "ids": (
        "completion",
        lambda: b'{"allowed_token_ids": [' + b"1," * 2_000_000 + b"1]}",
        "allowed_token_ids has 2000001 token ids",
    ),
    "numbers": (
        "completion",
        lambda: b'{"prompt": [' + b"1," * MAX_VALUES + b"1]}",
        f"more than {MAX_VALUES} values",
    ),
    "role": (
        "chat",
        lambda: b'{"messages": [{"role": "' + b"x" * 8_000_000 + b'", "content": "x"}]}',
        "messages[0].role has 8000000 characters",
    ),
    "messages": ("chat", lambda: b'{"messages": [' + b"{}," * 1_000_000 + b"{}]}", "strings"),
    "text": (
        "chat",
        lambda: b'{"messages": [{"role": "user", "content": "x", "y": "' + b"x" * 900_000 + b'"}]}',
        "characters; at most 524288",
    ),
    "refusal": (
        "chat",
        lambda: json.dumps(
            message(content=[{"type": "refusal", "refusal": "x" * 900_000}])
        ).encode(),
        "characters; at most 524288",
    ),
    "depth": (
        "completion",
        lambda: b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "deep",
    ),
    "escapes": ("completion", lambda: b'{"prompt": "' + rb"\"," * 3_000_000 + b'"}', "bytes"),
    "digits": ("completion", lambda: b'{"n": ' + b"9" * 1_000_000 + b"}", "4300 digits"),
    "keys": ("completion", lambda: b"{" + b'"a":1,' * 60_000 + b'"prompt": "x"}', "a is no field"),
    "fields": (
        "completion",
        lambda: json.dumps(dict.fromkeys(map(str, range(60_000)), 1)).encode(),
        "the body has 60000 fields",
    ),
    "names": (
        "completion",
        lambda: json.dumps({"structured_outputs": dict.fromkeys(texts(60_000), 1)}).encode(),
        "structured_outputs has 60000 elements",
    ),
    "logit_bias": (
        "completion",
        lambda: json.dumps({"logit_bias": dict.fromkeys(range(60_000), 1)}).encode(),
        "logit_bias has 60000 token ids",
    ),
    "bad word": (
        "completion",
        lambda: json.dumps({"prompt": "x", "bad_words": ["x" * 5_000_000]}).encode(),
        "bad_words[0] has 5000000 characters",
    ),
    "schema": (
        "completion",
        lambda: b'{"prompt": "x", "guided_json": {"enum": [' + b"1," * 200_000 + b"1]}}",
        "guided_json has more than 262144 characters",
    ),
    "parameters": (
        "chat",
        lambda: json.dumps(
            GOOD["chat"] | {"tools": [tool("x", enum=["aaa"] * 60_000)], "tool_choice": "required"}
        ).encode(),
        "tools has more than 262144 characters",
    ),
    "numbers of tools": (
        "chat",
        lambda: json.dumps(GOOD["chat"] | {"tools": [tool("x", enum=[1] * 300_000)]}).encode(),
        "characters; at most 524288",
    ),
    "UTF-16": ("completion", lambda: '{"prompt": "x"}'.encode("utf-16"), "no UTF-8"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_stream_goes_on_beside(large: Served, kind: str) -> None:
    route, make, said = HOSTILE[kind]
    content, headers = make(), {"Content-Type": "application/json"}
    executor: Any = large.engine.model_executor
    slowly(large, 0.001)
    with ThreadPoolExecutor() as pool:
        body = {"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True}
        victim = pool.submit(partial(large.complete, **body))
        large.wait_until(lambda: large.engine.scheduler.num_running == 1)
        before, num_sent = len(executor.num_rows), 0
        while len(executor.num_rows) == before or not num_sent:
            answer = large.http.post(ROUTES[route], content=content, headers=headers)
            assert answer.status_code == 400
            assert said in answer.json()["error"]["message"], answer.text[:500]
            num_sent += 1
        text = victim.result().json()["choices"][0]["text"]
    executor.before_sampling = lambda: None
    assert text == text_after(FormulaModel(), PROMPT, 300)
    assert large.context.num_open_body_bytes == 0


def test_a_text_of_a_decision_is_bounded_by_the_models_length(large: Served) -> None:
    answer = post(large, "decision", {"state": "x" * (16 * LENGTH + 1)})
    assert f"characters; at most {16 * LENGTH} are accepted" in answer.json()["error"]["message"]
    body = {"state": "x" * (16 * LENGTH), "questions": {}}
    assert read_body(json.dumps(body).encode(), DecisionBody, {}).model_dump()["state"]


def test_a_batch_of_token_ids_may_have_more_values(large: Served) -> None:
    batch = [[5] * 300] * 1024
    body = read_body(json.dumps({"input": batch}).encode(), EmbeddingBody, {})
    assert body.model_dump()["input"] == batch
    answer = post(large, "input", {"input": batch})
    assert "the model generates" in answer.json()["error"]["message"]


def test_numbers_of_large_bodies_are_those_of_small_ones() -> None:
    numbers = "[0, -1, 1.5, -0.0, 1e3, 123456789012345678901234567890, true, null]"
    assert repr(parsed(numbers.encode())) == repr(parsed((numbers + " " * 1_100_000).encode()))


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
@pytest.mark.parametrize("num_spaces", [0, 1_100_000])
def test_numbers_are_finite(large: Served, number: str, num_spaces: int) -> None:
    """Also where a field takes any value: a response that repeats it would be no JSON."""
    tool = f'{{"type": "function", "name": "f", "parameters": {{"maximum": {number}}}}}'
    body = f'{{"input": "x", "tools": [{tool}]}}' + " " * num_spaces
    headers = {"Content-Type": "application/json"}
    answer = large.http.post("/v1/responses", content=body, headers=headers)
    assert answer.status_code == 400
    message = f"the body has the number '{number}'; it must be finite"
    assert message in answer.json()["error"]["message"]


def test_nothing_is_nested_too_deep(large: Served) -> None:
    def nested(depth: int) -> str:
        kwargs = "[" * depth + "]" * depth
        messages = '[{"role": "user", "content": "x"}]'
        return f'{{"messages": {messages}, "chat_template_kwargs": {{"x": {kwargs}}}}}'

    headers = {"Content-Type": "application/json"}
    for depth, status in ((MAX_DEPTH - 2, 200), (MAX_DEPTH - 1, 400)):
        answer = large.http.post("/tokenize", content=nested(depth), headers=headers)
        assert answer.status_code == status, answer.text


def test_the_page_lists_every_bound() -> None:
    page = LIMITS.read_text(encoding="utf-8")
    assert with_bounds(page) == page, "run make options"
    for number in (
        bounds.MAX_STRINGS,
        MAX_VALUES,
        MAX_DEPTH,
        bounds.MAX_DIGITS,
        bounds.MAX_FORM_FIELDS,
        connection.MAX_HEADER_BYTES,
        connection.MAX_HEADERS,
        connection.MAX_CHUNKS,
        *bounds.OTHER_FIELDS.values(),
    ):
        assert f"{number:,}" in page
    for name in ("max_connections", "receive_timeout", "max_body_bytes", "max_open_body_bytes"):
        assert f"--{name.replace('_', '-')}" in page


@pytest.mark.parametrize("hostile", [True, 1.0, "5", None, [1], {"a": 1}])
def test_a_token_is_an_integer(large: Served, hostile: Any) -> None:
    for field in ("prompt", "stop_token_ids", "allowed_token_ids"):
        answer = post(large, "completion", {field: [5, hostile]})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field)
        assert f"{field}[1] is " in error["message"]
    for route, field in (("input", "input"), ("detokenize", "tokens")):
        answer = post(large, route, {field: [5, hostile]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user"}, "messages[0].content is missing"),
        ({"role": "user", "content": None}, "messages[0].content is missing"),
        ({"role": "user", "content": 5}, "messages[0].content is 5"),
        ({"role": "user", "content": {"text": "x"}}, "messages[0].content is {"),
        ({"content": "x"}, "messages[0].role is missing"),
        ({"role": 5, "content": "x"}, "messages[0].role is 5"),
        ({"role": "", "content": "x"}, "messages[0].role is ''"),
    ],
)
@pytest.mark.parametrize("route", ["chat", "tokenize"])
def test_a_message_has_a_role_and_a_content(
    large: Served, route: str, message: dict[str, Any], said: str
) -> None:
    answer = post(large, route, {"messages": [message]})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages")
    assert said in error["message"]


def test_a_message_of_the_assistant_needs_no_content(large: Served) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "x", "arguments": "{}"}}
    asked = {"role": "user", "content": "x"}
    given: tuple[dict[str, Any], ...] = (
        {"content": ""}, {"content": None}, {}, {"content": None, "tool_calls": []}
    )  # fmt: skip
    found = [
        post(large, "tokenize", {"messages": [asked, {"role": "assistant", **fields}, asked]})
        for fields in given
    ]
    assert len({answer.text for answer in found}) == 1
    assert found[0].status_code == 200
    messages = [asked, {"role": "assistant", "tool_calls": [call]}, asked]
    assert post(large, "chat", {"messages": messages}).status_code == 200


@pytest.mark.parametrize("name", ["reasoning_effort", "verbosity"])
def test_the_effort_is_a_variable_of_the_template(large: Served, name: str) -> None:
    for body in ({name: "high"}, {}):
        assert post(large, "chat", body).status_code == 200
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large.context.text, "chat_template", f"{{{{ {name} }}}}")
        answer = post(large, "chat", {name: "high", "return_token_ids": True})
        assert answer.json()["prompt_token_ids"] == encode("high")
        own = {name: "high", "chat_template_kwargs": {name: "low"}, "return_token_ids": True}
        assert post(large, "chat", own).json()["prompt_token_ids"] == encode("low")


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"enable_thinking": False}, "False"),
        ({"enable_thinking": True, "thinking": {"type": "disabled"}}, "True"),
        ({"thinking": {"type": "disabled"}}, "False"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "True"),
        ({"thinking": {"type": "auto"}}, ""),
        ({"thinking": {"type": "adaptive"}}, ""),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "False"),
    ],
)
def test_thinking_is_a_variable_of_the_template(
    large: Served, fields: dict[str, Any], shown: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large.context.text, "chat_template", "[{{ enable_thinking }}]")
        answer = post(large, "chat", {"return_token_ids": True, **fields})
        assert answer.json()["prompt_token_ids"] == encode(f"[{shown}]")


def test_only_efforts_of_openai_are_accepted(large: Served) -> None:
    assert post(large, "chat", {"reasoning_effort": "none"}).status_code == 200
    answer = post(large, "chat", {"reasoning_effort": "huge"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "reasoning_effort")
