"""An engine whose model is a formula: everything but the model's arithmetic is real."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from pagedserve import EngineArgs, LLMEngine, RequestOutput, SchedulerOutputs
from pagedserve.executor.local import LaunchedRun
from pagedserve.executor.memory import MemoryPlan, free_host_bytes, plan_memory
from pagedserve.executor.protocol import CacheShape, Executor, ModelInfo, StepHandle, StepLimits
from pagedserve.runner.buffers import StepBuffers
from pagedserve.sampling.rows import PromptTargets, RowSampling
from pagedserve.sampling.sampler import Sampler

EOS = 256
VOCAB_SIZE = 257
MAX_MODEL_LEN = 128


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, in the order of the byte-level alphabet, and one special token."""
    alphabet = {
        character: index
        for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
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
    """An ``Executor`` without a model; a test may replace ``before_sampling`` to interfere."""

    def __init__(self, args: EngineArgs) -> None:
        self._args = args
        self.before_sampling: Callable[[], None] = lambda: None
        self.num_rows: list[int] = []
        self._sampler = Sampler()
        self._buffers: StepBuffers | None = None

    @property
    def model_info(self) -> ModelInfo:
        return ModelInfo(
            vocab_size=VOCAB_SIZE,
            max_model_len=self._args.max_model_len or MAX_MODEL_LEN,
            eos_token_ids=(EOS,),
            device_type="cpu",
            backends="a formula",
        )

    def determine_num_blocks(self, limits: StepLimits) -> MemoryPlan:
        assert limits.max_num_rows > 0
        return plan_memory(
            block_bytes=1024 * self._args.block_size,
            block_size=self._args.block_size,
            weight_bytes=1 << 20,
            free_bytes=free_host_bytes(),
            num_gpu_blocks=self._args.num_gpu_blocks,
            kv_cache_memory=self._args.kv_cache_memory,
            max_model_len=self._args.max_model_len,
            swap_space=self._args.swap_space,
            free_host_bytes=free_host_bytes(),
        )

    def init_cache(self, shape: CacheShape) -> None:
        assert shape.num_gpu_blocks > 0
        assert shape.num_cpu_blocks >= 0
        self._buffers = StepBuffers(
            max_num_tokens=shape.limits.max_num_tokens,
            max_num_rows=shape.limits.max_num_rows,
            max_blocks_per_row=-(-shape.limits.max_model_len // shape.block_size),
        )
        self._block_size = shape.block_size

    @property
    def buffers(self) -> StepBuffers:
        assert self._buffers is not None
        return self._buffers

    def launch(
        self,
        scheduled: SchedulerOutputs,
        rows: Sequence[RowSampling],
        prompts: PromptTargets | None = None,
        after: StepHandle | None = None,
    ) -> LaunchedRun:
        previous_tokens = after.tokens() if isinstance(after, LaunchedRun) else None
        inputs = self.buffers.inputs(scheduled, self._block_size, previous_tokens)
        self.num_rows.append(scheduled.num_rows)
        self.before_sampling()
        index = inputs.sample_index
        if prompts is not None:
            index = torch.cat((index, torch.from_numpy(prompts.index)))
        logits = formula_logits(inputs.token_ids[0, index], inputs.positions[0, index])
        samples = self._sampler.launch(logits[: len(rows)], rows) if rows else None
        return LaunchedRun(samples, prompts, logits[len(rows) :])


class FormulaModel:
    """Makes engines, and says what they should answer."""

    eos = EOS
    vocab_size = VOCAB_SIZE

    def __init__(self) -> None:
        self.tokenizer = byte_tokenizer()

    def engine(self, **options: Any) -> LLMEngine:
        """An engine with the formula for a model; by default with blocks for 256 tokens."""
        arguments: dict[str, Any] = {"num_gpu_blocks": 64, "block_size": 4, "max_num_seqs": 32}
        args = EngineArgs(model="formula", **(arguments | options))
        executor: Executor = FormulaExecutor(args)
        return LLMEngine(args, executor=executor, tokenizer=self.tokenizer)

    def executor(self, engine: LLMEngine) -> FormulaExecutor:
        """The executor of such an engine."""
        executor: object = engine.model_executor
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
        assert engine.get_num_unfinished_requests() == 0
        assert engine.scheduler.num_free_gpu_blocks == engine.memory.num_gpu_blocks
        assert not engine.scheduler.has_unfinished
        engine.scheduler.check()
