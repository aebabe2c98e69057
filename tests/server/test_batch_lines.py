"""Lines of the input and of the output, without a model."""

import asyncio
import fcntl
import json
import os
from pathlib import Path

import pytest

from pagedserve.errors import ConfigError
from pagedserve.server.batches.input_file import MAX_LINE_BYTES, BatchLine, InputFile, input_file
from pagedserve.server.batches.output_file import OutputFile, divide, output_file
from pagedserve.server.batches.requests import BatchRequest, LineError, RequestReader
from pagedserve.server.http.apis import OPENAI
from pagedserve.server.http.errors import ServerError

URLS = ("/v1/completions", "/v1/embeddings")
GOOD = {"custom_id": "a", "method": "POST", "url": URLS[0], "body": {"prompt": "x"}}


def lines_of(path: Path) -> list[BatchLine]:
    async def read(opened: InputFile) -> list[BatchLine]:
        return [line async for line in opened.lines()]

    with input_file(str(path)) as opened:
        return asyncio.run(read(opened))


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_lines_are_numbered_and_counted(tmp_path: Path, end: bytes) -> None:
    file = tmp_path / "in"
    contents = [b"one", b"", "drei \u2028 \u0085".encode(), b"x" * (3 << 20), b"five"]
    file.write_bytes(b"\n".join(contents) + end)
    assert lines_of(file) == [BatchLine(*pair) for pair in enumerate(contents, start=1)]
    with input_file(str(file)) as opened:
        assert opened.num_lines == 5


def test_no_line_is_kept_beyond_the_bound(tmp_path: Path) -> None:
    file = tmp_path / "in"
    file.write_bytes(b"x" * (MAX_LINE_BYTES + 5_000_000) + b"\nlast\n")
    first, last = lines_of(file)
    assert len(first.content) == MAX_LINE_BYTES + 1
    assert last == BatchLine(2, b"last")
    with pytest.raises(LineError, match=f"at most {MAX_LINE_BYTES} bytes"):
        RequestReader(URLS).read(first)


def test_lines_of_a_pipe_come_before_its_end() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"one\ntwo\nhal")

    async def first_two(opened: InputFile) -> list[BatchLine]:
        lines = opened.lines()
        found = [await anext(lines), await anext(lines)]
        await lines.aclose()
        return found

    with input_file(f"/dev/fd/{reading}") as opened:
        assert opened.num_lines is None
        assert asyncio.run(first_two(opened)) == [BatchLine(1, b"one"), BatchLine(2, b"two")]
    os.close(writing)
    os.close(reading)


@pytest.mark.parametrize(
    ("line", "code", "custom_id", "message"),
    [
        (b"{", "invalid_json_line", None, "the line is no JSON"),
        (b"\xff\xfe{}", "invalid_json_line", None, "the line is no JSON"),
        (b"[" * 100_000, "invalid_json_line", None, "the line is no JSON"),
        (b"[1]", "invalid_json_line", None, "no JSON object"),
        (b'{"a": NaN}', "invalid_json_line", None, "the line is no JSON"),
        ({"custom_id": None}, "invalid_custom_id", None, "custom_id is missing"),
        ({"custom_id": 5}, "invalid_custom_id", None, "custom_id is 5; it must be a string"),
        ({"custom_id": "first"}, "duplicate_custom_id", None, "'first', that of an earlier line"),
        ({"method": "GET"}, "invalid_method", "a", "method is 'GET'; it must be 'POST'"),
        ({"url": "/v1/x"}, "invalid_url", "a", "accepted are /v1/completions, /v1/embeddings"),
        ({"url": []}, "invalid_url", "a", "accepted are /v1/completions, /v1/embeddings"),
        ({"body": None}, "invalid_body", "a", "body is None; it must be a JSON object"),
    ],
)
def test_what_is_no_request(
    line: bytes | dict[str, object], code: str, custom_id: str | None, message: str
) -> None:
    reader = RequestReader(URLS)
    reader.read(BatchLine(1, json.dumps(GOOD | {"custom_id": "first"}).encode()))
    content = line if isinstance(line, bytes) else json.dumps(GOOD | line).encode()
    with pytest.raises(LineError) as raised:
        reader.read(BatchLine(2, content))
    assert (raised.value.code, raised.value.custom_id) == (code, custom_id)
    assert message in str(raised.value)


# Ids that must survive escaping.
IDS = ("a", 'qu"ote\\', "new\nline", "\u2028", "\ud800", "")


def write(path: Path, source: Path, custom_ids: tuple[str, ...]) -> OutputFile:
    with source.open("rb") as file, output_file(str(path), file) as output:
        for number, custom_id in enumerate(custom_ids, start=1):
            line = BatchLine(number, b"")
            if not output.has(line, custom_id):
                request = BatchRequest(line, custom_id, URLS[0], {})
                if number % 2:
                    output.add_response(request, "b" * 32, b'{"choices": []}')
                else:
                    error = ServerError(404, 'no "x"')
                    output.add_refusal(request, "b" * 32, error, OPENAI.error(error, "b" * 32))
        return output


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "in.jsonl"
    file.touch()
    return file


@pytest.mark.parametrize("num_cut", [1, 2, 30, 90])
def test_a_torn_last_line_is_cut_off_and_written_again(
    tmp_path: Path, source: Path, num_cut: int
) -> None:
    path = tmp_path / "out.jsonl"
    write(path, source, IDS)
    whole = path.read_bytes()
    os.truncate(path, len(whole) - num_cut)
    output = write(path, source, IDS)
    assert path.read_bytes() == whole
    assert output.was_torn
    assert (output.num_lines, output.num_errors) == (len(IDS), len(IDS) // 2)
    assert [json.loads(line)["custom_id"] for line in whole.splitlines()] == list(IDS)
    assert not write(path, source, IDS).was_torn


def test_a_torn_last_line_is_divided_from_none(tmp_path: Path, source: Path) -> None:
    path, good, bad = (tmp_path / name for name in ("out.jsonl", "good", "bad"))
    write(path, source, IDS)
    os.truncate(path, path.stat().st_size - 1)
    assert divide(path, good, bad) == (len(IDS) // 2, len(IDS) // 2 - 1)
    assert all(each.read_bytes().endswith(b"}\n") for each in (good, bad))


def test_outputs_that_cannot_be_written_are_deleted(tmp_path: Path, source: Path) -> None:
    path, good = tmp_path / "out.jsonl", tmp_path / "good"
    write(path, source, IDS)
    with pytest.raises(OSError, match="Is a directory"):
        divide(path, good, tmp_path)
    assert not good.exists()


def test_a_line_without_an_id_is_known_by_its_number(tmp_path: Path, source: Path) -> None:
    path = tmp_path / "out.jsonl"
    with source.open("rb") as file, output_file(str(path), file) as output:
        output.add_error(BatchLine(7, b""), LineError("invalid_json_line", "none"))
    with source.open("rb") as file, output_file(str(path), file) as output:
        assert output.has(BatchLine(7, b""), None)
        assert not output.has(BatchLine(8, b""), None)
    assert json.loads(path.read_bytes()) == {
        "id": "batch_req_7",
        "custom_id": None,
        "response": None,
        "error": {"code": "invalid_json_line", "message": "none"},
    }


@pytest.mark.parametrize(
    "content", [b"some notes", b"some notes\n", b'{"id": "batch_req_1"}\n', b"\n"]
)
def test_a_file_of_others_is_refused_and_left_alone(
    tmp_path: Path, source: Path, content: bytes
) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"line 1 of .*out\.jsonl is none that run-batch writes"):
        write(path, source, IDS)
    assert path.read_bytes() == content


def test_files_that_cannot_be_used_are_named(tmp_path: Path, source: Path) -> None:
    (tmp_path / "link").hardlink_to(source)
    os.mkfifo(tmp_path / "pipe")
    expected = {
        tmp_path: "Is a directory",
        tmp_path / "none" / "out": "No such file or directory",
        source: "is the input file",
        tmp_path / "link": "is the input file",
        tmp_path / "pipe": "is no regular file",
        Path("/dev/null"): "is no regular file",
    }
    for path, reason in expected.items():
        with pytest.raises(ConfigError, match=f"output_file: .*{path}.*{reason}"):
            write(path, source, IDS)
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match=f"input_file: cannot read {path}"):
            lines_of(path)


def test_a_file_is_written_by_one_run_at_a_time(tmp_path: Path, source: Path) -> None:
    path = tmp_path / "out.jsonl"
    with path.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)  # of a second open file, as in another process
        with pytest.raises(ConfigError, match="another process writes"):
            write(path, source, IDS)
    assert write(path, source, IDS).num_lines == len(IDS)
