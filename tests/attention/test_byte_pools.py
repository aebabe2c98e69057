"""Pools of bytes under torch's models, against transformers with a cache that rounds alike."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pagedserve import LLM, SamplingParams
from pagedserve.config.cache import KVCacheDtype
from pagedserve.errors import ConfigError
from tests.support.decoders import save_decoder
from tests.support.families import save_family
from tests.support.rounding_cache import LEVELS, RoundingCache

TOKENS = np.random.default_rng(5).integers(3, 1000, 80).tolist()


def losses(logits: torch.Tensor) -> torch.Tensor:
    """Log-probability of each token after the first."""
    return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]


@pytest.mark.parametrize("cache_dtype", LEVELS)
@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3", "mixtral"])
def test_log_probabilities_are_those_of_rounded_keys_and_values(
    tmp_path: Path, name: str, cache_dtype: KVCacheDtype
) -> None:
    directory = save_family(tmp_path, name)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        ids = torch.tensor([TOKENS])
        expected = losses(model(ids, past_key_values=RoundingCache(cache_dtype)).logits[0])
        exact = losses(model(ids).logits[0])
    with LLM(str(directory), backend="torch", kv_cache_dtype=cache_dtype) as llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        (output,) = llm.generate({"prompt_token_ids": TOKENS}, params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    listed = zip(TOKENS[1:], output.prompt_logprobs[1:], strict=True)
    found = torch.tensor([entry[token].logprob for token, entry in listed if entry is not None])
    errors = (found - expected).abs()
    # A number that lies between two levels may be rounded to the other by a float's last bit.
    assert errors.median() < 0.1 * (exact - expected).abs().median()
    assert errors.max() < 0.02 * expected.abs().max()


def test_other_backends_refuse_them_before_weights_are_read(tmp_path: Path) -> None:
    directory = save_family(tmp_path, "llama")
    (directory / "model.safetensors").write_bytes(b"")  # which is refused once it is read
    options: dict[str, Any] = {"kv_cache_dtype": "fp8", "attention_backend": "torch"}
    with pytest.raises(ConfigError, match=r"kv_cache_dtype is 'fp8_e4m3', .* this is 'torch' on"):
        LLM(str(directory), backend="torch", **options)


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    directory = save_decoder(tmp_path, "llama", head_dim=12)
    with pytest.raises(ConfigError, match="which needs heads of a multiple of 16 numbers, and"):
        LLM(str(directory), backend="torch", kv_cache_dtype="int8")
