"""Bare SentencePiece models, against SentencePiece itself."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from pagedserve.config import EngineArgs
from pagedserve.errors import ModelLoadError
from pagedserve.models.tokenizer.transformers_tokenizer import load_transformers_tokenizer

sentencepiece: Any = pytest.importorskip("sentencepiece")

TEXTS = [
    "Hello  wörld, 你好!",
    " two\n\n\tTabs   three 1234",
    "🙂 ",
    "don't_stop",
    "<s> is no token",
]


@pytest.fixture
def llama_directory(tmp_path: Path) -> Path:
    """A Llama with Mistral's first tokenizer, as nothing but a SentencePiece model."""
    data = Path(pytest.importorskip("mistral_common").__file__).parent / "data"
    shutil.copy(data / "tokenizer.model.v1", tmp_path / "tokenizer.model")
    LlamaConfig().save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    return tmp_path


def test_a_sentencepiece_model_splits_as_sentencepiece_does(llama_directory: Path) -> None:
    tokenizer = load_transformers_tokenizer(EngineArgs(str(llama_directory), load_format="dummy"))
    exact = sentencepiece.SentencePieceProcessor(
        model_file=str(llama_directory / "tokenizer.model")
    )
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        assert ids == exact.encode(text)
        assert tokenizer.decode(ids) == exact.decode(ids)


def test_a_conversion_that_splits_otherwise_is_refused(llama_directory: Path) -> None:
    # A model that takes runs of spaces for one, which Llama's class does not know.
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["Hello two words", "end. spaces in front", "no space Tab"]),
        model_prefix=str(llama_directory / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    with pytest.raises(ModelLoadError, match="in another way than SentencePiece does"):
        load_transformers_tokenizer(EngineArgs(str(llama_directory), load_format="dummy"))
