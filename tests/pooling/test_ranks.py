"""Models that pool on two ranks give the vectors of transformers' model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from pagedserve import LLM
from tests.pooling.test_decoders import LAST, PROMPTS, expected, save_decoder  # noqa: F401
from tests.pooling.test_encoders import PROMPTS as TEXTS
from tests.pooling.test_encoders import embed
from tests.pooling.test_encoders import expected as of_encoder
from tests.support.classifiers import save_classifier

SHARED: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "dtype": "float32",
    "num_gpu_blocks": 24,
    "block_size": 4,
    "max_num_seqs": 3,
    "use_tqdm_on_load": False,
}
GIVEN: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]


@pytest.mark.parametrize("mode", ["last", pytest.param("mean", marks=pytest.mark.slow)])
def test_embeddings(
    save_decoder: Callable[..., Path],  # noqa: F811  # the fixture
    write_rules: Callable[..., None],
    mode: str,
) -> None:
    directory, options = save_decoder(), SHARED
    if mode == "last":
        write_rules(directory, LAST)
        exact = expected(directory)
        options = SHARED | {"enable_prefix_caching": True, "enable_chunked_prefill": True}
    else:
        write_rules(directory, {"pooling_mode_mean_tokens": True})
        exact = expected(directory, lambda states: states.mean(dim=0))
    llm = LLM(str(directory), **options)
    try:
        for _ in range(2):
            outputs = llm.embed(GIVEN, use_tqdm=False)
            found = np.array([output.outputs.embedding for output in outputs])
            np.testing.assert_allclose(found, exact, rtol=5e-5, atol=5e-5)
    finally:
        llm.llm_engine.shutdown()


@pytest.mark.parametrize(
    ("kind", "size"), [("mean", 2), pytest.param("cls", 3, marks=pytest.mark.slow)]
)
def test_encoders(
    save_bare: Callable[..., Path], write_rules: Callable[..., None], kind: str, size: int
) -> None:
    sizes = {"num_attention_heads": 2 * size, "num_key_value_heads": size, "hidden_size": 48}
    directory = save_bare("eurobert", **sizes, intermediate_size=96)
    write_rules(directory, {f"pooling_mode_{kind}_token{'s' * (kind == 'mean')}": True})
    wanted = of_encoder(directory, lambda states: states.mean(0) if kind == "mean" else states[0])
    llm = LLM(str(directory), **SHARED | {"tensor_parallel_size": size})
    try:
        np.testing.assert_allclose(embed(llm, TEXTS), wanted, atol=2e-5)
    finally:
        llm.llm_engine.shutdown()


@pytest.mark.slow
def test_classes(tmp_path: Path, tiny_config: dict[str, Any]) -> None:
    directory = save_classifier(tmp_path / "model", tiny_config | {"num_labels": 3})
    model: Any = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    with torch.inference_mode():
        logits = [model(input_ids=torch.tensor([prompt])).logits[0] for prompt in PROMPTS]
    llm = LLM(str(directory), **SHARED)
    try:
        outputs = llm.classify(GIVEN, use_tqdm=False)
    finally:
        llm.llm_engine.shutdown()
    for output, wanted in zip(outputs, logits, strict=True):
        np.testing.assert_allclose(output.outputs.probs, wanted.softmax(-1), rtol=1e-4, atol=1e-5)
