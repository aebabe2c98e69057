"""Files and batches as OpenAI's own client sees them, against a server of the formula."""

import errno
import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

import httpx
import openai
import pytest
from openai.types import Batch
from openai.types import FileObject as File

from pagedserve import EngineArgs
from pagedserve.errors import ConfigError
from pagedserve.server.batches import service
from pagedserve.server.batches.output_file import OutputFile
from pagedserve.server.batches.protocol import BatchObject
from pagedserve.server.batches.service import BatchService
from pagedserve.server.files import records, store
from pagedserve.server.files.lock import lock_directory
from pagedserve.server.files.protocol import FileObject
from pagedserve.server.files.records import Records
from pagedserve.server.options import ServerArgs
from pagedserve.server.prepare import prepare
from tests.server.conftest import TEMPLATE, Served
from tests.server.test_completions import text_after
from tests.server.test_life import slowly
from tests.support.formula import FormulaModel

KEYS: Final = ("first-key", "second-key")
NUM_TOKENS: Final = 12

Line: TypeAlias = dict[str, Any]


def line(custom_id: str, prompt: str, url: str = "/v1/completions", **more: Any) -> Line:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body | more}


def text_of(prompt: str) -> str:
    return text_after(FormulaModel(), prompt, NUM_TOKENS)


def lines(number: int) -> list[Line]:
    return [line(f"id-{index}", f"prompt {index}") for index in range(number)]


def expected(number: int) -> dict[str, str]:
    """Texts of ``lines``, by the formula."""
    return {f"id-{index}": text_of(f"prompt {index}") for index in range(number)}


@contextmanager
def serving(
    directory: Path, engine: dict[str, Any] | None = None, **options: Any
) -> Iterator[Served]:
    args = ServerArgs(
        port=0,
        uvicorn_log_level="warning",
        chat_template=TEMPLATE,
        batch_directory=str(directory),
        **{"api_key": KEYS} | options,
    )
    with Served(partial(FormulaModel().engine, **(engine or {})), args) as running:
        running.http.headers["Authorization"] = f"Bearer {KEYS[0]}"
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("batches") / "new") as running:
        yield running
        running.wait_until_idle()


def client_of(served: Served, key: str = KEYS[0]) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.http.base_url}/v1", api_key=key, max_retries=0)


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client


def upload(client: openai.OpenAI, given: Sequence[Line | bytes]) -> File:
    texts = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in given]
    return client.files.create(file=("in.jsonl", b"\n".join(texts)), purpose="batch")


def create(client: openai.OpenAI, given: Sequence[Line | bytes], **more: Any) -> Batch:
    body: Any = {"endpoint": "/v1/completions", "completion_window": "24h"} | more
    return client.batches.create(input_file_id=upload(client, given).id, **body)


def wait_for(
    client: openai.OpenAI, batch: Batch, holds: Callable[[Batch], bool] | None = None
) -> Batch:
    """The batch once it holds, or has ended."""
    while True:
        batch = client.batches.retrieve(batch.id)
        if batch.status in {"completed", "failed", "expired", "cancelled"}:
            return batch
        if holds is not None and holds(batch):
            return batch
        time.sleep(0.03)


def num_completed(batch: Batch) -> int:
    assert batch.request_counts is not None
    return int(batch.request_counts.completed)


def answers(client: openai.OpenAI, file_id: str | None) -> list[Line]:
    if file_id is None:
        return []
    return [json.loads(each) for each in client.files.content(file_id).text.splitlines()]


def texts(found: Sequence[Line]) -> dict[str, str]:
    """Texts of completions by their ids, each of which is there once."""
    by_id = {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in found}
    assert len(by_id) == len(found)
    return by_id


def test_a_batch_is_answered(client: openai.OpenAI) -> None:
    given = lines(5)
    file = upload(client, given)
    size = sum(len(json.dumps(each)) + 1 for each in given) - 1
    assert (file.object, file.purpose, file.filename) == ("file", "batch", "in.jsonl")
    assert (file.bytes, file.status) == (size, "processed")
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == "\n".join(map(json.dumps, given)).encode()
    assert file in client.files.list(purpose="batch").data
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/completions",
        completion_window="24h",
        metadata={"name": "ünï"},
    )
    assert (batch.object, batch.endpoint) == ("batch", "/v1/completions")
    assert batch.status == "validating"
    assert batch.expires_at == batch.created_at + 24 * 3600
    ended = wait_for(client, batch)
    Batch.model_validate(ended.to_dict(), strict=True)
    assert (ended.status, ended.metadata) == ("completed", {"name": "ünï"})
    assert ended.request_counts is not None
    assert ended.request_counts.to_dict() == {"total": 5, "completed": 5, "failed": 0}
    assert ended.error_file_id is None
    assert None not in (ended.in_progress_at, ended.finalizing_at, ended.completed_at)
    found = answers(client, ended.output_file_id)
    assert texts(found) == expected(5)
    assert all(each["error"] is None for each in found)
    assert all(each["response"]["status_code"] == 200 for each in found)
    assert ended.output_file_id is not None
    output = client.files.retrieve(ended.output_file_id)
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert output in client.files.list(purpose="batch_output").data
    assert output not in client.files.list(purpose="batch").data
    assert client.files.delete(file.id).deleted
    assert client.files.delete(output.id).deleted
    for gone in (file.id, output.id):
        with pytest.raises(openai.NotFoundError, match=f"no file '{gone}' exists"):
            client.files.content(gone)
    assert client.batches.retrieve(batch.id) == ended


def test_chats_and_stored_responses_of_a_batch(client: openai.OpenAI) -> None:
    message = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_tokens": 5}
    chat = line("chat", "", "/v1/chat/completions") | {"body": message}
    ended = wait_for(client, create(client, [chat], endpoint="/v1/chat/completions"))
    (found,) = answers(client, ended.output_file_id)
    live = client.post("/chat/completions", body=message, cast_to=httpx.Response).json()
    assert found["response"]["body"]["choices"] == live["choices"]
    body = {"input": "x", "temperature": 0, "max_output_tokens": 5}
    response = line("response", "", "/v1/responses") | {"body": body}
    ended = wait_for(client, create(client, [response], endpoint="/v1/responses"))
    (found,) = answers(client, ended.output_file_id)
    answer = found["response"]["body"]
    (item,) = answer["output"]
    assert client.responses.retrieve(answer["id"]).output_text == item["content"][0]["text"]
    with pytest.raises(openai.NotFoundError):
        client.with_options(api_key=KEYS[1]).responses.retrieve(answer["id"])


def test_bad_lines_are_errors_of_their_own(client: openai.OpenAI) -> None:
    given: list[Line | bytes] = [
        line("good", "a"),
        b"",
        b"nonsense",
        line("good", "again"),
        line("streamed", "a", stream=True),
        line("wrong", "a", temperature=-1),
        line("unknown", "a", model="gpt-4"),
        line("elsewhere", "a", "/v1/chat/completions"),
    ]
    ended = wait_for(client, create(client, given))
    assert ended.status == "completed"
    assert ended.request_counts is not None
    assert ended.request_counts.to_dict() == {"total": 7, "completed": 1, "failed": 6}
    assert texts(answers(client, ended.output_file_id)) == {"good": text_of("a")}
    errors = {each["id"]: each for each in answers(client, ended.error_file_id)}
    found = {
        number: (errors[f"batch_req_{number}"]["custom_id"], errors[f"batch_req_{number}"]["error"])
        for number in (3, 4, 5, 6, 7, 8)
    }
    assert {number: (custom_id, told["code"]) for number, (custom_id, told) in found.items()} == {
        3: (None, "invalid_json_line"),
        4: (None, "duplicate_custom_id"),
        5: ("streamed", "BadRequestError"),
        6: ("wrong", "BadRequestError"),
        7: ("unknown", "NotFoundError"),
        8: ("elsewhere", "invalid_url"),
    }
    assert errors["batch_req_6"]["response"]["status_code"] == 400
    assert found[8][1]["message"].endswith("accepted are /v1/completions")
    errors_alone = wait_for(client, create(client, [b"nonsense"]))
    assert errors_alone.output_file_id is None
    assert len(answers(client, errors_alone.error_file_id)) == 1


@pytest.mark.parametrize("content", [b"", b"\n  \n"])
def test_a_file_without_requests_fails(client: openai.OpenAI, content: bytes) -> None:
    ended = wait_for(client, create(client, [content]))
    assert (ended.status, ended.output_file_id, ended.error_file_id) == ("failed", None, None)
    assert ended.failed_at is not None
    assert ended.errors is not None
    assert ended.errors.data is not None
    (error,) = ended.errors.data
    assert (error.param, error.message) == ("input_file_id", "the input file has no request")


def test_nothing_exists_for_another_key(client: openai.OpenAI, server: Served) -> None:
    batch = wait_for(client, create(client, [*lines(1), b"nonsense"]))
    file_ids = [batch.input_file_id, batch.output_file_id, batch.error_file_id]
    with client_of(server, KEYS[1]) as other:
        assert other.files.list().data == []
        assert other.batches.list().data == []
        for file_id in file_ids:
            assert file_id is not None
            for call in (other.files.retrieve, other.files.content, other.files.delete):
                with pytest.raises(openai.NotFoundError, match="exists for this API key"):
                    call(file_id)
        for use in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError, match="no batch 'batch_"):
                use(batch.id)
        with pytest.raises(openai.NotFoundError, match="no file 'file-"):
            other.batches.create(
                input_file_id=batch.input_file_id,
                endpoint="/v1/completions",
                completion_window="24h",
            )
        with pytest.raises(openai.BadRequestError, match="after is 'batch_"):
            other.batches.list(after=batch.id)
    assert client.batches.retrieve(batch.id) == batch
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="third").files.list()


def test_a_bad_parameter_of_a_query_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r' limit is "0"; it must be') as refused:
        client.batches.list(limit=0)
    assert refused.value.param == "limit"


def test_lists_have_pages(client: openai.OpenAI) -> None:
    batches = [wait_for(client, create(client, lines(1))) for _ in range(3)]
    newest = [batch.id for batch in reversed(batches)]
    first = client.batches.list(limit=2)
    assert [batch.id for batch in first.data] == newest[:2]
    assert first.has_more
    pages = client.batches.list(limit=2, after=newest[0])
    assert [batch.id for batch in pages.data] == [newest[1], newest[2]]
    everything = [batch.id for batch in client.batches.list(limit=2)]  # page after page
    assert everything[:3] == newest
    assert len(set(everything)) == len(everything)
    oldest_first = [file.id for file in client.files.list(order="asc", limit=2, purpose="batch")]
    newest_first = [file.id for file in client.files.list(purpose="batch")]
    assert oldest_first == newest_first[::-1]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"endpoint": "/v1/rerank"}, "must be /v1/ with one of chat/completions, completions, emb"),
        ({"completion_window": "soon"}, "completion_window is 'soon'; it must be hours or days"),
        ({"completion_window": "0h"}, "completion_window is '0h'"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a: String should have at most 512 characters"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 5}},
            "output_expires_after.seconds is 5; it must be greater than or equal to 3600",
        ),
        ({"extra_body": {"output_expires": 1}}, "output_expires: Extra"),
    ],
)
def test_fields_that_cannot_be_followed_are_refused(
    client: openai.OpenAI, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        create(client, lines(1), **given)
    assert words in raised.value.message


def test_files_are_deleted_when_they_expire(
    client: openai.OpenAI, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    expiry: Any = {"anchor": "created_at", "seconds": 3600}
    content = json.dumps(line("a", "x")).encode()
    file = client.files.create(file=content, purpose="batch", expires_after=expiry)
    assert file.expires_at == file.created_at + 3600
    body: Any = {"endpoint": "/v1/completions", "completion_window": "24h"}
    batch = client.batches.create(input_file_id=file.id, output_expires_after=expiry, **body)
    output = client.files.retrieve(wait_for(client, batch).output_file_id or "")
    assert output.expires_at == output.created_at + 3600
    kept = upload(client, lines(1))
    assert kept.expires_at is None
    later = time.time() + 3601
    monkeypatch.setattr(store, "time", SimpleNamespace(time=lambda: later))
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id=file.id, **body)
    for expired in (file, output):
        with pytest.raises(openai.NotFoundError):
            client.files.content(expired.id)
    listed = {each.id for each in client.files.list()}
    assert (kept.id in listed, listed & {file.id, output.id}) == (True, set())


def test_the_input_of_a_batch_that_has_not_ended_does_not_expire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expiry: Any = {"anchor": "created_at", "seconds": 3600}
    with serving(tmp_path, {"max_num_seqs": 4}) as served, client_of(served) as client:
        slowly(served, 0.02)
        content = b"\n".join(json.dumps(each).encode() for each in lines(20))
        file = client.files.create(file=content, purpose="batch", expires_after=expiry)
        body: Any = {"endpoint": "/v1/completions", "completion_window": "24h"}
        batch = client.batches.create(input_file_id=file.id, **body)
        later = time.time() + 3601
        monkeypatch.setattr(store, "time", SimpleNamespace(time=lambda: later))
        assert client.files.retrieve(file.id).id == file.id
        client.batches.cancel(batch.id)
        assert wait_for(client, batch).status == "cancelled"
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)
        served.wait_until_idle()


def test_uploads_that_are_no_batch_are_refused(client: openai.OpenAI, server: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose is \"vision\"; it must be 'batch'"):
        client.files.create(file=b"x", purpose="vision")
    with pytest.raises(openai.BadRequestError, match="257 characters; at most 256"):
        client.files.create(file=("x" * 257, b"x"), purpose="batch")
    with pytest.raises(openai.BadRequestError, match=r"expires_after\[seconds\]"):
        client.files.create(
            file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3599}
        )
    assert server.http.post("/v1/files", json={}).status_code == 415
    body = {"input_file_id": "../lock", "endpoint": "/v1/completions", "completion_window": "1h"}
    assert server.http.post("/v1/batches", json=body).status_code == 404
    for path in ("/v1/files/..%2Flock", "/v1/files/..%2Flock/content"):
        assert server.http.get(path).status_code == 404
    surrogate = b'{"input_file_id": "\\ud800", "endpoint": "e", "completion_window": "1h"}'
    headers = {"Content-Type": "application/json"}
    answer = server.http.post("/v1/batches", content=surrogate, headers=headers)
    assert answer.status_code in {400, 404}


def test_without_the_option_the_routes_name_it(shared: Served) -> None:
    with client_of(shared) as client:
        for call in (client.files.list, client.batches.list, partial(client.files.content, "x")):
            with pytest.raises(openai.NotFoundError, match="--batch-directory DIRECTORY"):
                call()


def test_a_cancelled_batch_keeps_its_responses(tmp_path: Path) -> None:
    with serving(tmp_path, {"max_num_seqs": 4}) as served, client_of(served) as client:
        slowly(served, 0.01)
        batch = create(client, lines(60))
        wait_for(client, batch, lambda now: num_completed(now) >= 3)
        with pytest.raises(openai.BadRequestError, match=f"the input of {batch.id}"):
            client.files.delete(batch.input_file_id)
        assert client.batches.cancel(batch.id).status == "cancelling"
        ended = wait_for(client, batch)
        assert ended.status == "cancelled"
        assert ended.cancelled_at is not None
        found = texts(answers(client, ended.output_file_id))
        assert 3 <= len(found) == num_completed(ended) < 60
        assert found.items() <= expected(60).items()
        with pytest.raises(openai.BadRequestError, match="the batch is cancelled, and cannot"):
            client.batches.cancel(batch.id)
        slowly(served, 0)
        served.wait_until_idle()
        assert wait_for(client, create(client, lines(2))).status == "completed"


def test_a_batch_is_resumed_by_the_next_server(tmp_path: Path) -> None:
    with serving(tmp_path, {"max_num_seqs": 4}) as served, client_of(served) as client:
        slowly(served, 0.01)
        batch = create(client, [*lines(16), b"nonsense"])
        waiting = [create(client, lines(1)) for _ in range(4)]
        kept = wait_for(client, batch, lambda now: num_completed(now) >= 3)
        file = client.files.retrieve(batch.input_file_id)
    with serving(tmp_path) as served, client_of(served) as client:
        assert client.files.retrieve(file.id) == file
        ended = wait_for(client, batch)
        assert ended.status == "completed"
        assert ended.request_counts is not None
        assert ended.request_counts.to_dict() == {"total": 17, "completed": 16, "failed": 1}
        assert (ended.created_at, ended.in_progress_at) == (kept.created_at, kept.in_progress_at)
        assert texts(answers(client, ended.output_file_id)) == expected(16)
        assert len(answers(client, ended.error_file_id)) == 1
        for other in waiting:
            found = answers(client, wait_for(client, other).output_file_id)
            assert texts(found) == expected(1)
        served.wait_until_idle()
        shown = [each.to_dict() for each in client.batches.list().data]
    stored = Records(tmp_path / "batches", BatchObject, "batch")
    assert [batch.model_dump() for _, batch in stored] == shown[::-1]
    assert not list((tmp_path / "batches").glob("*.jsonl"))
    kept_files = Records(tmp_path / "files", FileObject, "file")
    contents = {
        path.name.removesuffix(".content") for path in (tmp_path / "files").glob("*.content")
    }
    assert contents == {file.id for _, file in kept_files}


def changed(tmp_path: Path, batch: Batch, **fields: Any) -> None:
    """Change what is stored of a batch."""
    path = tmp_path / "batches" / f"{batch.id}.json"
    stored = json.loads(path.read_bytes())
    stored["record"] |= fields
    path.write_text(json.dumps(stored))


def test_a_server_ends_what_was_cancelled_or_expires_before_it(tmp_path: Path) -> None:
    with serving(tmp_path, {"max_num_seqs": 4}) as served, client_of(served) as client:
        slowly(served, 0.02)
        first, second = (create(client, [b"nonsense", *lines(20)]) for _ in range(2))
        for batch in (first, second):
            wait_for(client, batch, lambda now: num_completed(now) >= 1)
    changed(tmp_path, first, expires_at=int(time.time()) - 1)
    changed(tmp_path, second, status="cancelling", cancelling_at=int(time.time()))
    (tmp_path / "files" / "file-0.content").write_bytes(b"of an upload that was killed")
    (tmp_path / "files" / "file-0.json.partial").write_bytes(b"{")
    with serving(tmp_path) as served, client_of(served) as client:
        for batch, status in ((first, "expired"), (second, "cancelled")):
            ended = wait_for(client, batch)
            assert ended.status == status
            assert getattr(ended, f"{status}_at") is not None
            found = texts(answers(client, ended.output_file_id))
            assert 1 <= len(found) < 20
            counts = {"total": 21, "completed": len(found), "failed": 1}
            assert ended.request_counts is not None
            assert ended.request_counts.to_dict() == counts
            assert found.items() <= expected(20).items()
        served.wait_until_idle()
    assert not list((tmp_path / "files").glob("file-0*"))


def test_live_requests_find_sequences_free(tmp_path: Path) -> None:
    engine = {"max_num_seqs": 8, "num_gpu_blocks": 512}
    with serving(tmp_path, engine) as served, client_of(served) as client:
        slowly(served, 0.005)
        given = [line(f"id-{index}", f"prompt {index}", priority=-5) for index in range(40)]
        priorities = []
        generate = served.client.generate

        def noted(*positional: Any, **named: Any) -> Any:
            priorities.append(named["priority"])
            return generate(*positional, **named)

        served.client.generate = noted  # type: ignore[method-assign]
        batch = create(client, given)
        most = 0
        while not wait_for(client, batch, lambda _: True).completed_at:
            most = max(most, served.context.admission.num_seqs)
        assert most == 6
        assert set(priorities) == {2**63 - 1}
        live = {"prompt": ["a"] * 8, "max_tokens": 100, "ignore_eos": True, "stream": True}
        with served.http.stream("POST", "/v1/completions", json=live) as stream:
            slowly(served, 0.03)
            waiting = create(client, lines(3))
            time.sleep(0.1)  # enough for it, if it were not to wait
            assert num_completed(client.batches.retrieve(waiting.id)) == 0
            assert served.context.admission.num_seqs == 8
            slowly(served, 0)
            stream.read()
        assert wait_for(client, waiting).status == "completed"
        served.wait_until_idle()


def test_a_full_queue_delays_a_batch_and_fails_none(tmp_path: Path) -> None:
    engine = {"max_num_seqs": 2}
    with serving(tmp_path, engine, max_num_queued_reqs=0) as served, client_of(served) as client:
        slowly(served, 0.005)
        batch = create(client, lines(6))
        for _ in range(10):
            served.complete(prompt=["a", "b"], max_tokens=20)  # some are refused
        ended = wait_for(client, batch)
        assert ended.error_file_id is None
        assert texts(answers(client, ended.output_file_id)) == expected(6)
        served.wait_until_idle()


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_batch_that_fails_leaves_its_sequences_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, {"max_num_seqs": 1}) as served, client_of(served) as client:
        with monkeypatch.context() as patch:
            patch.setattr(OutputFile, "add_response", full)
            ended = wait_for(client, create(client, lines(3)))  # the second waits for the first
        assert ended.errors is not None
        assert ended.errors.data is not None
        assert ended.errors.data[0].message == "No space left on device"
        assert wait_for(client, create(client, lines(2))).status == "completed"
        served.wait_until_idle()


def noted(tries: list[object]) -> Callable[..., Any]:
    """The end of a batch, which notes each try."""
    finish = BatchService._finish

    async def noting(*given: Any) -> None:
        tries.append(given)
        await finish(*given)

    return noting


@pytest.mark.parametrize(("retry", "status"), [(0.01, "completed"), (600, "cancelled")])
def test_a_full_disk_delays_the_end_of_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retry: float, status: str
) -> None:
    monkeypatch.setattr(service, "_RETRY", retry)
    with serving(tmp_path, {"max_num_seqs": 2}) as served, client_of(served) as client:
        slowly(served, 0.01)
        batch = create(client, lines(3))
        wait_for(client, batch, lambda now: num_completed(now) >= 1)
        tries: list[object] = []
        with monkeypatch.context() as patch:
            patch.setattr(records, "replace_file", full)
            patch.setattr(BatchService, "_finish", noted(tries))
            for _ in range(2):
                with pytest.raises(openai.InternalServerError):
                    client.batches.cancel(batch.id, extra_headers={"Connection": "close"})
            served.wait_until(lambda: len(tries) > 0)
            assert client.batches.retrieve(batch.id).status == "in_progress"
        if status == "cancelled":
            client.batches.cancel(batch.id)
        ended = wait_for(client, batch)
        assert ended.status == status
        assert texts(answers(client, ended.output_file_id)) == expected(3)
        served.wait_until_idle()


def test_a_client_that_reads_no_content_is_disconnected(tmp_path: Path) -> None:
    with serving(tmp_path, stall_timeout=0.5) as served, client_of(served) as client:
        file = upload(client, [b"x" * (10 << 20)])
        host, port = served.http.base_url.host, served.http.base_url.port
        with socket.create_connection((host, port or 0)) as connection:
            path = f"/v1/files/{file.id}/content"
            head = f"GET {path} HTTP/1.1\r\nHost: x\r\nX-API-Key: {KEYS[0]}\r\n\r\n"
            connection.sendall(head.encode())
            served.wait_until(lambda: served.context.num_open > 0)
            served.wait_until(lambda: served.context.num_open == 0)
        content = client.files.content(file.id).read()
        assert len(content) == file.bytes


def test_sizes_and_numbers_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path, max_batch_directory_bytes=3000) as served, client_of(served) as client:
        with pytest.raises(openai.BadRequestError, match="would have 3001 bytes; at most 3000"):
            upload(client, [b"x" * 3001])
        ended = wait_for(client, create(client, lines(12)))
        assert ended.status == "failed"
        assert ended.errors is not None
        assert ended.errors.data is not None
        assert "at most 3000 are accepted" in (ended.errors.data[0].message or "")
        found = texts(answers(client, ended.output_file_id))
        assert found.items() <= expected(12).items()
        for file in client.files.list():
            client.files.delete(file.id)
        monkeypatch.setattr(store, "MAX_FILES", 2)
        batch = wait_for(client, create(client, lines(1)))
        with pytest.raises(openai.BadRequestError, match="2 files are stored; at most 2 are"):
            upload(client, lines(1))
        again: Any = {"endpoint": "/v1/completions", "completion_window": "2d"}
        with pytest.raises(openai.BadRequestError, match="2 files are stored"):
            client.batches.create(input_file_id=batch.input_file_id, **again)
        assert batch.output_file_id is not None
        client.files.delete(batch.output_file_id)
        monkeypatch.setattr(service, "MAX_BATCHES", 2)
        second = client.batches.create(input_file_id=batch.input_file_id, **again)
        assert [each.id for each in client.batches.list()] == [second.id, batch.id]
        wait_for(client, second)
        served.wait_until_idle()


def test_many_batches_drop_the_oldest_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_BATCHES", 2)
    with serving(tmp_path) as served, client_of(served) as client:
        first = wait_for(client, create(client, lines(1)))
        slowly(served, 0.05)
        running = [create(client, lines(5)) for _ in range(2)]
        assert [each.id for each in client.batches.list()] == [each.id for each in running[::-1]]
        with pytest.raises(openai.NotFoundError):
            client.batches.retrieve(first.id)
        with pytest.raises(openai.InternalServerError, match="2 batches wait; at most 2"):
            create(client, lines(1))
        slowly(served, 0)
        for batch in running:
            assert wait_for(client, batch).status == "completed"
        served.wait_until_idle()


def test_a_directory_is_for_one_process(tmp_path: Path) -> None:
    directory = str(tmp_path / "a" / "b")
    args = ServerArgs(port=0, batch_directory=directory)
    with lock_directory(directory), pytest.raises(ConfigError, match="another process uses"):
        prepare(EngineArgs("/no/such/model"), args)
    prepared = prepare(EngineArgs("/no/such/model"), args)
    assert prepared.batch_lock is not None
    prepared.batch_lock.close()
    prepared.listener.socket.close()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"batch_directory: cannot use .*file"):
        lock_directory(str(tmp_path / "file"))


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"owner": "x", "record": {}}'])
def test_a_damaged_directory_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "batches").mkdir()
    (tmp_path / "batches" / "batch_0.json").write_text(content)
    with pytest.raises(ConfigError, match=r"batch_0\.json is none of a batch; restore or delete"):
        Records(tmp_path / "batches", BatchObject, "batch")
