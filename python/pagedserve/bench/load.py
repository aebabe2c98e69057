"""Load of a run: prompts, output lengths, and the send time of each request."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from pagedserve.bench.api import APIS, Prompt
from pagedserve.bench.arrivals import arrival_times
from pagedserve.bench.conversations import sample_conversations
from pagedserve.bench.files import Record, read_records
from pagedserve.bench.options import BenchOptions
from pagedserve.bench.prompts import (
    TokenIds,
    block_token_ids,
    length_around,
    random_token_ids,
    words,
)
from pagedserve.bench.trace import TraceRow, read_trace
from pagedserve.errors import ConfigError, RequestError, extra_needed

# Separate random streams of one seed: each is independent of how much others draw.
_LENGTHS, _PROMPTS, _BLOCKS, _ARRIVALS, _WARMUPS = range(5)


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a run.

    Attributes:
        prompt: Prompt for the endpoint.
        num_input_tokens: Tokens of the prompt; for a text without a tokenizer its words.
        num_output_tokens: Maximum tokens of the output.
    """

    prompt: Prompt
    num_input_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """All requests of a run.

    Attributes:
        requests: Requests in the order of sending.
        due_s: Send time of each, in seconds from the start.
        is_timed: Whether they have different send times; else all are sent at the start.
    """

    requests: list[BenchRequest]
    due_s: list[float]
    is_timed: bool


def make_load(options: BenchOptions) -> Load:
    """Create the requests for the options, fewer if a file has fewer.

    Raises:
        ConfigError: The tokenizer cannot be loaded.
        RequestError: A file is invalid.
    """
    if options.dataset_name == "trace":
        return _trace_load(options)
    return _with_rate(options, list(_REQUESTS[options.dataset_name](options)))


def warmup_requests(options: BenchOptions, load: Load) -> list[BenchRequest]:
    """Requests of the sizes of the first ones, with other prompts, to leave prefix caches cold."""
    rng = _rng(options, _WARMUPS)
    return [
        _made_up(options, _random_ids(options, like.num_input_tokens, rng), like.num_output_tokens)
        for like in islice(cycle(load.requests), options.num_warmups)
    ]


def _rng(options: BenchOptions, stream: int) -> np.random.Generator:
    return np.random.default_rng([options.seed, stream])


def _random_ids(options: BenchOptions, num_tokens: int, rng: np.random.Generator) -> TokenIds:
    return random_token_ids(num_tokens, vocab_size=options.vocab_size, rng=rng)


def _made_up(options: BenchOptions, token_ids: TokenIds, num_output_tokens: int) -> BenchRequest:
    """A request with random token ids, or with as many words if the endpoint takes text."""
    takes_ids = APIS[options.backend].takes_token_ids
    prompt = array("q", token_ids.tolist()) if takes_ids else words(token_ids)
    return BenchRequest(prompt, len(token_ids), num_output_tokens)


def _with_rate(options: BenchOptions, requests: list[BenchRequest]) -> Load:
    """Schedule the requests at the rate of the options, or all at once."""
    rate = options.finite_rate()
    if rate is None:
        return Load(requests, [0.0] * len(requests), is_timed=False)
    due_s = arrival_times(
        len(requests), rate=rate, burstiness=options.burstiness, rng=_rng(options, _ARRIVALS)
    )
    return Load(requests, due_s.tolist(), is_timed=True)


def _random_requests(options: BenchOptions) -> Iterator[BenchRequest]:
    lengths = _rng(options, _LENGTHS)
    rng = _rng(options, _PROMPTS)
    prefix = _random_ids(options, options.random_prefix_len, rng)
    input_len = options.input_len or options.random_input_len
    output_len = options.output_len or options.random_output_len
    for _ in range(options.num_prompts):
        num_input = length_around(input_len, options.random_range_ratio, lengths)
        num_output = length_around(output_len, options.random_range_ratio, lengths)
        token_ids = np.concatenate([prefix, _random_ids(options, num_input, rng)])
        yield _made_up(options, token_ids, num_output)


def _custom_requests(options: BenchOptions) -> Iterator[BenchRequest]:
    path = options.dataset_file()
    number = 0
    for number, record in enumerate(islice(read_records(path), options.num_prompts), start=1):
        try:
            yield _custom_request(options, record)
        except ValueError as error:
            raise RequestError(f"--dataset-path {path}: request {number}: {error}") from error
    if not number:
        raise RequestError(f"--dataset-path {path} has no requests")


def _custom_request(options: BenchOptions, record: Record) -> BenchRequest:
    """Create a request from a record with a prompt or messages.

    Raises:
        ValueError: It has neither, or the endpoint does not accept it.
    """
    api = APIS[options.backend]
    prompt: Any = record.get("prompt", record.get("messages"))
    items = prompt if isinstance(prompt, list) else []
    is_ids = bool(items) and all(isinstance(token_id, int) for token_id in items)
    is_messages = bool(items) and all(isinstance(message, dict) for message in items)
    if not (isinstance(prompt, str) or is_ids or is_messages):
        raise ValueError('it has neither a "prompt" (text or token ids) nor "messages"')
    if is_ids and not api.takes_token_ids:
        raise ValueError(f"--backend {options.backend} takes no token ids")
    if is_messages and not api.takes_messages:
        raise ValueError(f"--backend {options.backend} takes no messages; openai-chat does")
    num_output = record.get("output_tokens", options.output_len or options.custom_output_len)
    if not isinstance(num_output, int) or num_output < 1:
        raise ValueError(f'its "output_tokens" are {num_output!r}, no number of 1 or more')
    return BenchRequest(prompt, _length(prompt), num_output)


def _length(prompt: Any) -> int:
    """Number of token ids, or of words of a text."""
    if isinstance(prompt, str):
        return len(prompt.split())
    texts = [message.get("content") for message in prompt if isinstance(message, dict)]
    return sum(len(str(text).split()) for text in texts) if texts else len(prompt)


def _sharegpt_requests(options: BenchOptions) -> Iterator[BenchRequest]:
    for conversation in sample_conversations(
        options.dataset_file(),
        options.num_prompts,
        encode=_encoder(options.tokenizer),
        output_len=options.output_len or options.sharegpt_output_len,
        rng=_rng(options, _PROMPTS),
    ):
        num_input = len(conversation.tokens)
        yield BenchRequest(conversation.prompt, num_input, conversation.num_output_tokens)


def _encoder(name: str | None) -> Callable[[str], Sequence[object]]:
    """Function that returns the tokens of a text: those of a tokenizer, else its words.

    Raises:
        ConfigError: The tokenizer cannot be loaded.
    """
    if name is None:
        return str.split
    with extra_needed("pagedserve bench --tokenizer", "cpu"):
        from tokenizers import Tokenizer
    try:
        if Path(name).is_dir():
            tokenizer = Tokenizer.from_file(str(Path(name, "tokenizer.json")))
        else:
            tokenizer = Tokenizer.from_pretrained(name)
    except Exception as error:  # tokenizers raises no narrower class
        raise ConfigError(f"--tokenizer {name} cannot be loaded: {error}") from error
    # The server refuses lone surrogates; their count is that of their replacement.
    return lambda text: tokenizer.encode(text.encode(errors="replace").decode()).ids


_REQUESTS: dict[str, Callable[[BenchOptions], Iterator[BenchRequest]]] = {
    "random": _random_requests,
    "custom": _custom_requests,
    "sharegpt": _sharegpt_requests,
}


def _trace_load(options: BenchOptions) -> Load:
    rows = read_trace(options.dataset_file(), max_rows=options.num_prompts)
    rng = _rng(options, _PROMPTS)
    requests = [_traced_request(options, row, rng) for row in rows]
    times = [row.time_s for row in rows if row.time_s is not None]
    if not times or options.request_rate is not None:
        return _with_rate(options, requests)
    due_s = [(time - times[0]) * options.trace_time_scale for time in times]
    return Load(requests, due_s, is_timed=True)


def _traced_request(options: BenchOptions, row: TraceRow, rng: np.random.Generator) -> BenchRequest:
    num_input = max(1, round(row.num_input_tokens * options.trace_length_scale))
    num_output = max(1, round(row.num_output_tokens * options.trace_length_scale))
    shared = block_token_ids(
        row.block_ids,
        block_size=max(1, round(options.trace_block_size * options.trace_length_scale)),
        num_tokens=num_input,
        vocab_size=options.vocab_size,
        seed=(options.seed, _BLOCKS),
    )
    rest = _random_ids(options, num_input - len(shared), rng)
    return _made_up(options, np.concatenate([shared, rest]), num_output)
