"""How late another Python thread is while the engine computes: is the GIL released for long work?

A thread that wants to wake each millisecond ticks beside the prefill of long prompts and the decode
of many requests.  Its lateness is that of a server's event loop in the same process.

    OMP_NUM_THREADS=1 python benches/python/ticks.py
"""

import argparse
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch

from pagedserve import LLM, SamplingParams, TokensPrompt

INTERVAL = 0.001


@dataclass
class Ticker:
    """A thread that wakes each ``INTERVAL`` and notes how late it was, in milliseconds."""

    late: list[float] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._tick)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _tick(self) -> None:
        while not self._is_over.is_set():
            due = time.perf_counter() + INTERVAL
            time.sleep(INTERVAL)
            self.late.append((time.perf_counter() - due) * 1e3)

    def describe(self, name: str) -> str:
        """One line of the table."""
        p50, p99, most = np.percentile(self.late, [50, 99, 100])
        return f"| {name} | {len(self.late)} | {p50:.2f} | {p99:.2f} | {most:.2f} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Tick beside nothing, a prefill and a decode, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, default=16, help="requests that decode together")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="of each prompt")
    parser.add_argument("--new-tokens", type=int, default=64, help="of each request")
    options = parser.parse_args(arguments)
    llm = LLM(model=options.model, max_num_seqs=options.rows)
    rng = np.random.default_rng(0)
    prompts = rng.integers(100, 10_000, (options.rows, options.prompt_tokens)).tolist()
    long = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    short = [TokensPrompt(prompt_token_ids=prompt[:4]) for prompt in prompts]

    def run(inputs: Sequence[TokensPrompt], num_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        llm.generate(inputs, params, use_tqdm=False)

    run(short, 4)  # warm
    print(f"{options.model}, {torch.get_num_threads()} threads, {options.rows} requests\n")
    print("| beside | ticks | late p50, ms | p99 | most |\n|---|---|---|---|---|")
    with Ticker() as idle:
        time.sleep(1)
    print(idle.describe("nothing"))
    with Ticker() as prefill:
        run(long, 1)
    print(prefill.describe("prefill"))
    with Ticker() as decode:
        run(short, options.new_tokens)
    print(decode.describe("decode"))


if __name__ == "__main__":
    main()
