import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from pagedserve.bench.load import Load, make_load, warmup_requests
from pagedserve.errors import ConfigError, RequestError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:18:04.4799600,110,27
"""
MOONCAKE_ROW = '{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": %s}'
VIDUR = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772,54,3826,69.85\n"


@pytest.fixture
def load_of(make_options: Callable[..., Any]) -> Callable[..., Load]:
    return lambda *argv: make_load(make_options(*argv))


def mooncake(path: Path, *rows: tuple[int, int, int, list[int]]) -> Path:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    lines = "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)
    path.write_bytes(gzip.compress(lines.encode()))
    return path


def traced(path: Path, *more: object) -> tuple[object, ...]:
    return ("--dataset-name", "trace", "--dataset-path", path, *more)


def custom(path: Path, *records: object) -> tuple[object, ...]:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return ("--dataset-name", "custom", "--dataset-path", path)


def common_prefix(first: Any, second: Any) -> int:
    length = min(len(first), len(second))
    differ = np.asarray(first[:length]) != np.asarray(second[:length])
    return int(differ.argmax()) if differ.any() else length


def test_random_prompts_have_the_lengths_that_were_asked_for(load_of: Callable[..., Load]) -> None:
    load = load_of("--num-prompts", 50, "--random-input-len", 20, "--vocab-size", 1000)
    assert len(load.requests) == 50
    assert {len(request.prompt) for request in load.requests} == {20}
    assert {request.num_input_tokens for request in load.requests} == {20}
    assert {request.num_output_tokens for request in load.requests} == {128}
    ids = np.concatenate([request.prompt for request in load.requests])
    assert ids.min() >= 0
    assert ids.max() < 1000
    assert len(np.unique(ids)) > 500
    assert (load.due_s, load.is_timed) == ([0.0] * 50, False)


def test_lengths_vary_by_the_range_ratio(load_of: Callable[..., Load]) -> None:
    load = load_of(
        *("--num-prompts", 400, "--random-range-ratio", 0.5),
        *("--random-input-len", 20, "--random-output-len", 10),
    )
    assert {request.num_input_tokens for request in load.requests} == set(range(10, 31))
    assert {request.num_output_tokens for request in load.requests} == set(range(5, 16))
    assert all(len(request.prompt) == request.num_input_tokens for request in load.requests)


def test_a_seed_decides_all_and_no_two_prompts_begin_alike(load_of: Callable[..., Load]) -> None:
    argv = ("--num-prompts", 30, "--random-range-ratio", 0.3, "--request-rate", 5)
    first, again, other = load_of(*argv), load_of(*argv), load_of(*argv, "--seed", 1)
    assert first == again
    assert first != other
    starts = {tuple(request.prompt[:4]) for load in (first, other) for request in load.requests}
    assert len(starts) == 60


def test_a_rate_shifts_no_prompt(load_of: Callable[..., Load]) -> None:
    plain, timed = load_of("--num-prompts", 9), load_of("--num-prompts", 9, "--request-rate", 3)
    assert plain.requests == timed.requests
    assert timed.is_timed
    assert timed.due_s[-1] == pytest.approx(3.0)
    assert timed.due_s == sorted(timed.due_s)


def test_a_prefix_stands_before_every_prompt(load_of: Callable[..., Load]) -> None:
    load = load_of("--num-prompts", 5, "--random-input-len", 30, "--random-prefix-len", 40).requests
    assert {len(request.prompt) for request in load} == {70}
    assert {common_prefix(load[0].prompt, request.prompt) for request in load[1:]} == {40}


def test_chat_gets_words(load_of: Callable[..., Load]) -> None:
    load = load_of("--backend", "openai-chat", "--num-prompts", 3, "--random-input-len", 12)
    for request in load.requests:
        assert isinstance(request.prompt, str)
        assert len(request.prompt.split()) == request.num_input_tokens == 12


def test_warm_ups_have_the_same_sizes_and_other_prompts(make_options: Callable[..., Any]) -> None:
    options = make_options("--num-prompts", 5, "--num-warmups", 3, "--random-range-ratio", 0.5)
    load = make_load(options)
    warmups = warmup_requests(options, load)
    assert [(request.num_input_tokens, request.num_output_tokens) for request in warmups] == [
        (request.num_input_tokens, request.num_output_tokens) for request in load.requests[:3]
    ]
    assert not any(
        warm.prompt[:3] == request.prompt[:3] for warm in warmups for request in load.requests
    )


def test_custom_files_hold_texts_token_ids_and_lengths(
    load_of: Callable[..., Load], tmp_path: Path
) -> None:
    records = ({"prompt": "one two three"}, {"prompt": [5, 6], "output_tokens": 9})
    argv = custom(tmp_path / "load.jsonl", *records)
    load = load_of(*argv, "--custom-output-len", 33)
    assert [request.prompt for request in load.requests] == ["one two three", [5, 6]]
    assert [request.num_input_tokens for request in load.requests] == [3, 2]
    assert [request.num_output_tokens for request in load.requests] == [33, 9]
    assert len(load_of(*argv, "--num-prompts", 1).requests) == 1


def test_custom_files_hold_conversations(load_of: Callable[..., Load], tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "why is it"}, {"role": "assistant", "content": "so"}]
    argv = custom(tmp_path / "load.jsonl", {"messages": messages})
    (request,) = load_of(*argv, "--backend", "openai-chat").requests
    assert (request.prompt, request.num_input_tokens) == (messages, 4)
    with pytest.raises(RequestError, match="takes no messages; openai-chat does"):
        load_of(*argv)


TURNS = ("What is the capital of France?", "It is Paris, on the Seine.")
CONVERSATIONS = [{"conversations": [{"value": turn} for turn in TURNS]}, {"conversations": []}]


def sharegpt(path: Path, *more: object) -> tuple[object, ...]:
    path.write_text(json.dumps(CONVERSATIONS), encoding="utf-8")
    return ("--dataset-name", "sharegpt", "--dataset-path", path, *more)


def test_sharegpt_gives_texts_and_the_lengths_of_answers(
    load_of: Callable[..., Load], tmp_path: Path
) -> None:
    path = tmp_path / "sharegpt.json"
    (request,) = load_of(*sharegpt(path)).requests
    assert (request.prompt, request.num_input_tokens, request.num_output_tokens) == (TURNS[0], 6, 6)
    (request,) = load_of(*sharegpt(path, "--sharegpt-output-len", 3)).requests
    assert request.num_output_tokens == 3


def test_a_tokenizer_counts_the_tokens_of_sharegpt(
    load_of: Callable[..., Load], tmp_path: Path
) -> None:
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    argv = sharegpt(tmp_path / "sharegpt.json", "--tokenizer", tmp_path)
    (request,) = load_of(*argv).requests
    lengths = (request.num_input_tokens, request.num_output_tokens)
    assert lengths == (len(TURNS[0]), len(TURNS[1]))
    with pytest.raises(ConfigError, match=r"--tokenizer .* cannot be loaded"):
        load_of(*sharegpt(tmp_path / "sharegpt.json", "--tokenizer", tmp_path.parent))


def test_one_length_is_that_of_every_dataset(load_of: Callable[..., Load], tmp_path: Path) -> None:
    lengths = ("--input-len", 7, "--output-len", 5)
    files = (
        ("--num-prompts", 1),
        custom(tmp_path / "load.jsonl", {"prompt": "one two"}),
        sharegpt(tmp_path / "sharegpt.json"),
    )
    requests = [load_of(*lengths, *argv).requests[0] for argv in files]
    assert [request.num_input_tokens for request in requests] == [7, 2, 6]
    assert [request.num_output_tokens for request in requests] == [5, 5, 5]


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([], "has no requests"),
        ([{"text": "a"}], 'request 1: it has neither a "prompt"'),
        ([{"prompt": "a"}, {"prompt": []}], "request 2: it has neither"),
        ([{"prompt": "a", "output_tokens": 0}], '"output_tokens" are 0'),
        (["a"], "line 1 is no JSON object"),
    ],
)
def test_a_bad_custom_file_is_refused_by_its_line(
    load_of: Callable[..., Load], tmp_path: Path, records: list[object], words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        load_of(*custom(tmp_path / "load.jsonl", *records))


def test_an_azure_trace_gives_lengths_and_times(
    load_of: Callable[..., Load], tmp_path: Path
) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE, encoding="utf-8")
    load = load_of(*traced(path, "--num-prompts", 2))
    assert [request.num_input_tokens for request in load.requests] == [4808, 3180]
    assert [request.num_output_tokens for request in load.requests] == [10, 8]
    assert load.due_s == pytest.approx([0.0, 0.052])
    scaled = load_of(*traced(path, "--trace-time-scale", 0.5, "--trace-length-scale", 0.01))
    assert scaled.due_s == pytest.approx([0.0, 0.026, 30.25])
    assert [len(request.prompt) for request in scaled.requests] == [48, 32, 1]
    assert [request.num_output_tokens for request in scaled.requests] == [1, 1, 1]


def test_a_rate_takes_the_place_of_a_trace_s_times(
    load_of: Callable[..., Load], tmp_path: Path
) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE, encoding="utf-8")
    assert load_of(*traced(path, "--request-rate", "inf")).due_s == [0.0, 0.0, 0.0]
    assert load_of(*traced(path, "--request-rate", 1)).due_s[-1] == pytest.approx(3.0)


def test_a_trace_without_times_is_sent_at_once(
    load_of: Callable[..., Load], tmp_path: Path
) -> None:
    path = tmp_path / "lengths.csv.gz"
    path.write_bytes(gzip.compress(VIDUR.encode()))
    load = load_of(*traced(path))
    assert [(request.num_input_tokens, request.num_output_tokens) for request in load.requests] == [
        (3772, 54)
    ]
    assert (load.due_s, load.is_timed) == ([0.0], False)


def test_a_mooncake_trace_shares_its_prefixes(load_of: Callable[..., Load], tmp_path: Path) -> None:
    path = mooncake(
        tmp_path / "trace.jsonl.gz",
        (0, 1300, 5, [0, 1, 2]),
        (0, 1500, 6, [0, 1, 3]),
        (5000, 20, 8, [5]),
        (2500, 600, 7, [4, 1]),
    )
    load = load_of(*traced(path))
    assert load.due_s == pytest.approx([0.0, 0.0, 2.5, 5.0])
    prompts = [request.prompt for request in load.requests]
    assert [len(prompt) for prompt in prompts] == [1300, 1500, 600, 20]
    assert common_prefix(prompts[0], prompts[1]) == 1024
    assert common_prefix(prompts[0], prompts[2]) == 0
    assert prompts[0][512:600] == prompts[2][512:]
    scaled = load_of(*traced(path, "--trace-length-scale", 0.1)).requests
    assert [len(request.prompt) for request in scaled] == [130, 150, 60, 2]
    assert common_prefix(scaled[0].prompt, scaled[1].prompt) == 102


def test_a_prompt_is_as_long_as_its_trace_says_whatever_its_blocks_hold(
    load_of: Callable[..., Load], tmp_path: Path
) -> None:
    path = mooncake(tmp_path / "trace.jsonl.gz", (0, 1300, 5, [0, 1, 2]), (0, 1300, 5, [0, 1, 2]))
    first, second = load_of(*traced(path, "--trace-block-size", 16)).requests
    assert len(first.prompt) == len(second.prompt) == 1300
    assert common_prefix(first.prompt, second.prompt) == 48


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", "", "neither .csv nor .jsonl"),
        ("a.csv", "a,b\n1,2\n", "has the columns a, b; known are Azure"),
        ("a.csv", "\ufeffa,b\n1,2\n", "has the columns a, b; known are Azure"),
        ("a.csv", "a,b\n1,2\n1,2,3\n", "request 2 has more fields than the header has columns"),
        ("a.csv", "ContextTokens,GeneratedTokens,TIMESTAMP\n5,x,2023-01-01\n", "request 1: "),
        ("a.csv", "ContextTokens,GeneratedTokens,TIMESTAMP\n", "has no requests"),
        ("a.jsonl", '{"timestamp": 0, "input_length": 5}', "known are Azure"),
        ("a.jsonl", MOONCAKE_ROW % "[0, -1]", "request 1: .*block ids are integers"),
        ("a.jsonl", MOONCAKE_ROW % "3", "request 1: "),
        ("a.jsonl", "{", "line 1: "),
        ("a.jsonl", "[" * 100_000, "line 1: maximum recursion depth"),
        ("a.jsonl", "9" * 5000, "line 1: Exceeds the limit"),
        ("a.csv.gz", "not gzipped", "cannot read --dataset-path"),
        (None, "", "cannot read --dataset-path"),
    ],
)
def test_a_bad_trace_is_refused(
    load_of: Callable[..., Load], tmp_path: Path, name: str | None, content: str, words: str
) -> None:
    path = tmp_path / (name or "absent.csv")
    if name is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(RequestError, match=words):
        load_of(*traced(path))


def test_a_damaged_gzip_file_is_refused(load_of: Callable[..., Load], tmp_path: Path) -> None:
    path = tmp_path / "a.csv.gz"
    content = bytearray(gzip.compress(AZURE.encode() * 100))
    content[20:40] = b"\xff" * 20
    path.write_bytes(content)
    with pytest.raises(RequestError, match="is damaged: Error -3 while decompressing"):
        load_of(*traced(path))
