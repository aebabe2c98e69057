"""``bench throughput``: requests and tokens per second, all requests given at once."""

import sys

import numpy as np

from pagedserve.config import EngineArgs
from pagedserve.engine_bench.options import ThroughputOptions
from pagedserve.engine_bench.requests import (
    OfflineRequest,
    check_length,
    random_requests,
    sharegpt_requests,
    timed_batch,
)
from pagedserve.engine_bench.result import BenchResult
from pagedserve.llm import LLM
from pagedserve.outputs import RequestOutput

# Separate random streams of one seed.
_MEASURED, _WARMUPS = range(2)


def measure_throughput(args: EngineArgs, options: ThroughputOptions) -> BenchResult:
    """Measure one batch of all requests.

    Raises:
        ConfigError: Options that contradict the model or the memory.
        ModelLoadError: The model cannot be found, read or run.
        RequestError: A dataset is invalid, or a parameter is not accepted.
    """
    with LLM(**args.llm_options) as llm:
        requests = _requests(llm, options, options.num_prompts, (args.seed, _MEASURED))
        if len(requests) < options.num_prompts:
            text = f"--dataset-path has {len(requests)} requests, fewer than --num-prompts"
            print(f"pagedserve: {text}", file=sys.stderr)  # noqa: T201  # for the user
        if options.num_warmups:
            warmups = _requests(llm, options, options.num_warmups, (args.seed, _WARMUPS))
            _timed(llm, options, warmups)
        seconds, outputs = _timed(llm, options, requests)
    return _result(args, seconds, outputs)


def _requests(
    llm: LLM, options: ThroughputOptions, num_requests: int, seed: tuple[int, int]
) -> list[OfflineRequest]:
    make = random_requests if options.is_random else sharegpt_requests
    requests = list(make(llm, options, num_requests, np.random.default_rng(seed)))
    for request in requests:
        check_length(llm, len(request.token_ids), request.num_output_tokens)
    return requests


def _timed(
    llm: LLM, options: ThroughputOptions, requests: list[OfflineRequest]
) -> tuple[float, list[RequestOutput]]:
    is_terminal = sys.stderr.isatty()
    detokenize = not options.disable_detokenize
    return timed_batch(llm, requests, n=options.n, detokenize=detokenize, use_tqdm=is_terminal)


def _result(args: EngineArgs, seconds: float, outputs: list[RequestOutput]) -> BenchResult:
    num_input = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(each.token_ids) for output in outputs for each in output.outputs)
    num_tokens = num_input + num_output
    rates = {"requests": len(outputs), "total tokens": num_tokens, "output tokens": num_output}
    shown = ", ".join(f"{number / seconds:.2f} {name}/s" for name, number in rates.items())
    lines = [
        f"Throughput: {shown}",
        f"Total num prompt tokens:  {num_input}",
        f"Total num output tokens:  {num_output}",
    ]
    fields = {
        "model_id": args.model,
        "elapsed_time": seconds,
        "num_requests": len(outputs),
        "total_num_tokens": num_tokens,
        "requests_per_second": len(outputs) / seconds,
        "tokens_per_second": num_tokens / seconds,
    }
    return BenchResult(lines, fields)
