"""Tiny random models with a tokenizer, saved in Hugging Face format."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 97
SETTINGS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

SaveTiny = Callable[..., Path]


@pytest.fixture
def save_tokenizer() -> Callable[[Path], None]:
    """Saves a word-level tokenizer into a directory."""

    def save(directory: Path) -> None:
        words = {"<unk>": 0, **{f"w{index}": index for index in range(1, VOCAB_SIZE)}}
        tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
        fast.save_pretrained(directory)

    return save


@pytest.fixture
def save_tiny(
    tmp_path: Path, save_tokenizer: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> SaveTiny:
    """Saves a causal model of a type, with weights so large that wrong attention shows."""
    monkeypatch.setenv("PAGEDSERVE_CACHE", str(tmp_path / "cache"))

    def save(model_type: str, **options: Any) -> Path:
        torch.manual_seed(0)
        config = AutoConfig.for_model(model_type, **(SETTINGS | options))
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1 or "bias" in name or "sinks" in name:
                    parameter.normal_(0, 0.2)
        directory = tmp_path / model_type
        model.save_pretrained(directory)
        save_tokenizer(directory)
        return directory

    return save
