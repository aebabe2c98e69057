"""Embeddings, scores and rankings over HTTP: those of ``LLM``, as other programs ask for them."""

import asyncio
import base64
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ollama
import openai
import pytest

from pagedserve import LLM, AsyncLLMEngine, EngineArgs, LLMEngine, PoolingParams, RequestError
from pagedserve.engine.defaults import server_defaults
from pagedserve.executor.protocol import ModelInfo
from pagedserve.server.options import ServerArgs
from pagedserve.server.pooling import job as pooling_job
from tests.server.conftest import Process, Served
from tests.server.test_batches import answers, client_of, create, wait_for
from tests.support.classifiers import save_classifier

TEXTS = ["A cat sits on the mat.", "A dog lies on the rug.", "Stocks fell sharply.", "x"]
CHAT = [{"role": "user", "content": "x"}]
# More than can be answered within a moment.
MANY: Any = {"input": [f"{'word ' * 200}{place}" for place in range(600)]}


@pytest.fixture(scope="module")
def offline(minilm: Path) -> LLM:
    return LLM(str(minilm), use_tqdm_on_load=False)


@pytest.fixture(scope="module")
def embedding(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of MiniLM in this process."""
    directory = str(tmp_path_factory.mktemp("batches"))
    with serving(minilm, served_model_name=("minilm",), batch_directory=directory) as served:
        yield served


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory, tiny_config: dict[str, Any]) -> Path:
    """A model of one class."""
    directory = tmp_path_factory.mktemp("cross") / "model"
    return save_classifier(directory, tiny_config | {"model_type": "bert", "num_labels": 1})


@contextmanager
def serving(model: Path, **options: Any) -> Iterator[Served]:
    """A server in this process."""
    args = ServerArgs(port=0, uvicorn_log_level="warning", **options)
    engine_args = EngineArgs(str(model), use_tqdm_on_load=False)
    with Served(lambda: LLMEngine(engine_args, choose=server_defaults), args) as served:
        served.check_answers()
        yield served
        served.wait_until_idle()


def vectors(llm: LLM, prompts: Any, **options: Any) -> np.ndarray[Any, Any]:
    outputs = llm.embed(prompts, use_tqdm=False, **options)
    return np.array([output.outputs.embedding for output in outputs])


@pytest.fixture(params=["here", pytest.param("process", marks=pytest.mark.slow)])
def server(
    request: pytest.FixtureRequest,
    minilm: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> Iterator[tuple[str, Callable[[], str]]]:
    """The address of a server of MiniLM, and a call that ends it and returns its log.

    It is in this process, or as users start it, which takes longest for what it imports.
    """
    with ExitStack() as stack:
        if request.param == "process":
            process = Process(tmp_path / "log", str(minilm), "--served-model-name", "minilm")
            process.wait_until_healthy()
            url = process.url
        else:
            stack.enter_context(caplog.at_level(logging.INFO))
            served = stack.enter_context(serving(minilm, served_model_name=("minilm",)))
            url = str(served.http.base_url)

        def end() -> str:
            if request.param == "process":
                assert process.end() == 0, process.log
                return process.log
            stack.close()
            return caplog.text

        yield url, end


def test_openais_client(server: tuple[str, Callable[[], str]], offline: LLM) -> None:
    url, end = server
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list().data] == ["minilm"]
        for encoding in ({}, {"encoding_format": "float"}):  # left out the client asks for base64
            given: Any = encoding
            answer = client.embeddings.create(model="minilm", input=TEXTS, user="u", **given)
            found = np.array([item.embedding for item in answer.data])
            np.testing.assert_allclose(found, vectors(offline, TEXTS), atol=1e-5)
            assert [item.index for item in answer.data] == [0, 1, 2, 3]
        num_tokens = [len(offline.get_tokenizer()(text).input_ids) for text in TEXTS]
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(num_tokens)
        with pytest.raises(openai.BadRequestError, match="makes no text; accepted are embeddings"):
            client.completions.create(model="minilm", prompt="x")
        with pytest.raises(openai.BadRequestError, match="the model pools, and makes no text"):
            client.chat.completions.create(
                model="minilm", messages=[{"role": "user", "content": "x"}]
            )
    lines = end().splitlines()
    (line, *_) = (line for line in lines if f"prompts 4, prompt {sum(num_tokens)} tokens" in line)
    assert ", queue " in line
    assert "first token" not in line


def test_every_form_of_input(embedding: Served, offline: LLM) -> None:
    ids = [offline.get_tokenizer()(text).input_ids for text in TEXTS]
    exact = vectors(offline, TEXTS)
    for given, wanted in ((TEXTS[0], exact[:1]), (ids[1], exact[1:2]), (ids, exact)):
        answer = embedding.http.post("/v1/embeddings", json={"input": given}).json()
        found = np.array([item["embedding"] for item in answer["data"]])
        np.testing.assert_allclose(found, wanted, atol=1e-5)
        assert answer["object"] == "list"
        assert {item["object"] for item in answer["data"]} == {"embedding"}


def test_a_conversation_is_a_prompt(minilm: Path, offline: LLM) -> None:
    template = (
        "{% for message in messages %}{{ message.content }}"
        "{% if not (loop.last and continue_final_message) %} .{% endif %}{% endfor %}"
        "{% if add_generation_prompt %} {{ mood or 'assistant' }}{% endif %}"
    )
    messages = [{"role": "user", "content": TEXTS[0]}]
    generating = {"add_generation_prompt": True}
    with serving(minilm, chat_template=template, log_prompts=True) as served:
        for more, text, is_special in (
            ({}, f"{TEXTS[0]} .", False),
            ({"add_special_tokens": True}, f"{TEXTS[0]} .", True),
            (generating, f"{TEXTS[0]} . assistant", False),
            (generating | {"chat_template_kwargs": {"mood": "cat"}}, f"{TEXTS[0]} . cat", False),
            ({"continue_final_message": True}, TEXTS[0], False),
        ):
            ids = offline.get_tokenizer()(text, add_special_tokens=is_special).input_ids
            for path, field in (("/v1/embeddings", "embedding"), ("/pooling", "data")):
                answer = served.http.post(path, json={"messages": messages} | more).json()
                given = served.http.post(path, json={"input": ids}).json()
                assert answer["usage"] == given["usage"]
                assert answer["data"][0][field] == pytest.approx(given["data"][0][field], abs=1e-6)
        long = [{"role": "user", "content": "word " * 300}]
        refused = served.http.post("/v1/embeddings", json={"messages": long})
        assert refused.json()["error"]["param"] == "messages"
        body = {"messages": long, "truncate_prompt_tokens": -1}
        answer = served.http.post("/v1/embeddings", json=body).json()
        assert answer["usage"]["prompt_tokens"] == 256


def test_ollamas_client_embeds(embedding: Served, offline: LLM) -> None:
    with ollama.Client(str(embedding.http.base_url)) as client:
        assert client.show("minilm").capabilities == ["embedding"]
        found = client.embed("minilm:latest", TEXTS, keep_alive=0, options={"num_ctx": 99})
        exact = vectors(offline, TEXTS)
        np.testing.assert_allclose(np.array(found.embeddings), exact, atol=1e-5)
        num_tokens = sum(len(offline.get_tokenizer()(text).input_ids) for text in TEXTS)
        assert (found.model, found.prompt_eval_count) == ("minilm", num_tokens)
        assert (found.total_duration or 0) > 0
        (single,) = client.embed("minilm", TEXTS[1]).embeddings
        np.testing.assert_allclose(single, exact[1], atol=1e-5)
        former = client.embeddings("minilm", TEXTS[1]).embedding
        np.testing.assert_allclose(former, exact[1], atol=1e-5)
        assert client.embed("minilm", "").embeddings == client.embed("minilm", []).embeddings == []
        assert client.embeddings("minilm").embedding == []


def test_ollamas_api_truncates_texts_unless_told_not_to(embedding: Served) -> None:
    body: Any = {"model": "minilm", "input": TEXTS[0] + " and a cat" * 600}
    cut = embedding.http.post("/api/embed", json=body)
    same = embedding.http.post("/v1/embeddings", json=body | {"truncate_prompt_tokens": -1})
    assert cut.json()["embeddings"] == [same.json()["data"][0]["embedding"]]
    refused = embedding.http.post("/api/embed", json=body | {"truncate": False})
    assert (refused.status_code, refused.json().keys()) == (400, {"error"})


def test_ollamas_api_refuses_what_it_cannot_embed(embedding: Served) -> None:
    for path, given, status, error in (
        ("embed", {"model": "other", "input": "x"}, 404, "does not exist"),
        ("embeddings", {"model": "other"}, 404, "does not exist"),
        ("embed", {"model": "minilm", "input": [1]}, 400, "input"),
        ("embed", {"model": "minilm", "input": "x", "dimensions": 5}, 400, "dimensions is 5"),
    ):
        answer = embedding.http.post(f"/api/{path}", json=given)
        assert answer.status_code == status
        assert error in answer.json()["error"]


def test_base64_is_float32_with_the_lowest_byte_first(embedding: Served, offline: LLM) -> None:
    body = {"input": TEXTS[0], "encoding_format": "base64", "normalize": False}
    answer = embedding.http.post("/v1/embeddings", json=body).json()
    found = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), dtype="<f4")
    params = PoolingParams(use_activation=False)
    np.testing.assert_allclose(
        found, vectors(offline, TEXTS[0], pooling_params=params)[0], atol=1e-5
    )
    assert abs(np.linalg.norm(found) - 1) > 1e-3
    body = {"input": TEXTS[0], "use_activation": False, "task": "embed", "late_chunking": False}
    (item,) = embedding.http.post("/pooling", json=body).json()["data"]
    np.testing.assert_allclose(item["data"], found, atol=1e-5)


def test_many_vectors_are_serialized_outside_the_event_loop(
    embedding: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encoded(vector: np.ndarray[Any, Any], encoding: str) -> Any:
        threads.add(threading.get_ident())
        return encode(vector, encoding)

    encode, threads = pooling_job.encoded, set[int]()
    monkeypatch.setattr(pooling_job, "encoded", encoded)
    for number, is_outside in ((1, False), (20, True)):
        threads.clear()
        answer = embedding.http.post("/v1/embeddings", json={"input": TEXTS[:1] * number}).json()
        assert [item["index"] for item in answer["data"]] == list(range(number))
        (thread,) = threads
        assert (thread != embedding._thread.ident) == is_outside


def test_scores_are_cosines(embedding: Served, offline: LLM) -> None:
    wanted = [score.outputs.score for score in offline.score(TEXTS[0], TEXTS, use_tqdm=False)]
    body = {"text_1": TEXTS[0], "text_2": TEXTS, "encoding_format": "float"}
    for path in ("/score", "/v1/score"):
        answer = embedding.http.post(path, json=body).json()
        assert [item["score"] for item in answer["data"]] == pytest.approx(wanted, abs=1e-5)
    pairs = {"text_1": TEXTS, "text_2": TEXTS[::-1]}
    first, second, third, last = (
        item["score"] for item in embedding.http.post("/score", json=pairs).json()["data"]
    )
    assert (first, second) == pytest.approx((last, third), abs=1e-6)


@pytest.mark.parametrize(
    ("first", "second"), [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_vllms_names_of_the_scored_texts(embedding: Served, first: str, second: str) -> None:
    plain = embedding.http.post("/score", json={"text_1": TEXTS[0], "text_2": TEXTS}).json()
    answer = embedding.http.post("/score", json={first: TEXTS[0], second: TEXTS})
    assert [item["score"] for item in answer.json()["data"]] == pytest.approx(
        [item["score"] for item in plain["data"]], abs=1e-6
    )
    twice = {first: TEXTS[0], "text_1": TEXTS[1], second: TEXTS}
    assert embedding.http.post("/score", json=twice).status_code == 400


def test_documents_are_ranked(embedding: Served, offline: LLM) -> None:
    query = "animals at rest"
    wanted = [score.outputs.score for score in offline.score(query, TEXTS, use_tqdm=False)]
    order = sorted(range(4), key=lambda place: -wanted[place])
    parts = {"content": [{"type": "text", "text": TEXTS[1]}]}
    documents: list[Any] = [{"text": TEXTS[0]}, parts, *TEXTS[2:]]
    body = {"query": query, "documents": documents, "top_n": 3}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = embedding.http.post(path, json=body).json()
        assert [result["index"] for result in answer["results"]] == order[:3]
        for result in answer["results"]:
            assert result["relevance_score"] == pytest.approx(wanted[result["index"]], abs=1e-5)
            assert result["document"] == {"text": TEXTS[result["index"]]}
    body |= {"return_documents": False, "score_threshold": 0.8, "return_len": "true"}
    body |= {"raw_scores": False}
    answer = embedding.http.post("/rerank", json=body).json()
    assert set(answer["results"][0]) == {"index", "relevance_score"}


def test_as_many_documents_as_are_allowed(embedding: Served) -> None:
    documents = [f"text {number}" for number in range(1024)]
    body = {"query": "animals", "documents": documents, "top_n": 0, "return_documents": False}
    answer = embedding.http.post("/rerank", json=body)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["results"]) == 1024
    answer = embedding.http.post("/rerank", json={**body, "documents": [*documents, "one more"]})
    assert answer.json()["error"]["message"].startswith("documents has 1025 documents")


def test_a_cross_encoder_is_given_pairs(
    cross_encoder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llm = LLM(str(cross_encoder), use_tqdm_on_load=False)
    documents = ["w7 w5", "w40 w41 w42 w43", "w9"]
    wanted = [score.outputs.score for score in llm.score("w5 w9", documents, use_tqdm=False)]
    with serving(cross_encoder, log_prompts=True) as served, caplog.at_level(logging.INFO):
        body: Any = {"text_1": "w5 w9", "text_2": documents}
        answer = served.http.post("/score", json=body).json()
        assert [item["score"] for item in answer["data"]] == pytest.approx(wanted, abs=1e-5)
        given = [{"text": documents[0]}, *documents[1:]]
        body = {"query": "w5 w9", "documents": given, "use_activation": False}
        raw = served.http.post("/rerank", json=body).json()["results"]
        scores = {result["index"]: 1 / (1 + np.exp(-result["relevance_score"])) for result in raw}
        assert [scores[place] for place in range(3)] == pytest.approx(wanted, abs=1e-5)
        del body["use_activation"]
        results = served.http.post("/rerank", json=body).json()["results"]
        order = sorted(range(3), key=lambda place: -wanted[place])
        assert [result["index"] for result in results] == order
        answer = served.http.post("/v1/embeddings", json={"input": "w5"})
        assert answer.status_code == 400
        assert "the model names classes" in answer.json()["error"]["message"]
    assert "w40 w41 w42 w43" in caplog.text


def test_classes(tmp_path: Path, tiny_config: dict[str, Any], embedding: Served) -> None:
    labels = {0: "bad", 1: "good", 2: "fair"}
    kind = {"model_type": "llama", "id2label": labels}
    model = save_classifier(tmp_path / "model", tiny_config | kind)
    prompts = ["w5 w9", "w40 w41 w42 w43", "w9"]
    outputs = LLM(str(model), use_tqdm_on_load=False).classify(prompts, use_tqdm=False)
    wanted = np.array([output.outputs.probs for output in outputs])
    with serving(model, chat_template="{{ messages[0].content }}") as served:
        answer = served.http.post("/classify", json={"input": prompts}).json()
        found = np.array([item["probs"] for item in answer["data"]])
        np.testing.assert_allclose(found, wanted, atol=1e-5)
        shown = [item["label"] for item in answer["data"]]
        assert shown == [labels[int(place)] for place in wanted.argmax(axis=1)]
        assert {item["num_classes"] for item in answer["data"]} == {3}
        body = {"messages": [{"role": "user", "content": "w9"}], "add_special_tokens": True}
        (chat,) = served.http.post("/classify", json=body).json()["data"]
        np.testing.assert_allclose(chat["probs"], wanted[2], atol=1e-5)
        raw = {"input": prompts, "use_activation": False}
        (first, *_) = served.http.post("/classify", json=raw).json()["data"]
        powers = np.exp(first["probs"])
        np.testing.assert_allclose(powers / powers.sum(), wanted[0], atol=1e-5)
    answer = embedding.http.post("/classify", json={"input": "x"})
    assert answer.status_code == 400
    assert "the model embeds" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "said", "param"),
    [
        ("/v1/embeddings", {"input": []}, "input has 0 prompts", "input"),
        ("/v1/embeddings", {"input": ["x", ""]}, "is empty", "input"),
        ("/v1/embeddings", {"input": "x", "dimensions": 8}, "dimensions is 8.*384", "dimensions"),
        ("/v1/embeddings", {"input": "x", "prompt_name": "query"}, "has none", "prompt_name"),
        ("/v1/embeddings", {"input": "x", "temperature": 1}, "temperature is no field", None),
        ("/v1/embeddings", {"input": "x", "embed_dtype": "int8"}, "not supported", "embed_dtype"),
        ("/v1/embeddings", {"input": "word " * 300}, "302 tokens; it must have at most 256", None),
        ("/v1/embeddings", {"input": [[99999999]]}, "token ids must be from 0", "input"),
        ("/v1/embeddings", {}, "give either input or messages", "input"),
        ("/pooling", {"input": "x", "messages": CHAT}, "give either input or messages", "input"),
        ("/v1/embeddings", {"messages": []}, "messages is empty", "messages"),
        ("/v1/embeddings", {"messages": CHAT}, "tokenizer has no chat template", "messages"),
        ("/v1/embeddings", {"messages": CHAT, "chat_template": "x"}, "takes none", "chat_template"),
        ("/pooling", {"messages": CHAT, "prompt_name": "query"}, "needs input", "prompt_name"),
        ("/pooling", {"input": "x", "task": "classify"}, "the model embeds", None),
        ("/pooling", {"input": "x", "task": "token_embed"}, "'embed' or 'classify'", "task"),
        (
            "/v1/embeddings",
            {"input": "x", "add_special_tokens": False},
            "must be True or left out",
            "add_special_tokens",
        ),
        ("/score", {"text_1": ["x", "y"], "text_2": ["x"] * 3}, "text_1 has 2 texts", "text_1"),
        (
            "/score",
            {"text_1": "x", "text_2": "x", "encoding_format": "base64"},
            "is 'base64'",
            None,
        ),
        ("/rerank", {"query": "x", "documents": []}, "at least one of each", None),
        ("/rerank", {"query": "x", "documents": ["y"], "top_n": -1}, "top_n", "top_n"),
    ],
)
def test_bad_requests_are_said(
    embedding: Served, path: str, body: Any, said: str, param: str | None
) -> None:
    answer = embedding.http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    with pytest.raises(ValueError, match=said):
        raise ValueError(error["message"])
    if param is not None:
        assert error["param"] == param


def test_long_texts_are_shortened_where_that_is_asked_for(embedding: Served) -> None:
    for text in ("word " * 300, "word " * 30000):
        body = {"input": text, "truncate_prompt_tokens": -1}
        answer = embedding.http.post("/v1/embeddings", json=body).json()
        assert answer["usage"]["prompt_tokens"] == 256


def test_shortened_texts_keep_their_first_tokens(embedding: Served) -> None:
    first = {"input": "one two three", "truncate_prompt_tokens": 4, "truncation_side": "right"}
    found = [
        embedding.http.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
        for body in (first, {"input": "one two"})
    ]
    assert found[0] == pytest.approx(found[1], abs=1e-6)
    answer = embedding.http.post("/v1/embeddings", json=first | {"truncation_side": "left"})
    assert "truncation_side is 'left'; it is not supported here" in answer.text


def test_shortened_texts_keep_tokens_after_many_spaces(embedding: Served, offline: LLM) -> None:
    body = {"input": f"{' ' * 20_000}{TEXTS[0]}", "truncate_prompt_tokens": -1}
    answer = embedding.http.post("/v1/embeddings", json=body).json()
    assert answer["data"][0]["embedding"] == pytest.approx(vectors(offline, TEXTS[0])[0], abs=1e-6)


def test_a_model_that_generates_refuses_by_name(shared: Served) -> None:
    for path, body in (
        ("/v1/embeddings", {"input": "x"}),
        ("/pooling", {"input": "x"}),
        ("/classify", {"input": "x"}),
        ("/score", {"text_1": "x", "text_2": "y"}),
        ("/rerank", {"query": "x", "documents": ["y"]}),
    ):
        answer = shared.http.post(path, json=body)
        assert answer.status_code == 400
        said = "the model generates; accepted are completions and chats"
        assert said in answer.json()["error"]["message"]


def test_fields_of_other_servers_that_cannot_matter_are_passed_over(embedding: Served) -> None:
    harmless = {"stream": False, "truncate": "NONE", "padding": "do_not_pad", "dimensions": 0}
    harmless |= {"input_type": "passage", "task": "retrieval.passage"}
    found = embedding.http.post("/v1/embeddings", json={"input": TEXTS[0]} | harmless)
    assert (
        found.json()["data"]
        == embedding.http.post("/v1/embeddings", json={"input": TEXTS[0]}).json()["data"]
    )
    ranked = {"query": "x", "documents": ["y"], "max_tokens_per_doc": 0, "max_tokens_per_query": 0}
    assert embedding.http.post("/rerank", json=ranked).status_code == 200


def test_limits_and_metrics_are_those_of_all_requests(embedding: Served) -> None:
    before = embedding.metrics()
    answer = embedding.http.post("/v1/embeddings", json={"input": TEXTS})
    assert answer.headers["x-request-id"] in answer.json()["id"]
    after = embedding.metrics()
    grown = {name: value - before[name] for name, value in after.items()}
    assert grown["vllm:request_success_total"] == 4
    num_tokens = answer.json()["usage"]["prompt_tokens"]
    assert grown["vllm:prompt_tokens_by_source_total"] == num_tokens
    assert grown["vllm:request_prompt_tokens_sum"] == num_tokens
    most = embedding.context.admission.most
    embedding.context.admission.num_seqs += most - 3
    try:
        refused = embedding.http.post("/v1/embeddings", json={"input": TEXTS})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
    finally:
        embedding.context.admission.num_seqs -= most - 3


def test_who_leaves_or_has_no_time_ends_its_requests(embedding: Served) -> None:
    with suppress(httpx.TimeoutException):
        embedding.http.post("/v1/embeddings", json=MANY, timeout=0.2)
    embedding.wait_until_idle()
    answer = embedding.http.post("/v1/embeddings", json=MANY | {"timeout": 0.05})
    assert answer.status_code == 503
    assert "aborted" in answer.json()["error"]["message"]
    embedding.wait_until_idle()


def test_a_line_of_a_batch_that_has_no_time_is_an_error(embedding: Served) -> None:
    bodies = {"late": MANY | {"timeout": 0.0001}, "good": {"input": TEXTS}}
    given = [
        {"custom_id": name, "method": "POST", "url": "/v1/embeddings", "body": body}
        for name, body in bodies.items()
    ]
    with client_of(embedding) as client:
        ended = wait_for(client, create(client, given, endpoint="/v1/embeddings"))
        (refused,) = answers(client, ended.error_file_id)
        (answered,) = answers(client, ended.output_file_id)
    assert ended.status == "completed"
    assert (refused["custom_id"], refused["response"]["status_code"]) == ("late", 503)
    assert answered["custom_id"] == "good"


def test_the_engine_without_http(minilm: Path, offline: LLM) -> None:
    async def embed() -> list[Any]:
        engine = AsyncLLMEngine.from_engine_args(EngineArgs(str(minilm), use_tqdm_on_load=False))
        try:
            found = [
                output.outputs.data
                for text in TEXTS
                async for output in engine.encode(text, PoolingParams(), text)
            ]
            with pytest.raises(RequestError, match="dimensions is 3"):
                await anext(engine.encode("x", PoolingParams(dimensions=3), "a"))
        finally:
            engine.shutdown()
        return found

    np.testing.assert_allclose(asyncio.run(embed()), vectors(offline, TEXTS), atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "chunks", "prefixes"),
    [
        ({}, True, True),
        ({"sees_whole_prompts": True}, False, False),
        ({"keeps_states": True}, True, False),
    ],
)
def test_a_server_does_what_the_model_can(kind: Any, *, chunks: bool, prefixes: bool) -> None:
    model = ModelInfo(
        vocab_size=9, max_model_len=9, eos_token_ids=(), device_type="cpu", backends="", **kind
    )
    chosen = server_defaults(EngineArgs("x", max_num_seqs=1024), model)
    assert chosen.enable_chunked_prefill is chunks
    assert chosen.enable_prefix_caching is prefixes
    assert chosen.max_num_batched_tokens == (1024 if chunks else None)
    given = EngineArgs("x", enable_chunked_prefill=False, enable_prefix_caching=False)
    assert server_defaults(given, model) == given


def test_what_an_encoder_has_not_is_refused_of_a_server_too(minilm: Path) -> None:
    args = EngineArgs(str(minilm), enable_prefix_caching=True)
    with pytest.raises(ValueError, match="enable_prefix_caching is True, and the model pools"):
        LLMEngine(args, choose=server_defaults)
