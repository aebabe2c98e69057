"""What a step costs on the host outside the executor, and a streamed token by its position.

The executor gives tokens that are known beforehand and takes no time; everything else is real: the
scheduler, the processing of the step, the tokenizer's text.  Costs are medians over steps.

    python benches/python/host_cost.py
    python benches/python/host_cost.py --rows 1024 --json
"""

import argparse
import json
from collections.abc import Sequence
from statistics import median
from time import perf_counter

import numpy as np

from pagedserve import EngineArgs, LLMEngine, SamplingParams
from pagedserve.errors import RequestError
from pagedserve.executor.memory import MemoryPlan
from pagedserve.executor.numpy_buffers import NumpyBuffers
from pagedserve.executor.protocol import (
    Adapter,
    CacheShape,
    ModelInfo,
    ModelOutput,
    StepInput,
    StepLimits,
)
from pagedserve.inputs.prompt_images import PlacedImage
from pagedserve.sampling.results import SampledRows
from pagedserve.sampling_params import RequestOutputKind

TEXT = "The keys and values of a sequence live in blocks, and a table says where: naïve, 日本語. "
NUM_STREAMS = 64
STREAM_TOKENS = 2000
WINDOW = 100
BLOCK_SIZE = 16


class Handle:
    """A step whose tokens were known before."""

    is_async_safe = False

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = np.array(tokens, np.int32)

    def results(self) -> ModelOutput:
        """The tokens."""
        starts = np.arange(len(self._tokens) + 1)
        return ModelOutput(SampledRows(self._tokens, starts, None, None, {}))


class KnownTokens:
    """An executor that says one text again and again, the same token to every row."""

    def __init__(self, num_blocks: int, max_model_len: int) -> None:
        self._num_blocks = num_blocks
        self._max_model_len = max_model_len
        self.token_ids: list[int] = [0]
        self._step = 0

    def check(self) -> None:
        """It lives."""

    def restart(self) -> None:
        """Nothing to do."""

    def shutdown(self) -> None:
        """Nothing to do."""

    @property
    def model_info(self) -> ModelInfo:
        """A model of SmolLM2's vocabulary."""
        return ModelInfo(
            vocab_size=49152,
            max_model_len=self._max_model_len,
            eos_token_ids=(2,),
            device_type="cpu",
            backends="none",
        )

    def determine_num_blocks(self, limits: StepLimits) -> MemoryPlan:
        """As many as were asked for; they take no memory."""
        del limits
        return MemoryPlan(0, 0, BLOCK_SIZE, self._num_blocks, 0, 0)

    def init_cache(self, shape: CacheShape) -> None:
        """Allocate the step's arrays."""
        self.buffers = NumpyBuffers(shape)

    def load_adapter(self, name: str, path: str) -> Adapter:
        """There are none."""
        raise RequestError(f"no adapters: {name} at {path}")

    def drop_adapter(self, ordinal: int) -> None:
        """There are none."""

    def image_positions(self, token_ids: Sequence[int], images: Sequence[PlacedImage]) -> None:
        """There are none."""

    def launch(self, step: StepInput) -> Handle:
        """Give every sample the next token."""
        token = self.token_ids[self._step % len(self.token_ids)]
        self._step += 1
        return Handle([token] * step.sizes.num_samples)


def running_engine(num_rows: int, num_tokens: int, kind: RequestOutputKind) -> LLMEngine:
    """An engine that decodes so many sequences, all of which have begun."""
    length = num_tokens + 8
    blocks = num_rows * (-(-length // BLOCK_SIZE) + 2)
    executor = KnownTokens(blocks + blocks // 50, length)
    args = EngineArgs(
        "smollm2",
        block_size=BLOCK_SIZE,
        max_num_seqs=num_rows,
        max_num_batched_tokens=max(num_rows * 4, length),
    )
    engine = LLMEngine(args, executor=executor)
    executor.token_ids = engine.tokenizer(TEXT).input_ids
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, output_kind=kind)
    for number in range(num_rows):
        engine.add_request(str(number), {"prompt_token_ids": [1, 2, 3, 4]}, params)
    while engine.scheduler.num_waiting:
        engine.step()
    return engine


def step_seconds(engine: LLMEngine, num_steps: int) -> list[float]:
    """Seconds of each of the next steps."""
    seconds = []
    for _ in range(num_steps):
        started = perf_counter()
        engine.step()
        seconds.append(perf_counter() - started)
    return seconds


def main() -> None:
    """Print both tables, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=256, help="sequences of a step")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    rows = {}
    for kind in RequestOutputKind:
        seconds = step_seconds(running_engine(options.rows, 400, kind), 300)
        rows[kind.name] = median(seconds) / options.rows * 1e6
    stream = step_seconds(
        running_engine(NUM_STREAMS, STREAM_TOKENS, RequestOutputKind.DELTA), STREAM_TOKENS - 10
    )
    tokens = {
        f"{first}-{first + WINDOW}": median(stream[first : first + WINDOW]) / NUM_STREAMS * 1e6
        for first in (0, 400, 900, 1400, len(stream) - WINDOW)
    }
    if options.json:
        print(json.dumps({"us_a_row": rows, "us_a_streamed_token": tokens}))
        return
    print(f"{options.rows} rows, microseconds a row and step:")
    for name, cost in rows.items():
        print(f"  {name:<12} {cost:6.2f}")
    print(f"{NUM_STREAMS} streams of {STREAM_TOKENS} tokens, DELTA, microseconds a token by place:")
    for place, cost in tokens.items():
        print(f"  {place:<12} {cost:6.2f}")


if __name__ == "__main__":
    main()
