"""An executor outside the package: `LLMEngine` over a model of numpy.

It runs where pagedserve and numpy alone are installed.

The model is one attention layer with random weights over paged keys and values.  It gets what every
executor gets: the arrays of a step in its buffers, and a `StepInput`.  Here it samples, verifies
draft tokens and returns log-probabilities.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedserve import EngineArgs, LLMEngine, RequestError, SamplingParams
from pagedserve.executor.memory import MemoryPlan, free_host_bytes, plan_memory
from pagedserve.executor.numpy_buffers import NumpyBuffers, StepArrays
from pagedserve.executor.protocol import (
    Adapter,
    CacheShape,
    ModelInfo,
    ModelOutput,
    StepInput,
    StepLimits,
)
from pagedserve.sampling.results import PositionLogprobs, SampledLogprobs, SampledRows
from pagedserve.sampling.rows import PromptTargets, RowSampling

VOCAB_SIZE, EOS, SIZE, MAX_MODEL_LEN = 48, 0, 32, 256
Floats = NDArray[np.float32]


class Model:
    """One attention layer."""

    def __init__(self, seed: int) -> None:
        """Draw the weights."""
        random = np.random.default_rng(seed)

        def drawn(*shape: int, scale: float = 1.0) -> Floats:
            return random.normal(scale=scale * SIZE**-0.5, size=shape).astype(np.float32)

        self.embedding, self.places = (
            drawn(VOCAB_SIZE, SIZE),
            drawn(MAX_MODEL_LEN, SIZE, scale=0.25),
        )
        self.query, self.key_value = drawn(SIZE, SIZE), drawn(SIZE, 2 * SIZE)
        self.head = drawn(SIZE, VOCAB_SIZE, scale=8.0)

    def logits(self, step: StepArrays, pool: Floats, index: NDArray[np.int32]) -> Floats:
        """Run a step: write its keys and values, and attend over the blocks of each row.

        Args:
            step: Arrays of the step.
            pool: Keys and values, ``[num_blocks, block_size, 2 * SIZE]``; written in place.
            index: Positions in the step's tokens that need logits, ``[N]``.

        Returns:
            Logits ``[N, VOCAB_SIZE]``.
        """
        hidden = self.embedding[step.token_ids] + self.places[step.positions]
        is_new = step.slot_mapping >= 0
        slots = pool.reshape(-1, 2 * SIZE)
        slots[step.slot_mapping[is_new]] = (hidden @ self.key_value)[is_new]
        for row, length in enumerate(step.seq_lens.tolist()):
            tokens = slice(*step.query_start[row : row + 2].tolist())
            seen = pool[step.block_tables[row]].reshape(-1, 2 * SIZE)[:length]
            keys, values = np.split(seen, 2, axis=1)
            scores = hidden[tokens] @ self.query @ keys.T
            scores[np.arange(length) > step.positions[tokens, None]] = -np.inf
            hidden[tokens] += np.exp(log_softmax(scores)) @ values
        return (hidden[index] @ self.head).astype(np.float32)


def log_softmax(scores: Floats) -> Floats:
    """Log-probabilities along the last axis."""
    scores = scores - scores.max(-1, keepdims=True)
    found: Floats = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    return found


def draw(logprobs: Floats, row: RowSampling) -> list[int]:
    """Sample the tokens of a row from its log-probabilities ``[VOCAB_SIZE]``."""
    if row.is_greedy:
        return [int(logprobs.argmax())]
    order = np.argsort(-logprobs, kind="stable")[: row.top_k_of(VOCAB_SIZE)]
    chances = np.exp(log_softmax(logprobs[order] / row.temperature))
    is_kept = (chances.cumsum() - chances < row.top_p) & (chances >= row.min_p * chances[0])
    ends = (chances * is_kept).cumsum()
    return [int(order[np.searchsorted(ends, u * ends[-1], "right")]) for u in row.uniforms]


def ranked(logprobs: Floats, token: int, num_top: int) -> tuple[Any, ...]:
    """Log-probability and rank of a token, and the most likely tokens with theirs."""
    top = np.argsort(-logprobs, kind="stable")[:num_top]
    rank = np.int32(1 + (logprobs > logprobs[token]).sum())
    return logprobs[token], rank, top.astype(np.int32), logprobs[top]


def sample(logits: Floats, rows: Sequence[RowSampling]) -> SampledRows:
    """Sample every row; one that this executor cannot sample becomes an error of its request."""
    tokens: list[int] = []
    found, starts, errors = [], [0], {}
    num_top = max((row.num_logprobs or 0 for row in rows), default=0)
    for place, (row, logprobs) in enumerate(zip(rows, log_softmax(logits), strict=True)):
        if row.is_edited or row.grammar is not None or row.num_candidates:
            errors[place] = "own_executor.py samples from the model's logits alone"
        drawn = [0] if place in errors else draw(logprobs, row)
        tokens += drawn
        starts.append(len(tokens))
        found += [ranked(logprobs, token, num_top) for token in drawn]
    details = None
    if any(row.num_logprobs is not None for row in rows):
        values, ranks, ids, tops = (np.array(column) for column in zip(*found, strict=True))
        first = starts[:-1]
        details = SampledLogprobs(values, ranks, ids[first], tops[first])
    return SampledRows(np.array(tokens, np.int32), np.array(starts), details, None, errors)


def score(logits: Floats, targets: PromptTargets) -> PositionLogprobs:
    """Log-probabilities of the known tokens of prompts."""
    pairs = zip(log_softmax(logits), targets.token_ids.tolist(), strict=True)
    found = [ranked(logprobs, token, targets.num_top) for logprobs, token in pairs]
    return PositionLogprobs(*(np.array(column) for column in zip(*found, strict=True)))


@dataclass(frozen=True)
class Launched:
    """A step that has already run: a ``StepHandle``."""

    output: ModelOutput
    is_async_safe = False

    def results(self) -> ModelOutput:
        """The results of the step."""
        return self.output


class NumpyExecutor:
    """Runs the model: an ``Executor``."""

    def __init__(self, args: EngineArgs) -> None:
        """Create the model."""
        self._args = args
        self.model = Model(args.seed)
        self.model_info = ModelInfo(
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=(EOS,),
            device_type="cpu",
            backends="numpy",
        )

    def determine_num_blocks(self, limits: StepLimits) -> MemoryPlan:
        """Plan the memory of the KV cache."""
        del limits
        return plan_memory(
            block_bytes=4 * 2 * SIZE * self._args.block_size,
            block_size=self._args.block_size,
            weight_bytes=self.model.embedding.nbytes,
            free_bytes=free_host_bytes(),
            free_host_bytes=free_host_bytes(),
            num_gpu_blocks=self._args.num_gpu_blocks,
            swap_space=0,  # preempted sequences are recomputed
        )

    def init_cache(self, shape: CacheShape) -> None:
        """Allocate the KV cache and the buffers."""
        self.pool = np.zeros((shape.num_gpu_blocks, shape.block_size, 2 * SIZE), np.float32)
        self.buffers = NumpyBuffers(shape)

    def launch(self, step: StepInput) -> Launched:
        """Copy the blocks of forks, run the model and sample."""
        for moves in step.moves:
            for source, target in moves.copy:
                self.pool[target] = self.pool[source]
        arrays, scored = self.buffers.arrays(step.sizes), None
        index = arrays.sample_index
        if step.prompts is not None:
            index = np.concatenate((index, step.prompts.index))
        logits = self.model.logits(arrays, self.pool, index)
        if step.prompts is not None:
            scored = score(logits[len(step.rows) :], step.prompts)
        return Launched(ModelOutput(sample(logits[: len(step.rows)], step.rows), scored))

    def load_adapter(self, name: str, path: str) -> Adapter:
        """Refuse adapters."""
        raise RequestError(f"adapter {name} at {path}: this executor has no adapters")

    def drop_adapter(self, ordinal: int) -> None:
        """Do nothing: there are no adapters."""

    def image_positions(self, token_ids: Sequence[int], images: Sequence[object]) -> None:
        """Return None: a token's position is its index."""

    def check(self) -> None:
        """Do nothing: one process is alive."""

    def restart(self) -> None:
        """Do nothing: nothing has died."""

    def shutdown(self) -> None:
        """Do nothing: numpy frees the memory."""


class NumberTokenizer:
    """A ``Tokenizer`` whose tokens are numbers: "5 17" is [5, 17]."""

    added_tokens_decoder: Mapping[int, Any] = {}
    chat_template = None
    eos_token_id = EOS

    def encode(self, text: str, **options: Any) -> list[int]:
        """Encode a text."""
        del options
        try:
            return [int(word) for word in text.split()]
        except ValueError:
            raise RequestError(f"the prompt is {text!r}; it must be numbers") from None

    def __call__(self, text: str, *pair: str | None, **options: Any) -> SimpleNamespace:
        """Encode a text, as ``input_ids``."""
        del pair
        return SimpleNamespace(input_ids=self.encode(text, **options))

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        """Decode ids to text."""
        del options
        return " ".join(map(str, token_ids))

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """Look up the string of each id."""
        return [str(token) for token in ids]

    def get_vocab(self) -> dict[str, int]:
        """Ids by token."""
        return {str(token): token for token in range(VOCAB_SIZE)}

    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        """Refuse chats."""
        del conversation, options
        raise RequestError("this model has no chat template")


def make_engine(**options: Any) -> LLMEngine:
    """Create an engine with this executor, with few blocks, and draft tokens from its outputs."""
    given: dict[str, Any] = {"num_gpu_blocks": 64, "block_size": 4, "max_num_seqs": 8} | options
    given["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 4}
    args = EngineArgs("numpy", enable_prefix_caching=True, **given)
    return LLMEngine(args, executor=NumpyExecutor(args), tokenizer=NumberTokenizer())


def main() -> None:
    """Run requests of several kinds to their end."""
    engine = make_engine()
    kinds = {
        "greedy": SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1),
        "sampled": SamplingParams(top_k=10, seed=1, n=2, max_tokens=12, prompt_logprobs=0),
        "edited": SamplingParams(logit_bias={5: 1.0}),
    }
    for name, params in kinds.items():
        engine.add_request(name, "5 17 3 5 17", params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                for answer in output.outputs:
                    reason = answer.stop_reason or answer.finish_reason
                    print(f"{output.request_id}: {answer.text} ({reason})")
    accepted = sum(engine.stats.num_accepted_by_place)
    print(f"{accepted} of {engine.stats.num_draft_tokens} draft tokens accepted")


if __name__ == "__main__":
    main()
