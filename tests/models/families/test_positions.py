"""Architectures with positions of their own: equal to transformers in a flat batch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedserve.config import EngineArgs
from pagedserve.errors import ConfigError
from pagedserve.models.loader import load_model

SaveTiny = Callable[..., Path]
AssertExact = Callable[..., None]

CPU = torch.device("cpu")
SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "num_hidden_layers": 2,
}


@pytest.mark.parametrize(
    "model_type",
    [
        "bart",
        "bigbird_pegasus",
        "blenderbot",
        "blenderbot-small",
        "marian",
        "mbart",
        "pegasus",
        "plbart",
    ],
)
def test_decoders_that_count_positions(
    save_tiny: SaveTiny, assert_exact: AssertExact, model_type: str
) -> None:
    directory = save_tiny(model_type, **SEQ2SEQ)
    loaded = load_model(EngineArgs(model=str(directory), dtype="float32"), CPU)
    assert loaded.max_model_len == 64
    assert_exact(loaded, directory)


def test_the_decoder_of_whisper(save_tiny: SaveTiny, assert_exact: AssertExact) -> None:
    directory = save_tiny("whisper", **SEQ2SEQ, max_target_positions=64)
    loaded = load_model(EngineArgs(model=str(directory), dtype="float32"), CPU)
    assert loaded.max_model_len == 64
    assert_exact(loaded, directory)


@pytest.mark.parametrize(
    "model_type",
    [
        "camembert",
        "data2vec-text",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    ],
)
def test_positions_after_that_of_padding(
    save_tiny: SaveTiny, assert_exact: AssertExact, model_type: str
) -> None:
    options: dict[str, Any] = {"default_language": "en_XX"} if model_type == "xmod" else {}
    directory = save_tiny(model_type, is_decoder=True, pad_token_id=1, **options)
    loaded = load_model(EngineArgs(model=str(directory), dtype="float32"), CPU)
    assert loaded.max_model_len == 62
    assert_exact(loaded, directory)
    with pytest.raises(ConfigError, match="is 64, of which it uses those from 2"):
        load_model(EngineArgs(model=str(directory), max_model_len=63), CPU)


def test_the_check_of_positions_has_no_padding(
    save_tiny: SaveTiny, assert_exact: AssertExact
) -> None:
    # transformers gives padding a position of its own; 14 is among the tokens of the check.
    directory = save_tiny("roberta", is_decoder=True, pad_token_id=14)
    loaded = load_model(EngineArgs(model=str(directory), dtype="float32"), CPU)
    assert_exact(loaded, directory)
