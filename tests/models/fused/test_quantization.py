"""Models whose linear layers have int8 weights: what they compute and hold, what is refused."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from pagedserve import LLM, SamplingParams, _core
from pagedserve.config import EngineArgs
from pagedserve.config.precision import CpuKernels
from pagedserve.errors import ConfigError
from pagedserve.executor.local import LocalExecutor
from pagedserve.models.check.paged_logits import paged_logits
from pagedserve.models.fused.cpu.layers import CpuDecoderLayer
from pagedserve.models.fused.cpu.modules import PackedEmbedding, PackedGatedMLP, PackedLinear
from pagedserve.models.fused.cpu.packing import quantize
from pagedserve.models.loader import LoadedModel, load_model

pytestmark = pytest.mark.usefixtures("best_instructions")
SaveTiny = Callable[..., Path]
AssertExact = Callable[..., None]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "qwen3": {"head_dim": 16},
    "gemma3_text": {"sliding_window": 8, "head_dim": 16, "query_pre_attn_scalar": 24},
    "olmo2": {},  # not a family whose layers are fused
}
PROSE = """\
The river rises in the hills above the town and runs for some forty miles to the sea. In spring,
when the snow melts, it floods the meadows; by August a child can wade across it. Three mills once
stood on its banks, of which only the lowest still grinds corn.
"""
CODE = """\
def median(numbers):
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
"""


def load(directory: Path, dtype: str = "float32", **options: Any) -> LoadedModel:
    config = EngineArgs(
        model=str(directory),
        dtype=dtype,  # type: ignore[arg-type]
        quantization="int8",
        **options,
    )
    return load_model(config, torch.device("cpu"))


def leave_what_int8_leaves(model: Any) -> None:
    """Give a model of transformers the weights that quantizing makes of its own."""
    if model.config.tie_word_embeddings:
        weight = model.get_input_embeddings().weight
        kept = quantize(weight).dequantize(weight.dtype)
        model.get_input_embeddings().weight = nn.Parameter(kept)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(quantize(module.weight).dequantize(torch.float64))


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("kernels", ["fused", "modules"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_weights_that_are_left(
    save_tiny: SaveTiny,
    assert_exact: AssertExact,
    family: str,
    dtype: torch.dtype,
    kernels: CpuKernels,
    *,
    is_tied: bool,
) -> None:
    options = FAMILIES[family] | {"intermediate_size": 64, "tie_word_embeddings": is_tied}
    directory = save_tiny(family, **options)
    loaded = load(directory, str(dtype).removeprefix("torch."), cpu_kernels=kernels)
    kinds = [type(module) for module in loaded.model.modules()]
    assert (CpuDecoderLayer in kinds) == (kernels == "fused" and family != "olmo2")
    assert (PackedEmbedding in kinds) == is_tied
    assert nn.Linear not in kinds
    share = re.search(r"; weights: (\d+)% int8$", loaded.describe_backends())
    assert share is not None
    assert (share[1] == "100") == is_tied  # or else the embedding is not
    assert_exact(loaded, directory, leave_what_int8_leaves)


@pytest.mark.parametrize("instructions", _core.cpu.instruction_sets())
def test_every_cpu_has_int8_weights(
    save_tiny: SaveTiny, assert_exact: AssertExact, instructions: str
) -> None:
    directory = save_tiny("llama", intermediate_size=64)
    loaded = load(directory, cpu_instructions=instructions)
    assert f"rust ({instructions}" in loaded.describe_backends()
    assert_exact(loaded, directory, leave_what_int8_leaves)


def spoil(monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module], fault: float) -> None:
    right = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x, **o: right(self, x, **o) * fault)


@pytest.mark.parametrize("fault", [1.001, -1.0, float("nan")])
def test_a_quantized_module_that_gives_something_else_is_not_used(
    save_tiny: SaveTiny, monkeypatch: pytest.MonkeyPatch, fault: float
) -> None:
    """A fault that is smaller than what quantizing does is seen all the same."""
    directory = save_tiny("llama", intermediate_size=64)
    spoil(monkeypatch, CpuDecoderLayer, fault)
    spoil(monkeypatch, PackedLinear, fault)
    loaded = load(directory)
    assert loaded.replaced_modules.startswith("gated layers 2, norms 5; weights: ")
    assert sum(type(module) is nn.Linear for module in loaded.model.modules()) == 9
    spoil(monkeypatch, PackedGatedMLP, fault)
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no linear layers that can be"):
        load(directory)


def test_what_cannot_be_quantized_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="'int8', which is for the CPU; the model's device is cuda"
    ):
        load_model(EngineArgs(model="smollm2", quantization="int8"), torch.device("cuda"))
    with pytest.raises(ConfigError, match="quantization is 'int8', and cpu_kernels is 'generic'"):
        EngineArgs(model="smollm2", quantization="int8", cpu_kernels="generic")
    with pytest.raises(ConfigError, match="quantization is 'fp8'; it must be one of int8, w8a8"):
        EngineArgs(model="smollm2", quantization=cast(Any, "fp8"))


@pytest.fixture(scope="module")
def whole(model_package: None) -> LLM:
    return LLM(model="smollm2", backend="torch", num_gpu_blocks=64)


@pytest.fixture(scope="module")
def int8(model_package: None) -> LLM:
    return LLM(model="smollm2", backend="torch", quantization="int8", num_gpu_blocks=64)


def test_the_real_model_in_a_quarter_of_the_memory(whole: LLM, int8: LLM) -> None:
    large, small = (llm.llm_engine.memory.weight_bytes for llm in (whole, int8))
    assert 0.25 * large < small < 0.26 * large


def test_the_real_model_answers_as_before(whole: LLM, int8: LLM) -> None:
    """The bounds are twice what was seen: docs/cpu.md states the error over longer texts."""
    outputs = int8.generate(
        ["The capital of France is"], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False
    )
    assert outputs[0].outputs[0].text.startswith(" Paris")
    tokenizer = whole.get_tokenizer()
    prompts = [torch.tensor(tokenizer(text).input_ids) for text in (PROSE, CODE)]

    def logprobs(llm: LLM) -> Tensor:
        """Of both texts, each in two chunks."""
        executor = llm.llm_engine.model_executor
        assert isinstance(executor, LocalExecutor)
        loaded = executor.worker.loaded
        model, backend = loaded.model, loaded.attention_backend
        logits = paged_logits(model, loaded.layers, prompts, [20, 20], backend)
        return torch.cat(logits).log_softmax(dim=-1)

    before, after = logprobs(whole), logprobs(int8)
    divergence = (before.exp() * (before - after)).sum(dim=-1)
    likeliest = before.topk(5).indices
    moved = (before.gather(1, likeliest) - after.gather(1, likeliest)).abs()
    agreement = before.argmax(dim=-1).eq(after.argmax(dim=-1)).float().mean()
    assert 1e-4 < float(divergence.mean()) < 0.011
    assert float(moved.mean()) < 0.25
    assert float(agreement) > 0.88
