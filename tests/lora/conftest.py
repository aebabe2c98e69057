"""A tiny model, and adapters of it."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.tiny import save_tiny_llama


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def base(tiny: Path) -> PreTrainedModel:
    """transformers' own; a test leaves it as it was."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    model.eval()
    return model
