"""Requests of offline benchmarks, and one batch of them."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pagedserve.bench.files import read_records
from pagedserve.bench.prompts import length_around, random_token_ids
from pagedserve.engine_bench.options import ThroughputOptions
from pagedserve.errors import ConfigError, RequestError
from pagedserve.inputs import TokensPrompt
from pagedserve.inputs.prompts import check_unicode
from pagedserve.llm import LLM
from pagedserve.outputs import RequestOutput
from pagedserve.sampling_params import SamplingParams

_RANDOM_INPUT_LEN = 1024
_RANDOM_OUTPUT_LEN = 128
# Conversations outside these bounds are left out, as vLLM does.
_MIN_LEN = 4
_MAX_INPUT_LEN = 1024
_MAX_TOTAL_LEN = 2048


@dataclass(frozen=True, slots=True)
class OfflineRequest:
    """A prompt, and how much is generated from it.

    Attributes:
        token_ids: Token ids of the prompt.
        num_output_tokens: Tokens of each output: EOS does not end it.
    """

    token_ids: list[int]
    num_output_tokens: int


def check_length(llm: LLM, num_input_tokens: int, num_output_tokens: int) -> None:
    """Refuse a request that the model's length would cut short.

    Raises:
        ConfigError: Prompt and output together have more tokens than ``max_model_len``.
    """
    most = llm.llm_engine.max_model_len
    if num_input_tokens + num_output_tokens > most:
        raise ConfigError(
            f"a request has {num_input_tokens} input and {num_output_tokens} output tokens; "
            f"together they must be at most max_model_len, {most}"
        )


def random_requests(
    llm: LLM, options: ThroughputOptions, num_requests: int, rng: np.random.Generator
) -> Iterator[OfflineRequest]:
    """Requests of random token ids."""
    vocab_size = llm.llm_engine.input_processor.model.vocab_size
    ratio = options.random_range_ratio or 0.0
    prefix = random_token_ids(options.prefix_len or 0, vocab_size=vocab_size, rng=rng)
    for _ in range(num_requests):
        num_input = length_around(options.input_len or _RANDOM_INPUT_LEN, ratio, rng)
        num_output = length_around(options.output_len or _RANDOM_OUTPUT_LEN, ratio, rng)
        token_ids = random_token_ids(num_input, vocab_size=vocab_size, rng=rng)
        yield OfflineRequest([*prefix.tolist(), *token_ids.tolist()], num_output)


def sharegpt_requests(
    llm: LLM, options: ThroughputOptions, num_requests: int, rng: np.random.Generator
) -> Iterator[OfflineRequest]:
    """Requests of the first turns of conversations, in random order.

    Raises:
        RequestError: The file is invalid, or a turn is no valid Unicode.
    """
    path, encode = options.dataset_file(), llm.get_tokenizer()
    conversations = [turns for record in _records(path) if (turns := _first_turns(record))]
    num_found = 0
    for index in rng.permutation(len(conversations)).tolist():
        if num_found == num_requests:
            return
        question, answer = conversations[index]
        check_unicode(question + answer, f"a turn of --dataset-path {path}")
        token_ids = list(encode(question).input_ids)
        num_output = options.output_len or len(encode(answer).input_ids)
        is_short = options.output_len is None and num_output < _MIN_LEN
        is_long = len(token_ids) > _MAX_INPUT_LEN or len(token_ids) + num_output > _MAX_TOTAL_LEN
        if len(token_ids) >= _MIN_LEN and not (is_short or is_long):
            num_found += 1
            yield OfflineRequest(token_ids, num_output)
    if not num_found:
        raise RequestError(
            f"--dataset-path {path} has no conversation of {_MIN_LEN} tokens or more"
        )


def _records(path: Path) -> Sequence[Any]:
    """Records of JSON lines, or of a list in a file that ends in .json, as ShareGPT's is."""
    if path.suffix != ".json":
        return list(read_records(path))
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise RequestError(f"cannot read --dataset-path {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"--dataset-path {path} is no JSON: {error}") from error
    if not isinstance(found, list):
        raise RequestError(f"--dataset-path {path} is no list of conversations")
    return found


def _first_turns(record: Any) -> tuple[str, str] | None:
    """Texts of the first two turns of a conversation; None if it has fewer."""
    turns = record.get("conversations") if isinstance(record, dict) else None
    first = turns[:2] if isinstance(turns, list) else []
    texts = [turn.get("value") for turn in first if isinstance(turn, dict)]
    match texts:
        case [str(question), str(answer)]:
            return question, answer
    return None


def timed_batch(
    llm: LLM,
    requests: Sequence[OfflineRequest],
    *,
    n: int,
    detokenize: bool,
    use_tqdm: bool,
) -> tuple[float, list[RequestOutput]]:
    """Generate from all requests in one batch.

    Args:
        llm: The model.
        requests: The requests.
        n: Outputs per prompt.
        detokenize: Whether outputs have text.
        use_tqdm: Whether a progress bar is shown.

    Returns:
        Seconds, and the outputs in the order of the requests.
    """
    prompts = [TokensPrompt(prompt_token_ids=request.token_ids) for request in requests]
    params = [
        SamplingParams(
            n=n,
            temperature=1.0,
            ignore_eos=True,
            max_tokens=request.num_output_tokens,
            detokenize=detokenize,
        )
        for request in requests
    ]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=use_tqdm)
    return time.perf_counter() - started, outputs
