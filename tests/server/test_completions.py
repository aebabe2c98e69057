"""What clients send and get, against the formula that the model is."""

import json
from functools import partial
from typing import Any

import httpx
import pytest

from tests.server.conftest import Serve, Served
from tests.support.formula import EOS, FormulaModel, byte_tokenizer

PROMPT = "Hello"


def encode(text: str) -> list[int]:
    token_ids: list[int] = byte_tokenizer()(text).input_ids
    return token_ids


def text_after(formula: FormulaModel, prompt: str | list[int], num_tokens: int) -> str:
    token_ids = encode(prompt) if isinstance(prompt, str) else prompt
    text = byte_tokenizer().decode(formula.greedy(token_ids, num_tokens))
    assert isinstance(text, str)
    return text


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, which ends as it should."""
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    *parts, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts if part]


def texts(found: list[dict[str, Any]], number: int) -> list[str]:
    joined = [""] * number
    for event in found:
        for choice in event["choices"]:
            joined[choice["index"]] += choice["text"]
    return joined


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        (PROMPT, [PROMPT]),
        ([PROMPT, "Bye"], [PROMPT, "Bye"]),
        ([72, 5, 9], [[72, 5, 9]]),
        ([[72, 5, 9], [1]], [[72, 5, 9], [1]]),
    ],
)
def test_prompts_in_their_four_forms(
    served: Served, formula: FormulaModel, prompt: Any, prompts: list[Any]
) -> None:
    answer = served.complete(prompt=prompt, max_tokens=5).json()
    wanted = [text_after(formula, own, 5) for own in prompts]
    assert [choice["text"] for choice in answer["choices"]] == wanted
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(prompts)))
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    num_tokens = sum(len(encode(p)) if isinstance(p, str) else len(p) for p in prompts)
    assert answer["usage"] == {
        "prompt_tokens": num_tokens,
        "completion_tokens": 5 * len(prompts),
        "total_tokens": num_tokens + 5 * len(prompts),
    }


@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"echo": True}, {"return_token_ids": True}])
def test_a_stream_says_what_a_whole_answer_says(served: Served, more: dict[str, Any]) -> None:
    body = {"prompt": [PROMPT, "Bye"], "max_tokens": 9, **more}
    whole = served.complete(**body).json()
    found = events(served.complete(**body, stream=True))
    assert texts(found, 2) == [choice["text"] for choice in whole["choices"]]
    assert {event["id"] for event in found} != {whole["id"]}
    assert all("usage" not in event for event in found)
    if "logprobs" in more:
        for index, choice in enumerate(whole["choices"]):
            parts = [c["logprobs"] for e in found for c in e["choices"] if c["index"] == index]
            for key, value in choice["logprobs"].items():
                assert [entry for part in parts for entry in part[key]] == value


def test_usage_in_streams(served: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4, "stream": True}
    *_, last = events(served.complete(**body, stream_options={"include_usage": True}))
    usage = {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
    assert (last["choices"], last["usage"]) == ([], usage)
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = events(served.complete(**body, stream_options=options))
    counts = [event["usage"]["completion_tokens"] for event in found]
    assert counts == sorted(counts)
    assert (counts[0] >= 1, counts[-1]) == (True, 4)


def test_usage_in_all_chunks_by_an_option_of_the_server(serve: Serve) -> None:
    with serve(enable_force_include_usage=True) as served:
        body = {"prompt": PROMPT, "max_tokens": 4, "stream": True}
        *_, last = found = events(served.complete(**body))
        assert all("usage" in event for event in found)
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 4)


def test_all_log_probabilities(serve: Serve) -> None:
    with serve(chat_template=TEMPLATE) as served:
        (choice,) = served.complete(prompt=PROMPT, max_tokens=2, logprobs=-1).json()["choices"]
        # Names that several tokens share stand for one of them.
        assert all(len(top) > 100 for top in choice["logprobs"]["top_logprobs"])
        messages = [{"role": "user", "content": "Hi"}]
        body = {"messages": messages, "max_tokens": 2, "logprobs": True, "top_logprobs": -1}
        answer = served.http.post("/v1/chat/completions", json=body).json()
        entries = answer["choices"][0]["logprobs"]["content"]
        assert all(len(entry["top_logprobs"]) == FormulaModel.vocab_size for entry in entries)


@pytest.mark.parametrize("temperature", [0, 1e-6])
def test_several_greedy_outputs_are_equal(
    served: Served, formula: FormulaModel, temperature: float
) -> None:
    complete = partial(served.complete, prompt=PROMPT, max_tokens=3, n=3, temperature=temperature)
    answer = complete().json()
    wanted = text_after(formula, PROMPT, 3)
    assert [choice["text"] for choice in answer["choices"]] == [wanted] * 3
    assert answer["usage"]["completion_tokens"] == 9
    assert texts(events(complete(stream=True)), 3) == [wanted] * 3


def test_echo_without_new_tokens_scores_the_prompt(served: Served) -> None:
    body = {"prompt": PROMPT, "echo": True, "max_tokens": 0, "logprobs": 1}
    answer = served.complete(**body).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == list(PROMPT)
    assert logprobs["text_offset"] == list(range(len(PROMPT)))
    assert logprobs["token_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    for token, top, value in zip(
        *list(logprobs.values())[:1],
        logprobs["top_logprobs"][0:],
        logprobs["token_logprobs"],
        strict=True,
    ):
        assert top is None or top[token] == value
    assert answer["usage"]["completion_tokens"] == 0


def test_beams_and_the_best_of_several_come_in_one_event(served: Served) -> None:
    beams = {"use_beam_search": True, "best_of": 4, "n": 2}
    for more in (beams, {"best_of": 4, "n": 2, "temperature": 1.0, "seed": 3}):
        body = {"prompt": PROMPT, "max_tokens": 4, **more}
        whole = served.complete(**body).json()
        found = events(served.complete(**body, stream=True))
        assert len(found) == 2
        assert texts(found, 2) == [choice["text"] for choice in whole["choices"]]


def test_stop_strings_and_tokens(served: Served, formula: FormulaModel) -> None:
    text = text_after(formula, PROMPT, 12)
    answer = served.complete(prompt=PROMPT, max_tokens=12, stop=[text[3:5]]).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["stop_reason"]) == (text[: text.find(text[3:5])], text[3:5])
    token = formula.greedy(encode(PROMPT), 4)[3]
    (choice,) = served.complete(prompt=PROMPT, max_tokens=12, stop_token_ids=[token]).json()[
        "choices"
    ]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"max_tokns": 3}, "max_tokns is no field of this request; did you mean max_tokens?"),
        (
            {"suffix": "a+"},
            "suffix is given, and the model's tokenizer has no fill-in-the-middle tokens",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"guided_regex": "(("}, "guided_regex cannot be used: "),
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": "warm"}, 'temperature is "warm"; it must be a valid number'),
        ({"prompt": []}, "prompt has 0 prompts"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": [-1]}, "token 0 of the prompt is -1"),
        ({"prompt": [100_000]}, "token 0 of the prompt is 100000"),
        ({"prompt": "x" * 200}, "the prompt has 200 tokens"),
        ({"prompt": "x" * 3000}, "the prompt has 3000 characters; at most 2048"),
        ({"n": 0}, "n is 0; it must be greater than or equal to 1"),
        ({"n": 10**9}, "n is 1000000000; max_num_seqs is 32"),
        (
            {"n": 32, "prompt": [[5] * 100] * 64, "echo": True, "logprobs": 20, "max_tokens": 0},
            "n is 32: the choices have about 4300800 log-probabilities of prompt tokens; at most 4",
        ),
        ({"priority": 10**30}, f"priority is {10**30}; it must be less than"),
        ({"request_id": "a\nb"}, "request_id: String should match pattern"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"stop": [""]}, "stop[0] is ''"),
        ({"stop": ["a"] * 65}, "stop has 65 strings; at most 64"),
        ({"logit_bias": {"Paris": 3}}, "logit_bias has the key 'Paris'; keys must be token ids"),
        ({"logit_bias": {"1.5": 3}}, "logit_bias has the key '1.5'"),
        ({"logit_bias": {" 1": 3}}, "logit_bias has the key ' 1'"),
        ({"logit_bias": {"9" * 5000: 3}}, "logit_bias has the key '999"),
        ({"logit_bias": {"257": 3}}, "logit_bias has 257; token ids must be from 0 to 256"),
        ({"seed": 2**63}, "; it must be less than or equal to 9223372036854775807"),
        ({"seed": -2}, "seed is -2"),
        ({"stream_options": {"include_usage": True}}, "stream_options is given without stream"),
        ({"stream_options": 5}, "stream_options is 5; it must be an object"),
        ({"min_tokens": 20}, "min_tokens is 20; it must be from 0 to max_tokens, 16"),
        ({"best_of": 2, "n": 3, "temperature": 1}, "best_of is 2; it must be at least n, 3"),
        ({"early_stopping": True}, "early_stopping is True without use_beam_search"),
        ({"stop_token_ids": [300]}, "stop_token_ids has 300"),
        ({"stream_interval": 0}, "stream_interval is 0; it must be greater than or equal to 1"),
        (
            {"truncation_side": "middle"},
            "; it must be 'left' or 'right'",
        ),
        ({"return_prompt_text": True}, "return_prompt_text is no field of this request"),
        ({"n": 33, "temperature": 1}, "n is 33; max_num_seqs is 32"),
        ({"logprobs": 1000}, "logprobs is 1000"),
        ({"stream": "perhaps"}, 'stream is "perhaps"; it must be a valid boolean'),
        ({"timeout": 0}, "timeout is 0; it must be greater than 0"),
    ],
)
def test_a_bad_field_is_named(served: Served, body: dict[str, Any], said: str) -> None:
    answer = served.complete(**({"prompt": PROMPT} | body))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (400, 400, "BadRequestError")
    assert said in error["message"]
    assert error["param"] == next(iter(body))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("[]", "the body is a list; it must be an object"),
        ('"text"', 'the body is "text"; it must be an object'),
        ("null", "the body is null; it must be an object"),
        ("5", "the body is 5; it must be an object"),
        ('{"prompt": }', "the body is not JSON: Expecting value at character 11"),
    ],
)
def test_a_body_that_is_no_object_is_refused(shared: Served, body: str, said: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = shared.http.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == said


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", '{"prompt": "\\ud800"}'),
        ("/v1/completions", '{"prompt": "\\ud800", "add_special_tokens": false}'),
        ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "\\ud800"}]}'),
        ("/tokenize", '{"prompt": "\\ud800"}'),
    ],
)
def test_half_a_character_is_refused(serve: Serve, path: str, body: str) -> None:
    with serve(chat_template=TEMPLATE) as served:
        headers = {"content-type": "application/json"}
        answer = served.http.post(path, content=body.encode(), headers=headers)
        assert answer.status_code == 400
        assert "no valid Unicode" in answer.json()["error"]["message"]


def test_fields_that_cannot_matter_are_passed_over(served: Served) -> None:
    harmless = {"user": "me", "metadata": {"a": "b"}, "response_format": {"type": "text"}}
    names = "suffix guided_json logit_bias stop seed stream echo priority add_special_tokens n"
    neutral = dict.fromkeys(names.split())
    assert served.complete(prompt=PROMPT, **harmless, **neutral).status_code == 200


def test_unknown_fields_may_be_allowed(serve: Serve) -> None:
    with serve(allow_unknown_fields=True) as served:
        assert served.complete(prompt=PROMPT, whatever=3).status_code == 200
        assert served.complete(prompt=PROMPT, suffix="a").status_code == 400
        schema = {"name": "a", "schema": {"type": "object"}}
        wanted = {"type": "json_schema", "json_schema": schema, "whatever": 3}
        assert served.complete(prompt=PROMPT, response_format=wanted).status_code == 200
        for path, body in (("/tokenize", {"content": PROMPT}), ("/detokenize", {"tokens": [65]})):
            answer = served.http.post(path, json=body)
            assert answer.status_code == 200
            assert served.http.post(path, json={**body, "whatever": 3}).json() == answer.json()


def test_bodies_that_are_no_requests(serve: Serve) -> None:
    with serve(max_body_bytes=100_000) as served:
        post = served.http.post

        def status(content: bytes) -> int:
            answer = post(
                "/v1/completions", content=content, headers={"content-type": "application/json"}
            )
            assert answer.json()["error"]["code"] == answer.status_code
            return answer.status_code

        assert status(b"{") == 400
        assert status(b"[" * 90_000) == 400
        assert status(b"\xff") == 400
        assert status(b"x" * 100_001) == 413
        large = post("/v1/completions", content=iter([b"x" * 60_000] * 2))
        assert large.status_code == 413
        assert served.http.get("/v1/completions").status_code == 405
        assert served.http.get("/nowhere").json()["error"]["type"] == "NotFoundError"
        assert served.complete(prompt=PROMPT).status_code == 200


def test_models_and_names(serve: Serve) -> None:
    with serve(served_model_name=("small", "other/name")) as served:
        listed = served.http.get("/v1/models").json()["data"]
        assert [card["id"] for card in listed] == ["small", "other/name"]
        assert [card["root"] for card in listed] == ["small", "small"]
        served.context.root = "owner/model"
        assert served.http.get("/v1/models/small").json()["root"] == "owner/model"
        assert listed[0]["max_model_len"] == 128
        assert served.http.get("/v1/models/other/name").json()["id"] == "other/name"
        assert served.http.get("/v1/models/x").status_code == 404
        slashed = served.http.get("/v1/models/")  # as every other route with a slash at its end
        assert slashed.status_code == 307
        assert slashed.headers["location"].endswith("/v1/models")
        assert served.complete(prompt=PROMPT).json()["model"] == "small"
        assert served.complete(prompt=PROMPT, model="other/name").json()["model"] == "other/name"
        answer = served.complete(prompt=PROMPT, model="x")
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == (
            "The model `x` does not exist; this server has `small` (v1/models lists all)."
        )


def test_keys_guard_all_but_probes(serve: Serve) -> None:
    with serve(api_key=("first", "second")) as served:
        for path in ("/health", "/ping", "/metrics", "/version", "/"):
            assert served.http.get(path).status_code == 200
        for path in ("/v1/models", "/load", "/server_info", "/openapi.json"):
            assert served.http.get(path).status_code == 401
            for key in ("first", "second"):
                for good in ({"Authorization": f"Bearer {key}"}, {"X-API-Key": key}):
                    assert served.http.get(path, headers=good).status_code == 200
            for bad in ({"Authorization": "Basic first"}, {"X-API-Key": "Bearer first"}):
                assert served.http.get(path, headers=bad).status_code == 401
        bad = {"Authorization": "Bearer third"}
        answer = served.http.post("/v1/completions", json={"prompt": "x"}, headers=bad)
        assert answer.json()["error"]["type"] == "AuthenticationError"


def test_request_ids_come_back(served: Served) -> None:
    named = {"X-Request-Id": "abc"}
    answer = served.http.post("/v1/completions", json={"prompt": PROMPT}, headers=named)
    assert (answer.headers["x-request-id"], answer.json()["id"]) == ("abc", "cmpl-abc")
    assert served.complete(prompt=PROMPT, request_id="xyz").json()["id"] == "cmpl-xyz"
    assert len(served.complete(prompt="a" * 500).headers["x-request-id"]) == 32


def test_who_cuts_a_prompt_is_shown_what_is_left(served: Served) -> None:
    (choice,) = served.complete(
        prompt=PROMPT, max_tokens=0, echo=True, logprobs=0, truncate_prompt_tokens=2
    ).json()["choices"]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("lo", ["l", "o"])


def test_a_client_learns_the_special_tokens_and_the_template(shared: Served) -> None:
    assert shared.http.get("/tokenizer_info").json() == {
        "tokenizer_class": "TokenizersBackend",
        "model_max_length": 128,
        "added_tokens_decoder": {str(EOS): "<|end|>"},
        "eos_token": "<|end|>",
        "chat_template": shared.context.text.chat_template,
    }


def test_tokens_and_back(served: Served) -> None:
    answer = served.http.post(
        "/tokenize", json={"prompt": PROMPT, "return_token_strs": True}
    ).json()
    assert answer == {
        "count": 5,
        "max_model_len": 128,
        "tokens": encode(PROMPT),
        "token_strs": list(PROMPT),
    }
    named = {"content": PROMPT, "return_token_strs": True}  # as llama.cpp names it
    assert served.http.post("/tokenize", json=named).json() == answer
    back = served.http.post("/detokenize", json={"tokens": answer["tokens"]}).json()
    assert back == {"prompt": PROMPT}
    for wrong in ([9999], None, 5, [None]):
        assert served.http.post("/detokenize", json={"tokens": wrong}).status_code == 400
    assert served.http.post("/tokenize", json={}).status_code == 400
    special = {"messages": [{"role": "user", "content": "Hi"}], "add_special_tokens": True}
    refused = served.http.post("/tokenize", json=special)
    assert refused.status_code == 400
    assert "add_special_tokens is True with messages" in refused.json()["error"]["message"]


TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"


def test_chats(serve: Serve, formula: FormulaModel) -> None:
    with serve(chat_template=TEMPLATE, response_role="bot") as served:
        body = {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
            "temperature": 0,
            "max_completion_tokens": 6,
        }
        post = served.http.post
        answer = post("/v1/chat/completions", json=body).json()
        wanted = text_after(formula, "u:Hi;", 6)
        (choice,) = answer["choices"]
        assert choice["message"] == {"role": "bot", "content": wanted}
        assert (answer["object"], answer["usage"]["prompt_tokens"]) == ("chat.completion", 5)
        more = {"stream": True, "logprobs": True, "top_logprobs": 2}
        first, *rest = events(post("/v1/chat/completions", json=body | more))
        assert first["object"] == "chat.completion.chunk"
        assert first["choices"][0]["delta"] == {"role": "bot", "content": ""}
        assert "".join(event["choices"][0]["delta"]["content"] for event in rest) == wanted
        entries = [entry for event in rest for entry in event["choices"][0]["logprobs"]["content"]]
        assert bytes(byte for entry in entries for byte in entry["bytes"]) == bytes(
            formula.greedy(encode("u:Hi;"), 6)
        ) or all(len(entry["top_logprobs"]) == 2 for entry in entries)
        refused = post("/v1/chat/completions", json=body | {"chat_template": "x"})
        assert "--trust-request-chat-template" in refused.json()["error"]["message"]
        assert post("/v1/chat/completions", json={"messages": []}).status_code == 400
        tools = post("/v1/chat/completions", json=body | {"tools": [{"type": "function"}]})
        assert "tools" in tools.json()["error"]["message"]


def test_admin_routes_are_behind_a_switch(serve: Serve) -> None:
    with serve() as served:
        absent = served.http.post("/reset_prefix_cache")
        assert absent.status_code == 404
        assert "--enable-admin-routes turns it on" in absent.json()["error"]["message"]
    with serve(enable_admin_routes=True) as served:
        assert served.http.post("/reset_prefix_cache").json() == {"reset": True}
        assert served.http.post("/abort_requests", json={"request_ids": ["x"]}).json() == {
            "aborted": []
        }


def test_the_page_and_the_rest(served: Served) -> None:
    assert "<title>pagedserve</title>" in served.http.get("/").text
    assert served.http.get("/version").json()["version"]
    assert served.http.get("/load").json() == {"server_load": 0}
    assert served.http.get("/server_info").json()["backends"] == "a formula"
    assert "/v1/completions" in served.http.get("/openapi.json").json()["paths"]


def test_metrics_count_what_happened(served: Served) -> None:
    for number in (1, 2):
        served.complete(prompt=[PROMPT, "Bye"], max_tokens=5)
        found = served.metrics()
        assert found["vllm:generation_tokens_total"] == 10 * number
        assert found["vllm:prompt_tokens_total"] == 8 * number
        for name in ("e2e_request_latency_seconds", "time_to_first_token_seconds"):
            assert found[f"vllm:{name}_count"] == 2 * number
        assert found["vllm:request_generation_tokens_sum"] == 10 * number
        assert found["vllm:iteration_tokens_total_sum"] == 18 * number
        for name in ("time_per_output_token_seconds", "inter_token_latency_seconds"):
            assert found[f"vllm:{name}_count"] == 8 * number
            assert found[f"vllm:{name}_sum"] > 0
    text = served.http.get("/metrics").text
    assert (
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="formula"} 4.0'
        in text
    )


def test_a_chat_counts_its_tokens_whatever_max_tokens_is_beside_its_limit(shared: Served) -> None:
    limits = {"max_tokens": 0, "max_completion_tokens": 3, "ignore_eos": True}
    answer = shared.http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "3"}], **limits}
    )
    assert answer.json()["usage"]["completion_tokens"] == 3, answer.text


def test_a_prompt_that_is_too_long_is_said_in_the_words_that_clients_look_for(
    shared: Served,
) -> None:
    error = shared.complete(prompt=[1] * 200).json()["error"]
    assert "maximum context length" in error["message"]
