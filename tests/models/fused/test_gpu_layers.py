"""Decoder layers as on a GPU, in triton's interpreter: recognised, and the same logits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from pagedserve.config import EngineArgs
from pagedserve.models.loader import LoadedModel, load_model

pytest.importorskip("triton", reason="triton is not installed")

from pagedserve.models.fused.gpu.layers import GpuDecoderLayer
from pagedserve.models.fused.gpu.norms import GpuRMSNorm

SaveTiny = Callable[..., Path]
AssertExact = Callable[..., None]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": 8, "head_dim": 24},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "smollm3": {"no_rope_layers": [1, 0]},
}
# Every day one with biases in float32, and the one with most between its products in float16.
CASES = [
    pytest.param(family, dtype, marks=() if family in everyday else pytest.mark.slow)
    for dtype, everyday in ((torch.float32, ("llama",)), (torch.float16, ("qwen3",)))
    for family in FAMILIES
]


def load(directory: Path, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """Short of tokens: the check at load is then no longer than the prompts here."""
    name: Any = str(dtype).removeprefix("torch.")
    return load_model(
        EngineArgs(str(directory), dtype=name, attention_backend="triton", max_model_len=24), device
    )


def modules(loaded: LoadedModel, kind: type) -> int:
    return sum(type(module) is kind for module in loaded.model.modules())


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_fused_layers_give_the_logits_of_float64(
    device: torch.device,
    save_tiny: SaveTiny,
    assert_exact: AssertExact,
    family: str,
    dtype: torch.dtype,
) -> None:
    directory = save_tiny(family, **FAMILIES[family])
    loaded = load(directory, dtype, device)
    assert modules(loaded, GpuDecoderLayer) == 2
    # In a layer four products, then the head; of the norms the last is left.
    assert modules(loaded, nn.Linear) == 9
    assert loaded.describe_backends().endswith("; replaced modules: decoder layers 2, norms 1")
    # Weights are held once.
    own = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    assert loaded.weight_bytes == sum(weight.nbytes for weight in own.parameters())
    assert_exact(loaded, directory)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("olmo2", {}),
        pytest.param("gemma", {}, marks=pytest.mark.slow),
        pytest.param("llama", {"mlp_bias": True}, marks=pytest.mark.slow),
    ],
)
def test_what_the_kernels_do_not_compute_keeps_its_layers(
    device: torch.device,
    save_tiny: SaveTiny,
    assert_exact: AssertExact,
    family: str,
    options: dict[str, Any],
) -> None:
    directory = save_tiny(family, **options)
    loaded = load(directory, torch.float32, device)
    assert modules(loaded, GpuDecoderLayer) == 0
    assert modules(loaded, GpuRMSNorm) == {"olmo2": 9, "gemma": 0, "llama": 5}[family]
    assert_exact(loaded, directory)


def test_a_layer_that_gives_something_else_is_not_used(
    device: torch.device, save_tiny: SaveTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = GpuDecoderLayer.forward
    monkeypatch.setattr(
        GpuDecoderLayer, "forward", lambda self, x, **others: right(self, x, **others) * 1.001
    )
    loaded = load(save_tiny("llama"), torch.float32, device)
    assert modules(loaded, GpuDecoderLayer) == 0
    assert loaded.replaced_modules == "norms 5"
