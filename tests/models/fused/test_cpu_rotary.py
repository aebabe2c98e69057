"""Rotary embeddings of a model beside those that replace them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagedserve.models.fused.cpu.rotary import CpuRotary, replace_rotary
from tests.support.decoders import DECODERS, save_decoder

POSITIONS = torch.tensor([[0, 1, 2, 77, 255, 4000]])


def load(directory: Path, name: str, **fields: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(save_decoder(directory, name, **fields)).model


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_angles_are_those_of_the_model(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    model = load(tmp_path, name)
    x, theirs = torch.zeros(1, dtype=dtype), model.rotary_emb
    kinds = list(theirs.rope_type) if isinstance(theirs.rope_type, dict) else None
    replace_rotary(model)
    ours = model.rotary_emb
    assert isinstance(ours, CpuRotary)
    for kind in kinds or [None]:
        more = () if kind is None else (kind,)
        for found, expected in zip(
            ours(x, POSITIONS, *more), theirs(x, POSITIONS, *more), strict=True
        ):
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            # A unit in the last place of a frequency is 2e-4 of an angle of 4,000.
            atol = 5e-4 if dtype is torch.float32 else 1e-2
            torch.testing.assert_close(found, expected, atol=atol, rtol=0)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4},
        {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    ],
)
def test_other_kinds_keep_their_own(tmp_path: Path, parameters: dict[str, Any]) -> None:
    model = load(tmp_path, "llama", rope_parameters=parameters)
    replace_rotary(model)
    assert type(model.rotary_emb).__name__ == "LlamaRotaryEmbedding"


def test_other_frequencies_keep_their_own(tmp_path: Path) -> None:
    model = load(tmp_path, "llama")
    model.rotary_emb.inv_freq.mul_(1.001)
    replace_rotary(model)
    assert type(model.rotary_emb).__name__ == "LlamaRotaryEmbedding"
