"""Answer each line "STREAMS TOKENS" with the seconds that so many greedy streams take.

benches/python/compare.py keeps one such process for each checkout that it compares.
"""

import argparse
import sys
import time
from collections.abc import Sequence

from pagedserve import LLM, SamplingParams

PROMPT = "The history of the steam engine begins in antiquity, number"


def seconds_of(llm: LLM, num_streams: int, num_tokens: int) -> float:
    """Seconds from the first prompt token to the last generated one."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    prompts = [f"{PROMPT} {stream}" for stream in range(num_streams)]
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - started


def main(arguments: Sequence[str] | None = None) -> None:
    """Load the model, then answer lines until stdin ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args(arguments)
    llm = LLM(options.model, dtype=options.dtype, max_model_len=512, use_tqdm_on_load=False)
    for line in sys.stdin:
        num_streams, num_tokens = map(int, line.split())
        print(seconds_of(llm, num_streams, num_tokens), flush=True)


if __name__ == "__main__":
    main()
