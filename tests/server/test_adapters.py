"""Adapters over HTTP: each is a model of its own name."""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pagedserve import ConfigError, EngineArgs
from pagedserve.server.options import LoraModule, ServerArgs
from pagedserve.server.prepare import prepare
from tests.server.conftest import Serve, Served
from tests.support.formula import FormulaModel, save_shift

ENGINE = {"enable_lora": True, "max_lora_rank": 1, "max_loras": 2}
PROMPT = [3, 1, 4]


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, str]:
    return {name: str(save_shift(tmp_path / name, n)) for n, name in enumerate("abc", start=1)}


def tokens_of(served: Served, model: str, **body: Any) -> list[int]:
    answer = served.complete(
        model=model, prompt=PROMPT, max_tokens=8, return_token_ids=True, **body
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return token_ids


def post(served: Served, action: str, **body: Any) -> tuple[int, str]:
    answer = served.http.post(f"/v1/{action}_lora_adapter", json=body)
    is_error = answer.headers["content-type"] == "application/json"
    return answer.status_code, answer.json()["error"]["message"] if is_error else answer.text


def test_options_name_adapters(serve: Serve, formula: FormulaModel, paths: dict[str, str]) -> None:
    modules = [f"a={paths['a']}", json.dumps({"name": "b", "path": paths["b"]})]
    with serve(ENGINE, lora_modules=modules) as served:
        cards = {card["id"]: card for card in served.http.get("/v1/models").json()["data"]}
        assert list(cards) == ["formula", "a", "b"]
        assert [cards[name]["parent"] for name in cards] == [None, "formula", "formula"]
        assert str(paths["a"]) not in str(cards)
        assert served.http.get("/v1/models/b").json() == cards["b"]
        for shift, name in enumerate(cards):
            assert tokens_of(served, name) == formula.greedy(PROMPT, 8, shift)
        answer = served.complete(model="c", prompt=PROMPT)
        assert answer.status_code == 404
        served.wait_until_idle()


def test_streams_and_several_prompts_have_the_adapter(
    serve: Serve, formula: FormulaModel, paths: dict[str, str]
) -> None:
    with serve(ENGINE, lora_modules=[f"c={paths['c']}"]) as served:
        body = {"model": "c", "max_tokens": 4, "return_token_ids": True, "temperature": 0}
        prompts = [PROMPT, [5, 6]]
        choices = served.complete(**body, prompt=prompts).json()["choices"]
        for choice, prompt in zip(choices, prompts, strict=True):
            assert choice["token_ids"] == formula.greedy(prompt, 4, 3)
        text = served.complete(**body, prompt=PROMPT, stream=True).text
        events = [json.loads(event) for event in re.findall(r"data: (\{.*\})", text)]
        streamed = [token for event in events for token in event["choices"][0]["token_ids"]]
        assert streamed == formula.greedy(PROMPT, 4, 3)
        served.wait_until_idle()


def test_adapters_come_and_go_while_it_serves(
    serve: Serve, formula: FormulaModel, paths: dict[str, str]
) -> None:
    with serve(ENGINE, enable_admin_routes=True) as served:
        body = {"lora_name": "x", "lora_path": paths["a"], "base_model_name": "base"}
        loaded = post(served, "load", **body)
        assert loaded == (200, "Success: LoRA adapter 'x' added successfully.")
        assert served.http.get("/v1/models/x").json()["parent"] == "base"
        assert tokens_of(served, "x") == formula.greedy(PROMPT, 8, 1)
        again = {"lora_name": "x", "lora_path": paths["b"]}
        assert post(served, "load", **again) == (
            400,
            "The lora adapter 'x' has already been loaded.",
        )
        assert post(served, "load", **again, load_inplace=True)[0] == 200
        assert tokens_of(served, "x") == formula.greedy(PROMPT, 8, 2)
        unloaded = post(served, "unload", lora_name="x")
        assert unloaded == (200, "Success: LoRA adapter 'x' removed successfully.")
        assert post(served, "unload", lora_name="x") == (
            404,
            "The lora adapter 'x' cannot be found.",
        )
        assert served.complete(model="x", prompt=PROMPT).status_code == 404
        again = {"lora_name": "x", "lora_path": paths["c"], "base_model_name": ""}
        assert post(served, "load", **again)[0] == 200
        assert served.http.get("/v1/models/x").json()["parent"] == "formula"
        assert tokens_of(served, "x") == formula.greedy(PROMPT, 8, 3)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"lora_name": "x", "lora_path": "/no/such"}, "adapter 'x': .* is no directory with"),
        ({"lora_name": "formula", "lora_path": "/a"}, "The model itself is called 'formula'"),
        ({"lora_name": "x", "lora_path": "/etc"}, "adapter 'x': lora_path is no directory"),
        ({"lora_name": "a", "lora_path": "a"}, "^adapter 'a': lora_path is no directory with an a"),
        ({"lora_name": "x", "lora_path": "."}, r"adapter 'x': lora_path is .*_config\.json and"),
        ({"lora_name": "x"}, "lora_path is missing"),
        ({"lora_name": "x", "lora_path": "/a\0b"}, "lora_path: String should match"),
        ({"lora_name": "x", "lora_path": "a" * 4097}, "lora_path has 4097 characters; at most"),
        ({"lora_name": "../../x", "lora_path": "/a"}, "lora_name is '.*'; it must have"),
        ({"lora_name": "a/../x", "lora_path": "/a"}, "lora_name is 'a.*'; it must have"),
        ({"lora_name": "/x", "lora_path": "/a"}, "lora_name is '/x'; it must have"),
        ({"lora_name": "x\n", "lora_path": "/a"}, r"lora_name is 'x\\n'; it must have"),
        ({"lora_name": "x\0", "lora_path": "/a"}, r"lora_name is 'x\\x00'; it must have"),
        ({"lora_name": "é", "lora_path": "/a"}, "lora_name is 'é'; it must have"),
        ({"lora_name": "x" * 257, "lora_path": "/a"}, "lora_name has 257 characters; at most 256"),
        ({"lora_name": "", "lora_path": "/a"}, "lora_name: "),
        ({"lora_name": "x", "lora_path": "/a", "rank": 8}, "rank: "),
    ],
)
def test_a_load_that_cannot_be_is_refused(serve: Serve, body: dict[str, str], said: str) -> None:
    with serve(ENGINE, enable_admin_routes=True) as served:
        status, message = post(served, "load", **body)
        assert status == 400
        assert re.search(said, message)
        assert "/no/such" not in message
        assert "/etc" not in message
        assert len(served.http.get("/v1/models").json()["data"]) == 1


@pytest.mark.parametrize("name", ["a", "org/sql-7b.v2", "user@team:sql+x=1", "a" * 256])
def test_names_of_adapters(
    serve: Serve, formula: FormulaModel, paths: dict[str, str], name: str
) -> None:
    with serve(ENGINE, enable_admin_routes=True) as served:
        assert post(served, "load", lora_name=name, lora_path=paths["a"])[0] == 200
        assert tokens_of(served, name) == formula.greedy(PROMPT, 8, 1)
        assert served.http.get(f"/v1/models/{name}").json()["id"] == name
    for hostile in ("../x", "x\ny", "a" * 257):
        with pytest.raises(ConfigError, match="lora_modules"):
            ServerArgs(lora_modules=(f"{hostile}=/a",))


def test_loading_needs_the_switches(serve: Serve, paths: dict[str, str]) -> None:
    with serve(ENGINE) as served:
        assert served.http.post("/v1/load_lora_adapter", json={}).status_code == 404
    with serve(enable_admin_routes=True) as served:
        status, message = post(served, "load", lora_name="x", lora_path=paths["a"])
        assert status == 400
        assert "enable_lora=True" in message


def test_requests_that_run_end_with_the_adapter_that_is_unloaded(
    serve: Serve, formula: FormulaModel, paths: dict[str, str]
) -> None:
    with serve(ENGINE, enable_admin_routes=True, lora_modules=[f"a={paths['a']}"]) as served:
        body = {"model": "a", "prompt": PROMPT, "max_tokens": 100, "return_token_ids": True}
        body |= {"stream": True, "temperature": 0, "ignore_eos": True}
        tokens: list[int] = []
        with served.http.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    tokens += json.loads(line[6:])["choices"][0]["token_ids"]
                    if len(tokens) < 3:
                        post(served, "unload", lora_name="a")
        assert tokens == formula.greedy(PROMPT, 100, 1)
        served.wait_until_idle()


def test_metrics_name_the_adapters_of_unfinished_requests(
    serve: Serve, paths: dict[str, str]
) -> None:
    modules = [f"{name}={path}" for name, path in paths.items()]
    with serve(ENGINE | {"max_num_seqs": 1}, lora_modules=modules) as served:
        may_go_on = threading.Event()
        executor: Any = served.engine.model_executor
        executor.before_sampling = lambda: may_go_on.wait(0.02)
        body = {"prompt": PROMPT, "max_tokens": 100, "ignore_eos": True}
        with ThreadPoolExecutor(3) as pool:
            for model in paths:
                pool.submit(served.complete, **body, model=model)
                served.wait_until(lambda model=model: model in "".join(names_of(served)))  # type: ignore[misc]
            running, waiting = names_of(served)
            may_go_on.set()
        assert (running, waiting) == ("a", "b,c")
        assert names_of(served) == ("", "")


def names_of(served: Served) -> tuple[str, str]:
    """The adapters that run and those that wait."""
    text = served.http.get("/metrics").text
    (labels,) = re.findall(r"^vllm:lora_requests_info\{(.*)\} \d", text, re.MULTILINE)
    known = dict(re.findall(r'(\w+)="([^"]*)"', labels))
    assert known["max_lora"] == "2"
    return known["running_lora_adapters"], known["waiting_lora_adapters"]


@pytest.mark.parametrize("given", ["a", "=path", "a=", '{"name": "a"}', '{"name":', '{"x": 1}'])
def test_an_adapter_in_another_form_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=r"lora_modules\[0\] is .*; it must be NAME=PATH or"):
        ServerArgs(lora_modules=(given,))


def test_a_path_may_have_equals_signs() -> None:
    assert LoraModule.parse("a=b=c") == ("a", "b=c", None)


def test_adapters_without_enable_lora_are_refused_before_a_model_is_loaded() -> None:
    with pytest.raises(ConfigError, match="lora_modules is given without enable_lora"):
        prepare(EngineArgs("/no/such/model"), ServerArgs(lora_modules=("a=b",)))


@pytest.mark.parametrize(
    "given",
    [
        {"lora_modules": ("a=x", '{"name": "a", "path": "y"}')},
        {"lora_modules": ("a=x",), "served_model_name": ("b", "a")},
    ],
)
def test_names_that_are_taken_are_refused_before_a_model_is_loaded(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="lora_modules has the name 'a', which the model or"):
        prepare(EngineArgs("/no/such/model", enable_lora=True), ServerArgs(**given))
    with pytest.raises(ConfigError, match="lora_modules has the name 'smollm2'"):
        prepare(EngineArgs("smollm2", enable_lora=True), ServerArgs(lora_modules=("smollm2=x",)))
