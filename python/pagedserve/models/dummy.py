"""Models that nobody trained, to measure without weights: same shapes, made-up contents."""

from pathlib import Path
from typing import cast

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def dummy_model(
    hf_config: PreTrainedConfig,
    *,
    attention: str,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> PreTrainedModel:
    """A model with the weights that its class begins training with.

    Args:
        hf_config: its shapes.
        attention: name of the attention function.
        dtype: of the weights.
        device: where they are made; nothing of them passes through the host.
        seed: the same seed and device make the same weights.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), device:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            hf_config, dtype=dtype, attn_implementation=attention
        )
    return cast(PreTrainedModel, model)


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory has the files of a tokenizer."""
    return any((directory / name).is_file() for name in _TOKENIZER_FILES)


def number_tokenizer(vocab_size: int) -> PreTrainedTokenizerBase:
    """A tokenizer whose words are token ids, for a directory that has none: "5 17" is [5, 17]."""
    words = {str(token): token for token in range(vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="0")
