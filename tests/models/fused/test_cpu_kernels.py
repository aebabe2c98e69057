"""What is replaced by Rust in a model of each family, and that its logits stay what they were."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pagedserve import _core
from pagedserve.config import EngineArgs
from pagedserve.config.precision import CpuKernels
from pagedserve.errors import ConfigError, StepError
from pagedserve.models.fused.cpu.layers import CpuDecoderLayer
from pagedserve.models.fused.cpu.modules import (
    CpuRMSNorm,
    PackedEmbedding,
    PackedGatedMLP,
    PackedLinear,
)
from pagedserve.models.loader import LoadedModel, load_model

pytestmark = pytest.mark.usefixtures("best_instructions")
SaveTiny = Callable[..., Path]
AssertExact = Callable[..., None]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDE = {"intermediate_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "smollm3": {"no_rope_layers": [1, 0]},
    "gemma": {"head_dim": 24},
    "gemma2": {"sliding_window": 8, "head_dim": 32, "attn_logit_softcapping": 5.0},
    "gemma3_text": {"sliding_window": 8, "head_dim": 16, "query_pre_attn_scalar": 24},
}


def load(directory: Path, dtype: str, kernels: CpuKernels) -> LoadedModel:
    config = EngineArgs(model=str(directory), dtype=dtype, cpu_kernels=kernels)  # type: ignore[arg-type]
    return load_model(config, torch.device("cpu"))


def modules(loaded: LoadedModel, kind: type) -> int:
    return sum(type(module) is kind for module in loaded.model.modules())


@pytest.mark.parametrize("kernels", ["fused", "modules", "generic"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_choice_gives_the_logits_of_float64(
    save_tiny: SaveTiny,
    assert_exact: AssertExact,
    family: str,
    dtype: torch.dtype,
    kernels: CpuKernels,
) -> None:
    directory = save_tiny(family, **(WIDE | FAMILIES[family]))
    loaded = load(directory, str(dtype).removeprefix("torch."), kernels)
    assert modules(loaded, CpuDecoderLayer) == (2 if kernels == "fused" else 0)
    assert modules(loaded, PackedGatedMLP) == (2 if kernels == "modules" else 0)
    assert (modules(loaded, nn.Linear) == 0) == (kernels != "generic")
    assert_exact(loaded, directory)


def test_a_family_that_is_not_known_keeps_its_layers(
    save_tiny: SaveTiny, assert_exact: AssertExact
) -> None:
    directory = save_tiny("olmo2", **WIDE)
    loaded = load(directory, "float32", "fused")
    assert modules(loaded, CpuDecoderLayer) == 0
    assert modules(loaded, PackedGatedMLP) == 2
    assert modules(loaded, PackedLinear) == 9
    assert modules(loaded, CpuRMSNorm) == 9
    assert "decoder layers" not in loaded.replaced_modules
    assert_exact(loaded, directory)


def test_features_that_fill_no_panel_are_not_gated_together(save_tiny: SaveTiny) -> None:
    loaded = load(save_tiny("llama", intermediate_size=48), "float32", "fused")
    assert modules(loaded, CpuDecoderLayer) == modules(loaded, PackedGatedMLP) == 0
    assert modules(loaded, PackedLinear) == 15


def test_a_module_that_gives_something_else_is_not_used(
    save_tiny: SaveTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = CpuRMSNorm.forward
    monkeypatch.setattr(CpuRMSNorm, "forward", lambda self, x: right(self, x) * 1.001)
    fused = CpuDecoderLayer.forward
    monkeypatch.setattr(
        CpuDecoderLayer, "forward", lambda self, x, **others: fused(self, x, **others) * 1.001
    )
    loaded = load(save_tiny("llama", **WIDE), "float32", "fused")
    assert modules(loaded, CpuDecoderLayer) == modules(loaded, CpuRMSNorm) == 0
    assert loaded.replaced_modules == "linear layers 9, gated layers 2"


@pytest.mark.parametrize("instructions", _core.cpu.instruction_sets())
def test_older_cpus_give_the_same_logits(
    save_tiny: SaveTiny, assert_exact: AssertExact, instructions: str
) -> None:
    directory = save_tiny("llama", **WIDE)
    config = EngineArgs(model=str(directory), cpu_instructions=instructions)
    loaded = load_model(config, torch.device("cpu"))
    assert instructions in loaded.describe_backends()
    assert_exact(loaded, directory)


def test_instructions_that_no_cpu_has_are_refused(save_tiny: SaveTiny) -> None:
    config = EngineArgs(model=str(save_tiny("llama")), cpu_instructions="mmx")
    with pytest.raises(ConfigError, match=r'cpu_instructions, .*, is "mmx"; this CPU has portable'):
        load_model(config, torch.device("cpu"))


def test_a_fused_layer_outside_of_a_step(save_tiny: SaveTiny) -> None:
    loaded = load(save_tiny("llama", **WIDE), "float32", "fused")
    with pytest.raises(StepError, match="outside of a step"):
        loaded.model(torch.tensor([[1, 2]]), use_cache=False)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_tied", [True, False])
def test_weights_are_held_once(
    save_tiny: SaveTiny,
    assert_exact: AssertExact,
    family: str,
    dtype: torch.dtype,
    *,
    is_tied: bool,
) -> None:
    options = WIDE | FAMILIES[family] | {"tie_word_embeddings": is_tied, "vocab_size": 128}
    directory = save_tiny(family, **options)
    name = str(dtype).removeprefix("torch.")
    generic, fused = (load(directory, name, kernels) for kernels in ("generic", "fused"))
    assert modules(fused, PackedEmbedding) == is_tied
    # Small vectors go into the layers; panels are whole ones of 64 features.
    assert 0.9 * generic.weight_bytes <= fused.weight_bytes <= 1.3 * generic.weight_bytes
    assert_exact(fused, directory)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("biogpt", {}),  # scales its embedding by a number
        ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2, "head_dim": 8}),  # reads a router's
    ],
)
def test_a_model_that_reads_what_is_packed(
    save_tiny: SaveTiny,
    assert_exact: AssertExact,
    family: str,
    options: dict[str, Any],
    *,
    is_tied: bool,
) -> None:
    directory = save_tiny(family, **(WIDE | options | {"tie_word_embeddings": is_tied}))
    loaded = load(directory, "float32", "modules")
    assert modules(loaded, PackedEmbedding) == is_tied
    assert_exact(loaded, directory)
