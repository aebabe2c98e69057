"""Tiny models that embed, and sentence-transformers' files beside them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

from tests.support.tiny import enlarge_weights

SaveEncoder = Callable[..., Path]

MODULES = [
    ("", "sentence_transformers.models.Transformer"),
    ("1_Pooling", "sentence_transformers.models.Pooling"),
    ("2_Normalize", "sentence_transformers.models.Normalize"),
]


@pytest.fixture
def save_bare(tmp_path: Path, tiny_config: dict[str, Any]) -> SaveEncoder:
    """Saves a model without a head, with weights so large that wrong attention shows."""

    def save(model_type: str, **options: Any) -> Path:
        torch.manual_seed(0)
        config = AutoConfig.for_model(**(tiny_config | {"model_type": model_type} | options))
        model = AutoModel.from_config(config)
        enlarge_weights(model, "bias")
        directory = tmp_path / model_type
        model.save_pretrained(directory)
        words = {"<unk>": 0, **{f"w{index}": index for index in range(1, 97)}}
        tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
        return directory

    return save


@pytest.fixture
def write_rules() -> Callable[..., None]:
    """Writes the files of sentence-transformers beside a model."""

    def write(
        directory: Path, pooling: dict[str, Any], *, normalizes: bool = True, **more: Any
    ) -> None:
        modules = MODULES if normalizes else MODULES[:2]
        listed = [{"path": path, "type": kind} for path, kind in modules]
        (directory / "modules.json").write_text(json.dumps(listed))
        (directory / "1_Pooling").mkdir(exist_ok=True)
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        (directory / "config_sentence_transformers.json").write_text(json.dumps(more))

    return write
