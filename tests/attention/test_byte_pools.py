"""Pools of bytes under torch's models, against transformers with a cache that rounds alike."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pagedserve import LLM, SamplingParams
from pagedserve.attention.triton import BACKEND as TRITON
from pagedserve.config.cache import KVCacheDtype
from pagedserve.errors import ConfigError
from tests.support.decoders import save_decoder
from tests.support.families import save_family
from tests.support.rounding_cache import LEVELS, RoundingCache

FEW_HEADS: dict[str, Any] = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
}


def check(directory: Path, cache_dtype: KVCacheDtype, tokens: list[int], **options: Any) -> None:
    """Log-probabilities of a prompt's tokens, with keys and values rounded alike."""

    def losses(logits: torch.Tensor) -> torch.Tensor:
        return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        ids = torch.tensor([tokens])
        expected = losses(model(ids, past_key_values=RoundingCache(cache_dtype)).logits[0])
        exact = losses(model(ids).logits[0])
    options |= {"backend": "torch", "dtype": "float32", "kv_cache_dtype": cache_dtype}
    with LLM(str(directory), **options) as llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        (output,) = llm.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    listed = zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
    found = torch.tensor([entry[token].logprob for token, entry in listed if entry is not None])
    errors = (found - expected).abs()
    # A number that lies between two levels may be rounded to the other by a float's last bit.
    assert errors.median() < 0.1 * (exact - expected).abs().median()
    assert errors.max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize("cache_dtype", LEVELS)
@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3", "mixtral"])
def test_log_probabilities_are_those_of_rounded_keys_and_values(
    tmp_path: Path, name: str, cache_dtype: KVCacheDtype
) -> None:
    tokens = np.random.default_rng(5).integers(3, 1000, 80).tolist()
    check(save_family(tmp_path, name), cache_dtype, tokens)


# With fused layers, and without.
@pytest.mark.parametrize(("name", "cache_dtype"), [("llama", "int8"), ("gemma2", "fp8_e4m3")])
def test_triton_rounds_them_alike(
    device: torch.device, tmp_path: Path, name: str, cache_dtype: KVCacheDtype
) -> None:
    directory = save_decoder(tmp_path, name, head_dim=16, **FEW_HEADS)
    # Past a block's end; the check at load is then no longer than the prompt here.
    tokens = np.random.default_rng(5).integers(3, 97, 20).tolist()
    options: dict[str, Any] = {"device": device.type, "attention_backend": "triton"}
    check(directory, cache_dtype, tokens, num_gpu_blocks=8, max_model_len=24, **options)


def test_a_gpu_that_does_not_convert_them_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    gpu = torch.device("cuda")
    for cache_dtype in ("auto", "int8", "fp8_e5m2"):
        TRITON.check_cache_dtype(cache_dtype, gpu)
    with pytest.raises(
        ConfigError, match=r"'fp8_e4m3', which .* 8\.9 .* cuda has 8\.0: give 'int8'"
    ):
        TRITON.check_cache_dtype("fp8_e4m3", gpu)


def test_other_backends_refuse_them_before_weights_are_read(tmp_path: Path) -> None:
    directory = save_family(tmp_path, "llama")
    (directory / "model.safetensors").write_bytes(b"")  # which is refused once it is read
    options: dict[str, Any] = {"kv_cache_dtype": "fp8", "attention_backend": "torch"}
    refusal = r"kv_cache_dtype is 'fp8_e4m3', and attention_backend 'torch' stores .* on cpu: leave"
    with pytest.raises(ConfigError, match=refusal):
        LLM(str(directory), backend="torch", **options)


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    directory = save_decoder(tmp_path, "llama", head_dim=12)
    with pytest.raises(ConfigError, match="which needs heads of a multiple of 16 numbers, and"):
        LLM(str(directory), backend="torch", kv_cache_dtype="int8")
