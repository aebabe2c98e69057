"""Baichuan in all its forms against a plain one in float64; transformers has none to compare."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from pagedserve import LLM, SamplingParams
from pagedserve.models.check.paged_logits import paged_logits
from pagedserve.models.loader import LoadedModel

Weights = dict[str, Tensor]

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-6,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LARGE = {"hidden_size": 160, "num_attention_heads": 40, "model_max_length": 64}
SMALL = {"num_attention_heads": 4, "max_position_embeddings": 64}
FORMS: dict[str, dict[str, Any]] = {
    "7b": SMALL | {"vocab_size": 97, "architectures": ["BaiChuanForCausalLM"]},
    "13b": LARGE | {"vocab_size": 97},
    "2-7b": SMALL | {"vocab_size": 125_696, "model_max_length": 64},
    "2-13b": LARGE | {"vocab_size": 125_696},
}
PROMPTS = [(torch.arange(length) * 31 + 11) % 97 for length in (40, 6)]
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 6e-3}


def random_weights(config: dict[str, Any]) -> Weights:
    """Under the names of Baichuan's files, so large that wrong attention shows."""
    torch.manual_seed(0)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    weights = {
        "model.embed_tokens.weight": torch.randn(config["vocab_size"], hidden),
        "model.norm.weight": torch.rand(hidden) + 0.5,
        "lm_head.weight": torch.randn(config["vocab_size"], hidden) * 0.3,
    }
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        scale = hidden**-0.5
        weights |= {
            layer + "input_layernorm.weight": torch.rand(hidden) + 0.5,
            layer + "post_attention_layernorm.weight": torch.rand(hidden) + 0.5,
            layer + "self_attn.W_pack.weight": torch.randn(3 * hidden, hidden) * scale,
            layer + "self_attn.o_proj.weight": torch.randn(hidden, hidden) * scale,
            layer + "mlp.gate_proj.weight": torch.randn(inner, hidden) * scale,
            layer + "mlp.up_proj.weight": torch.randn(inner, hidden) * scale,
            layer + "mlp.down_proj.weight": torch.randn(hidden, inner) * inner**-0.5,
        }
    return weights


def norm(x: Tensor, weight: Tensor) -> Tensor:
    squares = x.square().mean(-1, keepdim=True)
    return x * (squares + float(SIZES["rms_norm_eps"])).rsqrt() * weight


def rotated(x: Tensor) -> Tensor:
    """Heads ``[H, T, D]``, the pairs of dimensions half a head apart."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * frequencies
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def biases(num_heads: int, length: int) -> Tensor:
    """Slopes by the recipe of the paper, times how far a key lies back: ``[H, T, T]``."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * head / power) for head in range(1, power + 1)]
    between = [2 ** (-4 * head / power) for head in range(1, 2 * power, 2)]
    per_head = torch.tensor([*slopes, *between][:num_heads], dtype=torch.float64)
    places = torch.arange(length)
    return per_head[:, None, None] * (places[None, :] - places[:, None])


def plain_logits(config: dict[str, Any], weights: Weights, tokens: Tensor) -> Tensor:
    """Logits float64 ``[T, V]`` of one sequence."""
    num_heads, is_large = config["num_attention_heads"], config["hidden_size"] > 32
    x = weights["model.embed_tokens.weight"][tokens]
    hidden = torch.full((len(tokens), len(tokens)), -math.inf, dtype=x.dtype).triu(1)
    for index in range(config["num_hidden_layers"]):
        layer = {
            name.split(f"layers.{index}.")[1]: weight
            for name, weight in weights.items()
            if f"layers.{index}." in name
        }
        packed = norm(x, layer["input_layernorm.weight"]) @ layer["self_attn.W_pack.weight"].T
        parts = packed.chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (num_heads, -1)).transpose(0, 1) for part in parts)
        if not is_large:
            query, key = rotated(query), rotated(key)
        scores = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5 + hidden
        if is_large:
            scores = scores + biases(num_heads, len(tokens))
        mixed = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
        x = x + mixed @ layer["self_attn.o_proj.weight"].T
        inner = norm(x, layer["post_attention_layernorm.weight"])
        gate = functional.silu(inner @ layer["mlp.gate_proj.weight"].T)
        x = x + gate * (inner @ layer["mlp.up_proj.weight"].T) @ layer["mlp.down_proj.weight"].T
    head = weights["lm_head.weight"]
    if config["vocab_size"] == 125_696:
        head = head / head.norm(dim=-1, keepdim=True)
    return norm(x, weights["model.norm.weight"]) @ head.T


@pytest.fixture
def save(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    save_tokenizer: Callable[[Path], None],
) -> Callable[[str], tuple[Path, dict[str, Any], Weights]]:
    """Saves a form as its makers do; its directory, config and weights."""
    monkeypatch.setenv("PAGEDSERVE_CACHE", str(tmp_path / "cache"))

    def make(form: str) -> tuple[Path, dict[str, Any], Weights]:
        config = SIZES | TOKENS | FORMS[form] | {"model_type": "baichuan"}
        code = {"AutoConfig": "configuration_baichuan.BaichuanConfig"}
        (tmp_path / "config.json").write_text(json.dumps(config | {"auto_map": code}))
        weights = random_weights(config)
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        save_tokenizer(tmp_path)
        return tmp_path, config, weights

    return make


@pytest.mark.parametrize("precision", ["float32", "half"])
@pytest.mark.parametrize(
    ("form", "backend"),
    [
        *((form, "rust") for form in FORMS),
        *((form, "torch") for form in ("7b", "13b")),
        *(pytest.param(form, "triton", marks=pytest.mark.slow) for form in ("7b", "13b")),
    ],
)
def test_logits_are_those_of_the_plain_model(
    save: Any, load_on: Callable[..., LoadedModel], form: str, backend: Any, precision: str
) -> None:
    directory, config, weights = save(form)
    loaded = load_on(backend, directory, precision)
    assert loaded.max_model_len == 64
    found = paged_logits(loaded.model, loaded.layers, PROMPTS, [33, 5], loaded.attention_backend)
    rounded = {name: weight.to(loaded.dtype).double() for name, weight in weights.items()}
    for prompt, ours in zip(PROMPTS, found, strict=True):
        exact = plain_logits(config, rounded, prompt)
        error = float((ours.cpu().double() - exact).abs().max() / exact.abs().max())
        assert error <= BOUNDS[loaded.dtype]


@pytest.mark.parametrize("form", ["7b", "13b"])
def test_the_engine_generates_what_the_plain_model_says(save: Any, form: str) -> None:
    directory, config, weights = save(form)
    llm = LLM(model=str(directory), dtype="float32", num_gpu_blocks=32, block_size=4)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = [prompt.tolist() for prompt in PROMPTS]
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    exact = {name: weight.double() for name, weight in weights.items()}
    for prompt, output in zip(prompts, outputs, strict=True):
        generated = list(output.outputs[0].token_ids)
        logits = plain_logits(config, exact, torch.tensor(prompt + generated[:-1]))
        assert logits[len(prompt) - 1 :].argmax(-1).tolist() == generated
