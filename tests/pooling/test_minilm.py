"""all-MiniLM-L6-v2 by sentence-transformers' formula."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from pagedserve import LLM

TEXTS = [
    "A cat sits on the mat.",
    "How do I bake sourdough bread at home without a Dutch oven?",
    "x",
    "It's so sunny outside! " * 9,
    "Le prix du pain a encore augment\u00e9.",
]


@torch.inference_mode()
def formula(directory: Path) -> np.ndarray[Any, Any]:
    """The mean of all tokens' states, of length 1, in a padded batch."""
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModel.from_pretrained(directory, attn_implementation="eager").eval()
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    mask = batch["attention_mask"][..., None]
    sums = (model(**batch).last_hidden_state * mask).sum(dim=1)
    return torch.nn.functional.normalize(sums / mask.sum(dim=1)).numpy()


@pytest.mark.parametrize(("dtype", "least"), [("float32", 0.99999), ("bfloat16", 0.999)])
def test_embeddings_are_those_of_the_formula(minilm: Path, dtype: Any, least: float) -> None:
    llm = LLM(str(minilm), dtype=dtype, use_tqdm_on_load=False)
    assert llm.llm_engine.max_model_len == 256
    found, turned = (
        np.array([output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)])
        for texts in (TEXTS, TEXTS[::-1])
    )
    assert (found * formula(minilm)).sum(axis=1).min() > least
    if dtype == "float32":
        np.testing.assert_allclose(turned[::-1], found, atol=1e-5)
