"""Tiny encoder-decoders, one of each family, made once, and what transformers makes of prompts."""

import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    MarianConfig,
    MBartConfig,
    MT5Config,
    PegasusConfig,
    T5Config,
)

from pagedserve import LLM
from tests.support.tiny import EOS, VOCAB_SIZE, enlarge_weights, save_tokenizer

START = 3
FAMILIES: dict[str, Any] = {
    "bart": BartConfig,
    "marian": MarianConfig,
    "mbart": MBartConfig,
    "mt5": MT5Config,
    "pegasus": PegasusConfig,
    "t5": T5Config,
}
# What others call otherwise; biases that reach their last distance within a prompt.
T5_SIZES: dict[str, Any] = {
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "d_kv": 16,
    "d_ff": 128,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 11,
}


class Family(NamedTuple):
    """A tiny model in a directory, and transformers' own."""

    directory: Path
    peer: Any

    def load(self, **options: Any) -> LLM:
        limits: dict[str, Any] = {"generation_config": "vllm", "use_tqdm_on_load": False}
        limits |= {"block_size": 4, "max_model_len": 64}
        return LLM(str(self.directory), **({"num_gpu_blocks": 256} | limits | options))

    def generate(self, prompt: list[int], num_tokens: int, **options: Any) -> list[list[int]]:
        """The new tokens of each sequence that transformers returns."""
        found = self.peer.generate(
            torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, **options
        )
        start = options["decoder_input_ids"].shape[1] if "decoder_input_ids" in options else 1
        return [_cut(sequence[start:]) for sequence in found.tolist()]


def _cut(tokens: list[int]) -> list[int]:
    """Without what pads a sequence that has ended."""
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


MakeFamily: TypeAlias = Callable[..., Family]


def prompts(num_prompts: int) -> list[list[int]]:
    """For the encoder, shorter and longer than a block."""
    rng = random.Random(17)
    return [rng.choices(range(4, VOCAB_SIZE), k=rng.randint(1, 40)) for _ in range(num_prompts)]


def _save(name: str, directory: Path, forced_bos: int | None) -> Path:
    torch.manual_seed(0)
    config = FAMILIES[name](
        vocab_size=VOCAB_SIZE,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=EOS,
        decoder_start_token_id=START,
        forced_eos_token_id=None,
        **(T5_SIZES if "t5" in name else {}),
    )
    model: Any = AutoModelForSeq2SeqLM.from_config(config)
    model.generation_config.forced_bos_token_id = forced_bos
    enlarge_weights(model)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeFamily]:
    folder = tmp_path_factory.mktemp("encoder_decoder")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several only wait for each other in steps this small

    @cache
    def made(name: str, forced_bos: int | None = None) -> Family:
        directory = _save(name, folder / f"{name}-{forced_bos}", forced_bos)
        peer: Any = AutoModelForSeq2SeqLM.from_pretrained(directory)
        return Family(directory, peer.eval())

    yield made
    torch.set_num_threads(num_threads)
