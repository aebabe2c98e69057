"""The first layers of a model: as many as show every kind of them, and no more."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pagedserve.models.check.first_layers import (
    config_of_first_layers,
    first_layers,
    num_first_layers,
)

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
    "vocab_size": 97,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
}


def model_of(kind: str, **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES, **options)
    model: Any = AutoModelForCausalLM.from_config(config)
    found: PreTrainedModel = model.eval()
    return found


@pytest.mark.parametrize(
    ("kind", "options", "number"),
    [
        ("llama", {}, 1),
        ("qwen3_moe", {**EXPERTS, "mlp_only_layers": [2]}, 3),
        ("qwen3_moe", {**EXPERTS, "mlp_only_layers": [4]}, None),  # nearly all of them
    ],
)
def test_every_kind_is_among_them(kind: str, options: dict[str, Any], number: int | None) -> None:
    assert num_first_layers(model_of(kind, **options)) == number


def test_a_model_with_them_is_the_model_of_their_config() -> None:
    model, tokens = model_of("qwen3_moe", **EXPERTS, mlp_only_layers=[1]), torch.arange(7)[None]
    config = config_of_first_layers(model.config, 2)
    assert (config.num_hidden_layers, model.config.num_hidden_layers) == (2, 6)
    smaller: Any = AutoModelForCausalLM.from_config(config).eval()
    smaller.load_state_dict(model.state_dict(), strict=False)
    with torch.inference_mode():
        whole = model(input_ids=tokens).logits
        with first_layers(model, 2):
            found = model(input_ids=tokens).logits
        again = model(input_ids=tokens).logits
        expected = smaller(input_ids=tokens).logits
    assert torch.equal(found, expected)
    assert not torch.equal(found, whole)
    assert torch.equal(again, whole)
