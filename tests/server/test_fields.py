"""Fields of requests, each by an effect that a user would notice."""

import json
import string
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from pagedserve.errors import RequestError
from pagedserve.server.chat.protocol import ChatBody
from pagedserve.server.completions.protocol import CompletionBody
from pagedserve.server.params import completion_params
from tests.server.conftest import TEMPLATE, Serve, Served
from tests.server.test_completions import PROMPT, encode, events, text_after
from tests.server.test_life import slowly
from tests.support.formula import EOS, FormulaModel, formula_logits


def token_ids(served: Served, **body: Any) -> list[int]:
    answer = served.complete(
        **({"prompt": PROMPT, "max_tokens": 6, "return_token_ids": True} | body)
    )
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def choice(served: Served, **body: Any) -> dict[str, Any]:
    answer = served.complete(**({"prompt": PROMPT} | body))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["choices"][0]
    return found


@pytest.mark.parametrize(
    "field", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"top_n_sigma": 1e-3}]
)
def test_filters_leave_the_likeliest(
    shared: Served, formula: FormulaModel, field: dict[str, Any]
) -> None:
    greedy = formula.greedy(encode(PROMPT), 6)
    drawn = {"temperature": 5.0, "seed": 1}
    assert token_ids(shared, **drawn) != greedy
    assert token_ids(shared, **drawn, **field) == greedy


def test_seeds(shared: Served) -> None:
    draws = [token_ids(shared, temperature=2.0, seed=seed) for seed in (5, 5, 6, 2**63 - 1)]
    assert draws[0] == draws[1]
    assert len(set(map(tuple, draws))) == 3
    assert token_ids(shared, temperature=2.0, seed=-1) != token_ids(
        shared, temperature=2.0, seed=-1
    )


@pytest.mark.parametrize(
    "field",
    [
        {"presence_penalty": 2.0},
        {"frequency_penalty": 1.0},
        {"repetition_penalty": 1.2},
        {"repeat_penalty": 1.2},
    ],
)
def test_penalties(shared: Served, field: dict[str, Any]) -> None:
    allowed = [10, 11, 12, 13, 14]
    ((name, penalty),) = field.items()

    def penalised(logits: torch.Tensor, prompt: list[int], new: list[int]) -> torch.Tensor:
        counts = Counter(new)
        for token in {*prompt, *new}:
            if name in ("repetition_penalty", "repeat_penalty"):
                logits[token] *= penalty  # none is above 0
            else:
                logits[token] -= penalty * min(counts[token], 1 if "pres" in name else 99)
        return logits

    prompt, new = encode(PROMPT), list[int]()
    for _ in range(20):
        tokens = [*prompt, *new]
        position = torch.tensor([len(tokens) - 1])
        logits = penalised(formula_logits(torch.tensor(tokens[-1:]), position)[0], prompt, new)
        new.append(max(allowed, key=lambda token: float(logits[token])))
    given = {"allowed_token_ids": allowed, "max_tokens": 20}
    assert token_ids(shared, **given, **field) == new
    assert token_ids(shared, **given) != new


def test_biases_and_bans(shared: Served, formula: FormulaModel) -> None:
    prompt, word = next(
        (prompt, word)
        for prompt in string.ascii_letters
        if (word := text_after(formula, prompt, 1)).isalnum() and word.isascii()
    )
    first_of = partial(token_ids, shared, prompt=prompt, max_tokens=1)
    (first,) = encode(word)
    assert first_of() == [first]
    assert first_of(logit_bias={str(first): -100}) == [first + 1]
    # What is 250 places behind needs 125 to come first; larger biases are brought down to 100.
    far = (first + 250) % FormulaModel.vocab_size
    assert first_of(logit_bias={str(far): 300}) == [first]
    assert first_of(logit_bias={str(first + 50): 26}) == [first + 50]
    assert first_of(bad_words=[word]) == [first + 1]
    assert first_of(allowed_token_ids=[65]) == [65]


def test_ends(shared: Served, formula: FormulaModel) -> None:
    second = formula.greedy(encode(PROMPT), 2)[1]
    stops = {"stop_token_ids": [second], "max_tokens": 6}
    assert len(token_ids(shared, **stops)) == 2
    later = token_ids(shared, **stops, min_tokens=4)
    assert len(later) >= 4
    assert second not in later[:4]
    ends = {"allowed_token_ids": [EOS], "max_tokens": 2}
    assert choice(shared, **ends)["finish_reason"] == "stop"
    assert choice(shared, **ends, ignore_eos=True)["finish_reason"] == "length"
    for more, shown in ({}, ""), ({"skip_special_tokens": False}, "<|end|>" * 2):
        assert choice(shared, **ends, **more, ignore_eos=True)["text"] == shown
    assert choice(shared, **ends, spaces_between_special_tokens=False)["text"] == ""
    text = text_after(formula, PROMPT, 12)
    stop = {"stop": text[3:5], "max_tokens": 12}
    assert choice(shared, **stop)["text"] == text[: text.find(text[3:5])]
    assert choice(shared, **stop, include_stop_str_in_output=True)["text"].endswith(text[3:5])


def test_token_ids_of_prompt_and_answer(shared: Served, formula: FormulaModel) -> None:
    found = choice(shared, max_tokens=3, return_token_ids=True)
    assert found["prompt_token_ids"] == encode(PROMPT)
    assert found["token_ids"] == formula.greedy(encode(PROMPT), 3)
    names = choice(shared, max_tokens=3, logprobs=0, return_tokens_as_token_ids=True)["logprobs"]
    assert names["tokens"] == [f"token_id:{token}" for token in found["token_ids"]]
    scored = choice(shared, echo=True, max_tokens=0, return_token_ids=True)
    assert (scored["text"], scored["token_ids"]) == (PROMPT, [])


def test_log_probabilities_of_a_prompt(shared: Served) -> None:
    first, second, *_ = choice(shared, max_tokens=1, prompt_logprobs=2)["prompt_logprobs"]
    assert first is None
    ranks = sorted(entry["rank"] for entry in second.values())
    assert ranks[:2] == [1, 2]
    assert next(iter(second)) == str(encode(PROMPT)[1])
    body = {"messages": [{"role": "user", "content": "Hi"}], "prompt_logprobs": 0}
    answer = shared.http.post("/v1/chat/completions", json=body | {"max_tokens": 1}).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("number", [0, -5])
def test_a_prompt_is_cut_to_a_number_that_can_be(shared: Served, side: str, number: int) -> None:
    cut = {"truncation_side": side, "truncate_prompt_tokens": number}
    answer = shared.complete(prompt=PROMPT, max_tokens=1, **cut)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize(("side", "shown"), [("left", "lo"), ("right", "He")])
def test_a_prompt_is_cut_at_either_side(shared: Served, side: str, shown: str) -> None:
    cut = {"truncation_side": side, "truncate_prompt_tokens": 2}
    for prompt in (PROMPT, encode(PROMPT)):
        body = {"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 0}
        found = choice(shared, **body, **cut)
        assert (found["text"], found["logprobs"]["tokens"]) == (shown, list(shown))
    every: Any = {"truncation_side": side, "truncate_prompt_tokens": -1, "max_tokens": 1}
    answer = shared.complete(prompt="x" * 200, **every).json()
    assert answer["usage"]["prompt_tokens"] == 127
    messages = [{"role": "user", "content": "Hi"}]
    chat = {"messages": messages, "return_token_ids": True, "max_tokens": 1, **cut}
    answer = shared.http.post("/v1/chat/completions", json=chat).json()
    whole = encode("u:Hi|a:")
    assert answer["prompt_token_ids"] == (whole[-2:] if side == "left" else whole[:2])


def test_a_stream_comes_in_larger_parts(served: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 11, "stream": True, "return_token_ids": True}
    slowly(served, 0.02)
    found = [event["choices"][0] for event in events(served.complete(**body, stream_interval=4))]
    first, *middle, _ = [len(part["token_ids"]) for part in found]
    assert first < 4 <= min(middle)
    whole = choice(served, max_tokens=11, return_token_ids=True)
    assert [token for part in found for token in part["token_ids"]] == whole["token_ids"]
    assert "".join(part["text"] for part in found) == whole["text"]
    assert [part["finish_reason"] for part in found] == [None] * (len(found) - 1) + ["length"]


def test_salts_keep_prompts_apart(serve: Serve) -> None:
    with serve(enable_prompt_tokens_details=True, engine={"enable_prefix_caching": True}) as served:

        def num_cached(**more: Any) -> Any:
            answer = served.complete(prompt="x" * 42, max_tokens=1, **more).json()
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert [num_cached(), num_cached()] == [0, 40]
        assert [num_cached(cache_salt="mine"), num_cached(cache_salt="mine")] == [0, 40]
        assert num_cached(cache_salt="yours") == 0


def test_priorities(serve: Serve) -> None:
    with (
        serve(engine={"max_num_seqs": 1, "scheduling_policy": "priority"}) as served,
        ThreadPoolExecutor() as pool,
    ):
        slowly(served)
        ended: list[int] = []

        def run(priority: int) -> None:
            assert choice(served, max_tokens=30, priority=priority)["finish_reason"] == "length"
            ended.append(priority)

        running = [pool.submit(run, -9)]
        served.wait_until(lambda: served.engine.scheduler.num_running == 1)
        scheduler = served.engine.scheduler
        running.append(pool.submit(run, 5))
        served.wait_until(lambda: scheduler.num_waiting == 1)
        running.append(pool.submit(run, 1))
        served.wait_until(lambda: scheduler.num_waiting == 2)
        for future in running:
            future.result()
        assert ended == [-9, 1, 5]


@pytest.mark.parametrize("more", [{}, {"length_penalty": -5.0}, {"early_stopping": "never"}])
def test_beams_are_those_of_offline_use(
    shared: Served, formula: FormulaModel, more: dict[str, Any]
) -> None:
    from pagedserve import SamplingParams

    given = {"use_beam_search": True, "best_of": 3, "n": 3, "max_tokens": 5, **more}
    engine = formula.engine()
    engine.add_request("a", PROMPT, SamplingParams(**given, temperature=0, logit_bias={EOS: 60.0}))
    wanted = [completion.text for completion in formula.finish(engine)["a"].outputs]
    answer = shared.complete(prompt=PROMPT, **given, logit_bias={str(EOS): 60}).json()
    assert [found["text"] for found in answer["choices"]] == wanted


def test_beams_need_no_filters_that_the_model_recommends() -> None:
    from pagedserve import SamplingParams

    recommended = SamplingParams(temperature=0.7, top_p=0.8, top_k=20, min_p=0.1)
    given = {"prompt": PROMPT, "use_beam_search": True, "n": 4}
    params = completion_params(CompletionBody.model_validate(given), recommended)
    filters = (params.temperature, params.top_p, params.top_k, params.min_p)
    assert filters == (0, 1, -1, 0)
    body = CompletionBody.model_validate(given | {"top_p": 0.9})
    with pytest.raises(RequestError, match=r"top_p is 0\.9 with use_beam_search"):
        completion_params(body, recommended)


def test_the_prompt_of_a_chat(serve: Serve) -> None:
    user, open_end = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "We"}
    with serve(chat_template=TEMPLATE, trust_request_chat_template=True) as served:

        def post(**body: Any) -> Any:
            given = {"messages": [user], "max_tokens": 1, "return_token_ids": True} | body
            answer = served.http.post("/v1/chat/completions", json=given)
            assert answer.status_code == 200, answer.text
            return answer.json()

        for body, text in (
            ({}, "u:Hi|a:"),
            ({"add_generation_prompt": False}, "u:Hi"),
            ({"chat_template": "{{ messages[0].content }}!"}, "Hi!"),
            ({"chat_template_kwargs": {"mood": "?"}}, "u:Hi?|a:"),
            ({"messages": [user, open_end], "continue_final_message": True}, "u:Hi;a:We"),
        ):
            assert post(**body)["prompt_token_ids"] == encode(text), body
        continued = {"messages": [user, open_end], "continue_final_message": True}
        answer = post(**continued, add_generation_prompt=False, echo=True)["choices"][0]["message"]
        assert answer["role"] == "assistant"
        assert answer["content"].startswith("We")
        usage = post(max_tokens=2, max_completion_tokens=4, temperature=0)["usage"]
        assert usage["completion_tokens"] == 4


def test_variables_of_the_template_that_the_server_sets_by_default(serve: Serve) -> None:
    with serve(chat_template=TEMPLATE, default_chat_template_kwargs={"mood": "!"}) as served:
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        for more, text in (
            ({}, "u:Hi!|a:"),
            ({"chat_template_kwargs": {"mood": "?"}}, "u:Hi?|a:"),
            ({"chat_template_kwargs": {"other": 1}}, "u:Hi!|a:"),
        ):
            answer = served.http.post("/tokenize", json=body | more).json()
            assert answer["tokens"] == encode(text), more


@pytest.mark.parametrize(
    "name", ["tokenize", "chat_template", "add_generation_prompt", "padding", "messages", "self"]
)
def test_variables_of_a_template_are_no_arguments_of_its_renderer(
    shared: Served, name: str
) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {name: 1}}
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = shared.http.post(path, json=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == "chat_template_kwargs"
        assert error["message"] == (
            f"chat_template_kwargs has {name}, which is no variable of a template"
        )


def test_a_stream_of_a_chat_begins_with_the_prompts_tokens(shared: Served) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 3,
        "stream": True,
        "return_token_ids": True,
    }
    first, *rest = events(shared.http.post("/v1/chat/completions", json=body))
    assert first["prompt_token_ids"] == encode("u:Hi|a:")
    assert sum(len(event["choices"][0]["token_ids"]) for event in rest) == 3
    assert all("prompt_token_ids" not in event for event in rest)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 200}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"stream_options": {"include_usage": "so"}, "stream": True}, "stream_options"),
        ({"chat_template": "x"}, "chat_template"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 2**31, "max_tokens": 5}, "max_completion_tokens"),
        ({"logprobs": True, "top_logprobs": -2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"mm_processor_kwargs": {"do_resize": False}}, "mm_processor_kwargs"),
        ({"guided_whitespace_pattern": " ?"}, "guided_whitespace_pattern"),
    ],
)
def test_a_bad_field_of_a_chat_is_named(shared: Served, body: dict[str, Any], param: str) -> None:
    given = {"messages": [{"role": "user", "content": "Hi"}]} | body
    answer = shared.http.post("/v1/chat/completions", json=given)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert param == "messages" or param in error["message"]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "text", "text": {"a": 1}}, "messages[1].content[1].text is {'a': 1}"),
        ({"type": "text"}, "messages[1].content[1].text is missing"),
        ({"type": "refusal", "refusal": 5}, "messages[1].content[1].refusal is 5"),
    ],
)
def test_the_text_of_a_part_is_a_string(shared: Served, part: dict[str, Any], said: str) -> None:
    parts = [{"type": "text", "text": ""}, part]
    body = {"messages": [{"role": "user", "content": "Hi"}, {"role": "user", "content": parts}]}
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = shared.http.post(path, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == f"{said}; it must be a string"
        assert answer.json()["error"]["param"] == "messages"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            {"role": "assistant", "content": None, "function_call": {"name": "f"}},
            "messages[1].function_call is {'name': 'f'}; it must be left out",
        ),
        ({"role": "function", "content": "1"}, "messages[1].role is 'function'; it must be tool"),
    ],
)
def test_predecessors_of_tool_calls_are_refused(
    shared: Served, message: dict[str, Any], said: str
) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}, message]}
    for path in ("/v1/chat/completions", "/tokenize"):
        error = shared.http.post(path, json=body).json()["error"]
        assert said in error["message"]
        assert error["param"] == "messages"


def test_a_result_without_content_is_empty(shared: Served) -> None:
    """Clients in Go leave empty strings out."""
    hello = {"role": "user", "content": "Hi"}
    result = {"role": "tool", "tool_call_id": "c"}
    calls = [{"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    called = {"role": "assistant", "tool_calls": calls}
    told = [
        shared.http.post("/tokenize", json={"messages": [hello, called, message]}).json()["tokens"]
        for message in (result, result | {"content": ""})
    ]
    assert told[0] == told[1]
    refused = shared.http.post("/tokenize", json={"messages": [{"role": "user"}]}).json()
    assert "messages[0].content is missing" in refused["error"]["message"]


def test_fields_of_a_chat_that_cannot_matter_are_passed_over(shared: Served) -> None:
    harmless = {
        "prompt_cache_key": "a",
        "prompt_cache_options": {"mode": "explicit"},
        "usage": {"include": True},
        "include": ["usage"],
        "provider": {"order": []},
        "transforms": [],
        "model": "formula",
        "lora_path": "formula",
        "num_beams": 1,
        "drop_params": True,
        "cache_prompt": True,
        "keep_alive": "5m",
        "num_ctx": 4096,
        "num_gpu": 1,
        "diagnostics": {"previous_message_id": None},
        "reasoning": {"summary": "auto"},
        "reasoning_format": "auto",
        "do_sample": True,
        "no_stop_trim": False,
        "return_hidden_states": False,
        "separate_reasoning": True,
        "stream_reasoning": True,
        "strict": False,
    }
    given = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1} | harmless
    assert shared.http.post("/v1/chat/completions", json=given).status_code == 200
    for name, value in (("num_beams", 2), ("lora_path", "a"), ("reasoning_format", "none")):
        refused = shared.http.post("/v1/chat/completions", json=given | {name: value})
        said = f"{name} is {value!r}; it is not supported here"
        assert refused.json()["error"]["message"] == said


def test_max_output_tokens_of_a_chat(shared: Served) -> None:
    given = {"messages": [{"role": "user", "content": "Hi"}], "max_output_tokens": 2}
    answer = shared.http.post("/v1/chat/completions", json=given).json()
    assert answer["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"think": False}, "False "),
        ({"think": "high"}, " high"),
        ({"think": True, "chat_template_kwargs": {"enable_thinking": False}}, "False "),
        ({"reasoning": {"effort": "low", "enabled": True}}, "True low"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, " high"),
        ({"chat_template_args": {"enable_thinking": False}}, "False "),
    ],
)
def test_other_names_of_variables_of_the_template(
    serve: Serve, given: dict[str, Any], shown: str
) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1} | given
    with serve(chat_template="{{ enable_thinking }} {{ reasoning_effort }}") as served:
        told = served.http.post("/v1/chat/completions", json=body | {"return_token_ids": True})
    assert told.status_code == 200, told.text
    assert told.json()["prompt_token_ids"] == encode(shown)


def test_openrouters_budget_of_reasoning_is_vllms() -> None:
    given = {"messages": [], "reasoning": {"max_tokens": 5}}
    assert ChatBody.model_validate(given).thinking_token_budget == 5
    assert ChatBody.model_validate(given | {"thinking_token_budget": 0}).thinking_token_budget == 0
    dashscope = {"messages": [], "thinking_budget": 7}
    assert ChatBody.model_validate(dashscope).thinking_token_budget == 7


@pytest.mark.parametrize(
    ("limits", "num_tokens"),
    [
        ({"options": {"num_predict": 3, "num_ctx": 4096}}, 3),
        ({"options": {"num_predict": 3}, "max_tokens": 5}, 5),
        ({"options": {"num_predict": 3}, "max_completion_tokens": 2}, 2),
        ({"options": {"num_predict": -1}, "max_completion_tokens": 2}, 2),
        ({"max_new_tokens": 3}, 3),
        ({"max_new_tokens": 3, "max_tokens": 5}, 5),
        ({"max_new_tokens": 3, "max_completion_tokens": 2}, 2),
    ],
)
def test_other_limits_of_a_chat(shared: Served, limits: dict[str, Any], num_tokens: int) -> None:
    """As goose's provider for Ollama sends them, and Twinny in completions."""
    given = {"messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True} | limits
    answer = shared.http.post("/v1/chat/completions", json=given)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == num_tokens
    if "max_completion_tokens" not in limits:
        answer = shared.complete(prompt="Hi", ignore_eos=True, **limits)
        assert answer.json()["usage"]["completion_tokens"] == num_tokens


def test_a_name_may_have_ollamas_tag(shared: Served) -> None:
    answer = shared.complete(model="formula:latest", prompt="Hi", max_tokens=1)
    assert answer.json()["model"] == "formula"
    unknown = shared.complete(model="other:latest", prompt="Hi", max_tokens=1)
    assert unknown.status_code == 404
    assert "The model `other:latest` does not exist" in unknown.text


def test_a_prompt_that_fills_the_model_can_be_scored(shared: Served) -> None:
    score = partial(choice, shared, prompt="x" * 128, echo=True, max_tokens=0, logprobs=1)
    logprobs = score()["logprobs"]
    assert len(logprobs["token_logprobs"]) == 128
    shorter = choice(shared, prompt="x" * 127, echo=True, max_tokens=0, logprobs=1)["logprobs"]
    assert logprobs["token_logprobs"][:127] == shorter["token_logprobs"]
    assert shared.complete(prompt="x" * 129, echo=True, max_tokens=0, logprobs=1).status_code == 400
    assert shared.complete(prompt="x" * 128, max_tokens=1).status_code == 400
    body = {"prompt": ["x" * 128] * 2, "echo": True, "max_tokens": 0, "logprobs": 1}
    (first, *_) = events(shared.complete(**body, stream=True))
    assert json.dumps(first["choices"][0]["logprobs"]) == json.dumps(logprobs)
