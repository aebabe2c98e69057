"""Decoder layers as on a GPU, in triton's interpreter: recognised, and the same logits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from pagedserve.config import ModelConfig
from pagedserve.models.loader import LoadedModel, load_model
from pagedserve.models.probe import _paged_logits

pytest.importorskip("triton", reason="triton is not installed")

from pagedserve.gpu.layers import FusedLayer
from pagedserve.gpu.norms import FusedNorm

SaveTiny = Callable[..., Path]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": 8, "head_dim": 24},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "smollm3": {"no_rope_layers": [1, 0]},
}
PROMPTS = [(torch.arange(length) * 31 + 11) % 97 for length in (21, 6)]
# Largest difference from float64, as a share of the largest logit.
BOUNDS = {torch.float32: 2e-5, torch.float16: 6e-3}


def load(directory: Path, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    name: Any = str(dtype).removeprefix("torch.")
    config = ModelConfig(model=str(directory), dtype=name, attention_backend="triton")
    return load_model(config, device)


def modules(loaded: LoadedModel, kind: type) -> int:
    return sum(type(module) is kind for module in loaded.model.modules())


@torch.inference_mode()
def exact_logits(directory: Path, dtype: torch.dtype) -> list[Tensor]:
    """The model's own, of weights rounded to a dtype and computed in float64."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager"
    )
    model = model.double()
    return [model(prompt[None]).logits[0] for prompt in PROMPTS]


def assert_exact(loaded: LoadedModel, directory: Path, dtype: torch.dtype) -> None:
    """Two sequences, one in two chunks and one that decodes a token, against float64."""
    found = _paged_logits(loaded.model, loaded.layers, PROMPTS, [16, 5], "triton")
    for ours, exact in zip(found, exact_logits(directory, dtype), strict=True):
        error = float((ours.cpu().double() - exact).abs().max() / exact.abs().max())
        assert error <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_layers_give_the_logits_of_float64(
    device: torch.device, save_tiny: SaveTiny, family: str, dtype: torch.dtype
) -> None:
    directory = save_tiny(family, **FAMILIES[family])
    loaded = load(directory, dtype, device)
    assert modules(loaded, FusedLayer) == 2
    # In a layer four products, then the head; of the norms the last is left.
    assert modules(loaded, nn.Linear) == 9
    assert loaded.describe_backends().endswith("; exchanged modules: decoder layers 2, norms 1")
    assert_exact(loaded, directory, dtype)


def test_weights_are_held_once(device: torch.device, save_tiny: SaveTiny) -> None:
    directory = save_tiny("qwen3", **FAMILIES["qwen3"])
    own = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    loaded = load(directory, torch.float32, device)
    assert loaded.weight_bytes == sum(weight.nbytes for weight in own.parameters())


@pytest.mark.parametrize(
    ("family", "options"), [("olmo2", {}), ("gemma", {}), ("llama", {"mlp_bias": True})]
)
def test_what_the_kernels_do_not_compute_keeps_its_layers(
    device: torch.device, save_tiny: SaveTiny, family: str, options: dict[str, Any]
) -> None:
    directory = save_tiny(family, **options)
    loaded = load(directory, torch.float32, device)
    assert modules(loaded, FusedLayer) == 0
    assert modules(loaded, FusedNorm) == {"olmo2": 9, "gemma": 0, "llama": 5}[family]
    assert_exact(loaded, directory, torch.float32)


def test_a_layer_that_gives_something_else_is_not_used(
    device: torch.device, save_tiny: SaveTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = FusedLayer.forward
    monkeypatch.setattr(
        FusedLayer, "forward", lambda self, x, **others: right(self, x, **others) * 1.001
    )
    loaded = load(save_tiny("llama"), torch.float32, device)
    assert modules(loaded, FusedLayer) == 0
    assert loaded.modules == "norms 5"
