"""An engine whose model is a formula: everything but the model's arithmetic is real."""

from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from pagedserve import EngineArgs, LLMEngine, RequestOutput, SchedulerOutputs
from pagedserve.engine import llm_engine
from pagedserve.executor.worker import LaunchedStep
from pagedserve.runner.buffers import StepBuffers
from pagedserve.sampling.rows import PromptTargets, RowSampling
from pagedserve.sampling.sampler import Sampler

EOS = 256
VOCAB_SIZE = 257
MAX_MODEL_LEN = 128


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, in the order of the byte-level alphabet, and one special token."""
    alphabet = {one: index for index, one in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def next_token(token: int, position: int) -> int:
    """What the model says comes after ``token`` at ``position``; never the end."""
    return (token * 31 + position * 7 + 11) % EOS


def formula_logits(tokens: Tensor, positions: Tensor) -> Tensor:
    """Likeliest is ``next_token``, then the token after it, and so on around; float32 [N, V]."""
    likeliest = (tokens * 31 + positions * 7 + 11) % EOS
    distance = (torch.arange(VOCAB_SIZE) - likeliest[:, None]) % VOCAB_SIZE
    return -distance.float() / 2


class FormulaExecutor:
    """Stands in for ``Executor``; a test may replace ``before_sampling`` to interfere."""

    def __init__(self, args: EngineArgs) -> None:
        max_model_len = args.max_model_len or MAX_MODEL_LEN
        self.loaded = SimpleNamespace(
            eos_token_ids=(EOS,),
            vocab_size=VOCAB_SIZE,
            max_model_len=max_model_len,
            weight_bytes=1 << 20,
            device=torch.device("cpu"),
        )
        self.before_sampling: Callable[[], None] = lambda: None
        self.num_rows: list[int] = []
        self._sampler = Sampler()

    def kv_bytes_per_block(self, block_size: int) -> int:
        return 1024 * block_size

    def init_cache(
        self,
        *,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        block_size: int,
        max_num_tokens: int,
        max_num_rows: int,
        max_model_len: int,
    ) -> None:
        assert num_gpu_blocks > 0
        assert num_cpu_blocks >= 0
        self.buffers = StepBuffers(
            max_num_tokens=max_num_tokens,
            max_num_rows=max_num_rows,
            max_blocks_per_row=-(-max_model_len // block_size),
        )
        self._block_size = block_size

    def launch(
        self,
        outputs: SchedulerOutputs,
        rows: Sequence[RowSampling],
        prompts: PromptTargets | None = None,
        previous_tokens: Tensor | None = None,
    ) -> LaunchedStep:
        inputs = self.buffers.inputs(outputs, self._block_size, previous_tokens)
        self.num_rows.append(outputs.num_rows)
        self.before_sampling()
        index = inputs.sample_index
        if prompts is not None:
            index = torch.cat((index, torch.from_numpy(prompts.index)))
        logits = formula_logits(inputs.token_ids[0, index], inputs.positions[0, index])
        samples = self._sampler.launch(logits[: len(rows)], rows) if rows else None
        return LaunchedStep(samples, prompts, logits[len(rows) :])


class FormulaModel:
    """Makes engines, and says what they should answer."""

    eos = EOS
    vocab_size = VOCAB_SIZE

    def engine(self, **options: Any) -> LLMEngine:
        """An engine with the formula for a model; by default with blocks for 256 tokens."""
        arguments: dict[str, Any] = {"num_gpu_blocks": 64, "block_size": 4, "max_num_seqs": 32}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llm_engine, "Executor", FormulaExecutor)
            patch.setattr(llm_engine, "load_tokenizer", lambda *_: byte_tokenizer())
            return LLMEngine(EngineArgs(model="formula", **(arguments | options)))

    def executor(self, engine: LLMEngine) -> FormulaExecutor:
        """The executor of such an engine."""
        executor: object = engine._executor
        assert isinstance(executor, FormulaExecutor)
        return executor

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The first tokens after a prompt."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(next_token(tokens[-1], len(tokens) - 1))
        return tokens[len(prompt) :]

    def finish(self, engine: LLMEngine) -> dict[str, RequestOutput]:
        """Step until nothing is left; the last output of each request."""
        last: dict[str, RequestOutput] = {}
        while engine.has_unfinished_requests():
            last |= {output.request_id: output for output in engine.step()}
        return last

    def check_idle(self, engine: LLMEngine) -> None:
        """Nothing is left over, in Python or in the core."""
        assert not engine.has_unfinished_requests()
        assert engine.num_unfinished_requests == 0
        assert engine.scheduler.num_free_gpu_blocks == engine.memory.num_gpu_blocks
        assert not engine.scheduler.has_unfinished
        engine.scheduler.check()


@pytest.fixture
def formula() -> FormulaModel:
    return FormulaModel()
