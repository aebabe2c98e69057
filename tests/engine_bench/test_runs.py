"""Benchmarks of an engine with a tiny model: what they generate, and what they report."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from pagedserve import LLM, RequestOutput
from pagedserve.cli import main
from tests.support.tiny import VOCAB_SIZE, save_tiny_llama

PERCENTS = (10, 25, 50, 75, 90, 99)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[list[RequestOutput]]:
    """The outputs of each call of ``generate``."""
    found: list[list[RequestOutput]] = []
    generate = LLM.generate

    def kept(*given: Any, **named: Any) -> list[RequestOutput]:
        found.append(generate(*given, **named))
        return found[-1]

    monkeypatch.setattr(LLM, "generate", kept)
    return found


def bench(kind: str, model: Path, tmp_path: Path, *argv: str) -> dict[str, Any]:
    """The results that a benchmark writes."""
    file = tmp_path / "results" / "file.json"
    given = ("--model", str(model), "--backend", "native", "--output-json", str(file))
    assert main(["bench", kind, *given, *argv]) == 0
    results: dict[str, Any] = json.loads(file.read_text())
    return results


def check_percentiles(found: dict[str, float], samples: list[float]) -> None:
    expected = {str(percent): float(np.percentile(samples, percent)) for percent in PERCENTS}
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("is_beam_search", [False, True])
def test_latency_is_of_equal_batches_with_new_prompts(
    tiny: Path,
    tmp_path: Path,
    batches: list[list[RequestOutput]],
    capsys: pytest.CaptureFixture[str],
    is_beam_search: bool,
) -> None:
    sizes = ("--input-len", "7", "--output-len", "5", "--batch-size", "3", "--n", "2")
    times = ("--num-iters-warmup", "1", "--num-iters", "4")
    flag = ("--use-beam-search",) if is_beam_search else ("--disable-detokenize",)
    results = bench("latency", tiny, tmp_path, *sizes, *times, *flag)
    assert results.keys() == {"model_id", "avg_latency", "latencies", "percentiles"}
    assert results["model_id"] == str(tiny)
    assert len(results["latencies"]) == 4
    assert results["avg_latency"] == pytest.approx(sum(results["latencies"]) / 4)
    check_percentiles(results["percentiles"], results["latencies"])
    assert [len(batch) for batch in batches] == [3] * 5
    outputs = [output for batch in batches for output in batch]
    assert {len(output.prompt_token_ids) for output in outputs} == {7}
    assert {len(each.token_ids) for output in outputs for each in output.outputs} == {5}
    assert {len(output.outputs) for output in outputs} == {2}
    assert len({tuple(output.prompt_token_ids) for output in outputs}) == 15
    texts = {each.text for output in outputs for each in output.outputs}
    assert (texts == {""}) != is_beam_search
    out = capsys.readouterr().out
    assert "Avg latency: " in out
    assert "99% percentile latency: " in out


def test_throughput_counts_what_was_generated(
    tiny: Path,
    tmp_path: Path,
    batches: list[list[RequestOutput]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = ("--random-input-len", "20", "--output-len", "10", "--random-range-ratio", "0.5")
    more = ("--prefix-len", "4", "--n", "2", "--num-prompts", "16", "--num-warmups", "3")
    results = bench("throughput", tiny, tmp_path, *sizes, *more)
    warmups, measured = batches
    assert (len(warmups), len(measured)) == (3, 16)
    num_input = sum(len(output.prompt_token_ids) for output in measured)
    num_output = sum(len(each.token_ids) for output in measured for each in output.outputs)
    seconds = results["elapsed_time"]
    assert results == {
        "model_id": str(tiny),
        "elapsed_time": seconds,
        "num_requests": 16,
        "total_num_tokens": num_input + num_output,
        "requests_per_second": pytest.approx(16 / seconds),
        "tokens_per_second": pytest.approx((num_input + num_output) / seconds),
    }
    lengths = {len(output.prompt_token_ids) for output in measured}
    assert lengths <= {*range(14, 35)}
    assert len(lengths) > 3
    prefixes = {tuple(output.prompt_token_ids[:4]) for output in measured}
    assert len(prefixes) == 1
    assert all(max(output.prompt_token_ids) < VOCAB_SIZE for output in measured)
    out = capsys.readouterr().out
    assert f"Total num prompt tokens:  {num_input}\n" in out
    assert f"Total num output tokens:  {num_output}\n" in out


def test_a_seed_repeats_the_requests(
    tiny: Path, tmp_path: Path, batches: list[list[RequestOutput]]
) -> None:
    for seed in ("1", "1", "2"):
        sizes = ("--input-len", "5", "--output-len", "3", "--num-prompts", "2")
        bench("throughput", tiny, tmp_path, *sizes, "--seed", seed)
    first, second, other = [[output.prompt_token_ids for output in batch] for batch in batches]
    assert first == second != other


CONVERSATIONS = [
    {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}
    for question, answer in [
        ("What is the capital of France?", "The capital of France is Paris."),
        ("Please count from one to five.", "One, two, three, four, five, and so on."),
        ("Why is the sky blue in the day?", "Short light waves are scattered more."),
    ]
]
LEFT_OUT = [
    {"conversations": [{"from": "human", "value": "One turn alone, which has no answer."}]},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "a b c d e f"}]},
    {"conversations": [{"from": "human", "value": "a b c d e f"}, {"from": "gpt", "value": "Hi"}]},
    {"conversations": [{"value": "a b c d e"}, {"value": "long " * 2048}]},
    {"id": "none"},
    [],
]


def sharegpt_file(tmp_path: Path, suffix: str) -> Path:
    path = tmp_path / f"sharegpt{suffix}"
    records = [*LEFT_OUT[:3], *CONVERSATIONS, *LEFT_OUT[3:5]]
    whole = json.dumps([*records, *LEFT_OUT[5:]])
    path.write_text(whole if suffix == ".json" else "\n".join(map(json.dumps, records)))
    return path


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_conversations_give_prompts_and_lengths(
    stand_in: Path,
    real_tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    batches: list[list[RequestOutput]],
    suffix: str,
) -> None:
    path = sharegpt_file(tmp_path, suffix)
    results = bench("throughput", stand_in, tmp_path, "--dataset-path", str(path))
    turns = [
        [real_tokenizer(turn["value"]).input_ids for turn in record["conversations"]]
        for record in CONVERSATIONS
    ]
    expected = Counter((tuple(question), len(answer)) for question, answer in turns)
    found = Counter(
        (tuple(output.prompt_token_ids), len(output.outputs[0].token_ids)) for output in batches[0]
    )
    assert found == expected
    assert results["num_requests"] == 3


def test_a_file_with_fewer_conversations_says_so(
    stand_in: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--dataset-path", str(sharegpt_file(tmp_path, ".json")), "--num-prompts", "4")
    assert bench("throughput", stand_in, tmp_path, *given)["num_requests"] == 3
    assert "has 3 requests, fewer than --num-prompts" in capsys.readouterr().err


def test_an_output_length_is_that_of_all_conversations(
    stand_in: Path, tmp_path: Path, batches: list[list[RequestOutput]]
) -> None:
    path = sharegpt_file(tmp_path, ".json")
    given = ("--dataset-name", "sharegpt", "--dataset-path", str(path), "--num-prompts", "2")
    bench("throughput", stand_in, tmp_path, *given, "--output-len", "3")
    assert [len(output.outputs[0].token_ids) for output in batches[0]] == [3, 3]


SURROGATE = [{"conversations": [{"value": "a \ud800"}, {"value": "b"}]}]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON: maximum recursion depth"),
        ("\ufeff{}", "is no list of conversations"),
        (json.dumps(SURROGATE), "is no valid Unicode text: surrogates not allowed"),
        (json.dumps(LEFT_OUT), "has no conversation of 4 tokens or more"),
        (None, "cannot read --dataset-path"),
    ],
)
def test_bad_conversations_are_refused(
    stand_in: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str | None,
    words: str,
) -> None:
    path = tmp_path / "sharegpt.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    given = ("--model", str(stand_in), "--backend", "native", "--dataset-path", str(path))
    assert main(["bench", "throughput", *given]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["latency", "throughput"])
def test_what_exceeds_the_models_length_is_refused(
    tiny: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    given = ("--model", str(tiny), "--backend", "native")
    assert main(["bench", kind, *given, "--input-len", "120", "--output-len", "9"]) == 2
    words = "a request has 120 input and 9 output tokens; together they must be at most"
    assert words in capsys.readouterr().err


def test_startup_measures_cold_starts_and_warm_ones(tiny: Path, tmp_path: Path) -> None:
    times = ("--num-iters-cold", "2", "--num-iters-warmup", "0", "--num-iters-warm", "1")
    results = bench("startup", tiny, tmp_path, *times)
    expected = {
        f"{before}{phase}_{name}_{after}"
        for phase in ("cold", "warm")
        for name in ("startup", "compilation")
        for before, after in (("avg_", "time"), ("", "times"), ("", "percentiles"))
    }
    assert results.keys() == expected
    assert len(results["cold_startup_times"]) == 2
    assert len(results["warm_startup_times"]) == 1
    assert min(results["cold_startup_times"] + results["warm_startup_times"]) > 0
    check_percentiles(results["cold_startup_percentiles"], results["cold_startup_times"])
    assert results["warm_compilation_times"] == [0.0]


def test_an_error_of_a_start_is_reported(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--model", str(tiny), "--backend", "native", "--max-model-len", "100000")
    assert main(["bench", "startup", *given]) == 2
    assert "max_model_len is 100000" in capsys.readouterr().err
