"""Tiny models with a head of classes, and a tokenizer of words that knows pairs of texts."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from tests.support.tiny import enlarge_weights


def save_classifier(directory: Path, config: dict[str, Any]) -> Path:
    """Saves a model of a config, with weights so large that wrong attention shows.

    Its tokenizer tells of which of two texts a token is where the model is BERT.
    """
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**config))
    enlarge_weights(model, "bias")
    model.save_pretrained(directory)
    _save_tokenizer(directory, has_types=config["model_type"] == "bert")
    return directory


def _save_tokenizer(directory: Path, *, has_types: bool) -> None:
    words = {"<unk>": 0, "[CLS]": 1, "[SEP]": 2, **{f"w{index}": index for index in range(3, 97)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    names = ["input_ids", "attention_mask", *["token_type_ids"] * has_types]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=names)
    fast.save_pretrained(directory)
