"""Requests of offline benchmarks, and one batch of them."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pagedserve.bench.conversations import sample_conversations
from pagedserve.bench.prompts import length_around, random_token_ids
from pagedserve.engine_bench.options import ThroughputOptions
from pagedserve.errors import ConfigError
from pagedserve.inputs import TokensPrompt
from pagedserve.inputs.prompts import check_unicode
from pagedserve.llm import LLM
from pagedserve.outputs import RequestOutput
from pagedserve.sampling_params import SamplingParams

_RANDOM_INPUT_LEN = 1024
_RANDOM_OUTPUT_LEN = 128


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
    path, tokenizer = options.dataset_file(), llm.get_tokenizer()

    def encode(text: str) -> list[int]:
        check_unicode(text, f"a turn of --dataset-path {path}")
        return list(tokenizer(text).input_ids)

    for conversation in sample_conversations(
        path, num_requests, encode=encode, output_len=options.output_len, rng=rng
    ):
        yield OfflineRequest(list(conversation.tokens), conversation.num_output_tokens)


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
