"""An engine whose model is a formula: everything but the model's arithmetic is real."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from pagedserve import EngineArgs, LLMEngine, RequestOutput
from pagedserve.executor.launched import LaunchedRun, tokens_of
from pagedserve.executor.memory import MemoryPlan, free_host_bytes, plan_memory
from pagedserve.executor.protocol import CacheShape, Executor, ModelInfo, StepInput, StepLimits
from pagedserve.inputs.prompt_images import PlacedImage
from pagedserve.lora.adapter import CONFIG, WEIGHTS
from pagedserve.lora.host import HostAdapter, HostAdapters
from pagedserve.runner.buffers import StepBuffers
from pagedserve.sampling.sampler import Sampler
from pagedserve.sampling.tensors import as_array, ops_for

EOS = 256
VOCAB_SIZE = 257
MAX_MODEL_LEN = 128
# The one module of the formula.
SHIFT = "shift"


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


def next_token(token: int, position: int, shift: int = 0) -> int:
    """What the model says comes after ``token`` at ``position``; never the end."""
    return (token * 31 + position * 7 + 11 + shift) % EOS


def formula_logits(tokens: Tensor, positions: Tensor, shifts: Tensor | int = 0) -> Tensor:
    """Likeliest is ``next_token``, then the token after it, and so on around; float32 [N, V].

    An adapter's shift is added to the likeliest.
    """
    likeliest = (tokens * 31 + positions * 7 + 11 + shifts) % EOS
    distance = (torch.arange(VOCAB_SIZE) - likeliest[:, None]) % VOCAB_SIZE
    return -distance.float() / 2


def save_shift(directory: Path, shift: int) -> Path:
    """Saves an adapter that adds so much to what the formula says; the directory."""
    directory.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": [SHIFT]}
    (directory / CONFIG).write_text(json.dumps(config))
    tensors = {"lora_A": torch.ones(1, 1), "lora_B": torch.full((1, 1), float(shift))}
    save_file(
        {f"base_model.model.{SHIFT}.{name}.weight": tensor for name, tensor in tensors.items()},
        directory / WEIGHTS,
    )
    return directory


class FormulaExecutor:
    """An ``Executor`` without a model; a test may replace ``before_sampling`` to interfere."""

    def __init__(self, args: EngineArgs) -> None:
        self._args = args
        self.before_sampling: Callable[[], None] = lambda: None
        self.num_rows: list[int] = []
        self._sampler = Sampler(ops_for(None))
        self._buffers: StepBuffers | None = None
        self._adapters = HostAdapters(
            {SHIFT: (1, 1)}, max_rank=1, max_cpu_loras=args.max_cpu_loras or args.max_loras
        )
        # One more for rows without an adapter, whose slot is -1.
        self._shifts = torch.zeros(args.max_loras + 1, dtype=torch.int64)

    @property
    def model_info(self) -> ModelInfo:
        return ModelInfo(
            vocab_size=VOCAB_SIZE,
            max_model_len=self._args.max_model_len or MAX_MODEL_LEN,
            eos_token_ids=(EOS,),
            device_type="cpu",
            backends="a formula",
            file_bytes=3_000,
            weight_bytes=4_000,
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
            max_blocks_per_row=shape.max_blocks_per_row,
            has_adapters=self._args.enable_lora,
        )
        self._block_size = shape.block_size

    def check(self) -> None:
        pass

    def restart(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def load_adapter(self, name: str, path: str) -> HostAdapter:
        return self._adapters.load(name, path)

    def drop_adapter(self, ordinal: int) -> None:
        self._adapters.drop(ordinal)

    def image_positions(self, token_ids: Sequence[int], images: Sequence[PlacedImage]) -> None:
        assert not token_ids
        assert not images

    @property
    def buffers(self) -> StepBuffers:
        assert self._buffers is not None
        return self._buffers

    def launch(self, step: StepInput) -> LaunchedRun:
        assert not step.images
        assert not step.encoder_inputs
        sizes, rows, prompts = step.sizes, step.rows, step.prompts
        previous = tokens_of(step.after)
        previous = None if previous is None else torch.from_numpy(previous)
        inputs = self.buffers.inputs(sizes, self._block_size, previous)
        self.num_rows.append(sizes.num_rows)
        self.before_sampling()
        index = inputs.sample_index
        if prompts is not None:
            index = torch.cat((index, torch.from_numpy(prompts.index)))
        for ordinal, slot in step.adapters:
            a, b = self._adapters.weights(ordinal)[SHIFT]
            self._shifts[slot] = int((a * b).item())
        lengths = torch.from_numpy(np.diff(self.buffers.query_start[: sizes.num_rows + 1]))
        slots = torch.from_numpy(self.buffers.adapter_slots[: sizes.num_rows]).long()
        shifts = self._shifts[slots].repeat_interleave(lengths.long())
        logits = formula_logits(
            inputs.token_ids[0, index], inputs.positions[0, index], shifts[index.long()]
        )
        array = as_array(logits)
        samples = self._sampler.launch(array[: len(rows)], rows) if rows else None
        return LaunchedRun(samples, prompts, array[len(rows) :])


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

    def greedy(self, prompt: Sequence[int], num_tokens: int, shift: int = 0) -> list[int]:
        """The first tokens after a prompt, with an adapter of that shift."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(next_token(tokens[-1], len(tokens) - 1, shift))
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
