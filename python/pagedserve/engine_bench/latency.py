"""``bench latency``: seconds that one batch takes from its prompts to its last token."""

import time
from functools import partial

import numpy as np

from pagedserve.bench.prompts import random_token_ids
from pagedserve.config import EngineArgs
from pagedserve.engine_bench.options import LatencyOptions
from pagedserve.engine_bench.requests import OfflineRequest, check_length, timed_batch
from pagedserve.engine_bench.result import BenchResult, Seconds
from pagedserve.inputs import TokensPrompt
from pagedserve.llm import LLM
from pagedserve.sampling_params import BeamSearchParams


def measure_latency(args: EngineArgs, options: LatencyOptions) -> BenchResult:
    """Measure batches, each with new random prompts, so that no prefix cache helps.

    Raises:
        ConfigError: Options that contradict the model or the memory.
        ModelLoadError: The model cannot be found, read or run.
        RequestError: A parameter is not accepted.
    """
    with LLM(**args.llm_options) as llm:
        check_length(llm, options.input_len, options.output_len)
        rng = np.random.default_rng(args.seed)
        measure = partial(_seconds_of_batch, llm, options, rng)
        Seconds.measured(options.num_iters_warmup, "warm-up batches", measure)
        seconds = Seconds.measured(options.num_iters, "measured batches", measure)
    fields = {
        "model_id": args.model,
        "avg_latency": seconds.mean,
        "latencies": seconds.samples,
        "percentiles": seconds.percentiles(),
    }
    return BenchResult([*seconds.lines("latency")], fields)


def _seconds_of_batch(llm: LLM, options: LatencyOptions, rng: np.random.Generator) -> float:
    vocab_size = llm.llm_engine.input_processor.model.vocab_size
    prompts = [
        random_token_ids(options.input_len, vocab_size=vocab_size, rng=rng).tolist()
        for _ in range(options.batch_size)
    ]
    if options.use_beam_search:
        params = BeamSearchParams(
            beam_width=options.n, max_tokens=options.output_len, ignore_eos=True
        )
        started = time.perf_counter()
        llm.beam_search([TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], params)
        return time.perf_counter() - started
    seconds, _ = timed_batch(
        llm,
        [OfflineRequest(prompt, options.output_len) for prompt in prompts],
        n=options.n,
        detokenize=not options.disable_detokenize,
        use_tqdm=False,
    )
    return seconds
