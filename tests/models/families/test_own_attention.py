"""Architectures that attend by themselves: equal to transformers on every backend."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedserve.config import EngineArgs
from pagedserve.errors import UnsupportedModelError
from pagedserve.models.loader import LoadedModel, load_model

SaveTiny = Callable[..., Path]
AssertExact = Callable[..., None]
AssertGenerates = Callable[..., None]
LoadOn = Callable[..., LoadedModel]

CPU = torch.device("cpu")
# Six heads: the slopes of ALiBi are no single series then.
BLOOM = {"hidden_size": 48, "n_layer": 2, "n_head": 6, "seq_length": 64}
MPT = {"d_model": 48, "n_heads": 6, "n_layers": 2, "max_seq_len": 64}
GPTJ = {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64}
FALCON = {"hidden_size": 48, "num_attention_heads": 6, "ffn_hidden_size": 64}
FALCONS: dict[str, dict[str, Any]] = {
    "7b": {"multi_query": True, "parallel_attn": True},
    "40b": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "rw": {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
}
NEO = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}

ARCHITECTURES: list[tuple[str, dict[str, Any]]] = [
    ("bloom", BLOOM),
    ("mpt", MPT),
    *(("falcon", FALCON | form) for form in FALCONS.values()),
    ("gptj", GPTJ),
    ("codegen", GPTJ | {"n_ctx": 64}),
    ("gpt_neo", NEO | {"window_size": 8}),
    ("gpt_neox_japanese", {"intermediate_multiple_size": 2}),
    ("openai-gpt", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
]
WITH_BIASES = [ARCHITECTURES[index] for index in (0, 1, 4)]
# One of each kind of call: with biases, shared heads, rotated within the call.
IN_TRITON = [
    WITH_BIASES[0],
    *(
        pytest.param(architecture, marks=pytest.mark.slow)
        for architecture in (*WITH_BIASES[1:3], *ARCHITECTURES[2:4], ARCHITECTURES[5])
    ),
]
WITH_WINDOW = ARCHITECTURES[7]
# transformers cannot compute it in float64.
XGLM = ("xglm", {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48})


def reference(options: dict[str, Any]) -> str:
    """The attention of transformers to compare with: Falcon's eager one adds biases twice."""
    return "sdpa" if options.get("alibi") else "eager"


@pytest.mark.parametrize(
    "how", [(a, b) for a in ("rust", "torch") for b in ("float32", "bfloat16")]
)
@pytest.mark.parametrize(("model_type", "options"), ARCHITECTURES)
def test_logits_are_those_of_transformers(
    save_tiny: SaveTiny,
    assert_exact: AssertExact,
    model_type: str,
    options: dict[str, Any],
    how: Any,
) -> None:
    directory = save_tiny(model_type, **options)
    backend, dtype = how
    args = EngineArgs(model=str(directory), attention_backend=backend, dtype=dtype)
    loaded = load_model(args, CPU)
    assert loaded.max_model_len == 64
    assert_exact(loaded, directory, attention=reference(options))


@pytest.mark.parametrize("precision", ["float32", pytest.param("half", marks=pytest.mark.slow)])
@pytest.mark.parametrize("architecture", IN_TRITON)
def test_logits_in_triton(
    save_tiny: SaveTiny,
    assert_exact: AssertExact,
    load_on: LoadOn,
    precision: str,
    architecture: tuple[str, dict[str, Any]],
) -> None:
    model_type, options = architecture
    directory = save_tiny(model_type, **options)
    # The check at load is then no longer than the prompts here.
    loaded = load_on("triton", directory, precision, max_model_len=24)
    assert_exact(loaded, directory, attention=reference(options))


@pytest.mark.parametrize("precision", ["float32", "half"])
@pytest.mark.parametrize(
    "backend", ["rust", "torch", pytest.param("triton", marks=pytest.mark.slow)]
)
def test_logits_of_xglm(
    save_tiny: SaveTiny,
    assert_exact: AssertExact,
    load_on: LoadOn,
    precision: str,
    backend: str,
) -> None:
    directory = save_tiny(XGLM[0], **XGLM[1])
    loaded = load_on(backend, directory, precision)
    assert_exact(loaded, directory, exact_dtype=torch.float32)


@pytest.mark.parametrize(("model_type", "options"), [*WITH_BIASES, WITH_WINDOW, XGLM])
def test_the_engine_generates_as_transformers_does(
    save_tiny: SaveTiny,
    assert_generates: AssertGenerates,
    model_type: str,
    options: dict[str, Any],
) -> None:
    directory = save_tiny(model_type, **options)
    assert_generates(directory, attention=reference(options))


def test_the_largest_bias_of_mpt_is_that_of_its_config(
    save_tiny: SaveTiny, assert_exact: AssertExact
) -> None:
    directory = save_tiny("mpt", **MPT, attn_config={"alibi_bias_max": 16})

    def biases_of_config(model: Any) -> None:
        make = model.transformer.build_mpt_alibi_tensor
        model.transformer.build_mpt_alibi_tensor = lambda heads, length, device: make(
            heads, length, 16, device
        )

    loaded = load_model(EngineArgs(model=str(directory)), CPU)
    assert_exact(loaded, directory, biases_of_config)


def test_an_mpt_without_biases_is_refused(save_tiny: SaveTiny) -> None:
    directory = save_tiny("mpt", **MPT, attn_config={"alibi": False})
    with pytest.raises(UnsupportedModelError, match=r"Mpt.*alibi false.*accepted is true"):
        load_model(EngineArgs(model=str(directory)), CPU)
