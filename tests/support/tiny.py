"""A tiny random Llama with a tokenizer, saved in Hugging Face format.

It runs on the same kernels as a real model and computes a step in a millisecond: what is claimed
of bookkeeping is shown on it, bit for bit.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 97
EOS = 2


def save_tokenizer(directory: Path) -> None:
    """Words ``w1`` to ``w96``, each with a space before it."""
    words = {"<unk>": 0, **{f" w{index}": index for index in range(1, VOCAB_SIZE)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.save_pretrained(directory)


def enlarge_weights(model: torch.nn.Module, *named: str) -> None:
    """Draw matrices anew, and parameters of these names: a wrong key or value shows."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or any(part in name for part in named):
                parameter.normal_(0, 0.2)


def save_tiny_llama(directory: Path, *, max_model_len: int = 128) -> Path:
    """Saves the model; the directory."""
    save_llama_weights(
        directory,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=max_model_len,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=EOS,
    )
    save_tokenizer(directory)
    return directory


def save_llama_weights(directory: Path, **config: Any) -> None:
    """Saves a model of two layers with these further fields of its config, without tokenizer."""
    torch.manual_seed(0)
    sizes = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        **{"num_hidden_layers": 2} | config,
    )
    model = LlamaForCausalLM(sizes)
    enlarge_weights(model)
    model.save_pretrained(directory)
