"""Llama 4 beyond a chunk and beyond where its temperature sets in: equal to transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedserve import LLM
from pagedserve.errors import ConfigError
from pagedserve.models.loader import LoadedModel

LLAMA4: dict[str, Any] = {
    "attention_chunk_size": 16,
    "floor_scale": 8,
    "attn_scale": 0.5,
    "no_rope_layers": [1, 0],
    "head_dim": 8,
    "intermediate_size_mlp": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
PRECISIONS = ("float32", "half")


@pytest.mark.parametrize(
    ("backend", "precision"),
    [
        *(
            (backend, precision)
            for backend in ("rust", "torch", "sdpa")
            for precision in PRECISIONS
        ),
        *(pytest.param("triton", each, marks=pytest.mark.slow) for each in PRECISIONS),
    ],
)
def test_logits_beyond_a_chunk(
    save_tiny: Callable[..., Path],
    assert_exact: Callable[..., None],
    load_on: Callable[..., LoadedModel],
    backend: str,
    precision: str,
) -> None:
    directory = save_tiny("llama4_text", **LLAMA4)
    loaded = load_on(backend, directory, precision)
    assert loaded.max_model_len == 64
    assert_exact(loaded, directory)


def test_the_engine_generates_as_transformers_does(
    save_tiny: Callable[..., Path], assert_generates: Callable[..., None]
) -> None:
    assert_generates(save_tiny("llama4_text", **LLAMA4))


def test_blocks_that_lie_across_chunks_are_refused(save_tiny: Callable[..., Path]) -> None:
    directory = save_tiny("llama4_text", **LLAMA4)
    llm = LLM(model=str(directory), num_gpu_blocks=8, block_size=5)
    with pytest.raises(ConfigError, match=r"block_size is 5.*chunks of 16 tokens.*divide"):
        llm.generate(prompt_token_ids=[[3, 4, 5]], use_tqdm=False)
