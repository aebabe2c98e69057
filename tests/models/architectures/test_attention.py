"""Architectures that attend by themselves: equal to transformers on every backend."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagedserve import LLM, SamplingParams
from pagedserve.config import EngineArgs
from pagedserve.errors import UnsupportedModelError
from pagedserve.models.loader import load_model

SaveTiny = Callable[..., Path]
AssertExact = Callable[..., None]

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


@pytest.mark.parametrize(("model_type", "options"), [*WITH_BIASES, ("falcon", FALCON)])
def test_logits_in_triton(
    save_tiny: SaveTiny,
    assert_exact: AssertExact,
    device: torch.device,
    model_type: str,
    options: dict[str, Any],
) -> None:
    directory = save_tiny(model_type, **options)
    args = EngineArgs(model=str(directory), attention_backend="triton", dtype="float32")
    assert_exact(load_model(args, device), directory, attention=reference(options))


@pytest.mark.parametrize(("model_type", "options"), [*WITH_BIASES, WITH_WINDOW, XGLM])
def test_the_engine_generates_as_transformers_does(
    save_tiny: SaveTiny, model_type: str, options: dict[str, Any]
) -> None:
    directory = save_tiny(model_type, **options)
    prompts = [[(7 * place + 3 * length) % 97 for place in range(length)] for length in (3, 17, 30)]
    llm = LLM(
        model=str(directory),
        dtype="float32",
        num_gpu_blocks=24,
        block_size=4,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        max_num_batched_tokens=16,
        max_num_seqs=4,
    )
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate(prompt_token_ids=prompts * 2, sampling_params=params, use_tqdm=False)
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    for prompt, output in zip(prompts * 2, outputs, strict=True):
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
        )
        assert list(output.outputs[0].token_ids) == expected[0, len(prompt) :].tolist()


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
