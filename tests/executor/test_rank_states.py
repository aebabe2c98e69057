"""Layers with states on two ranks, against the same model in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pagedserve import LLM
from tests.executor.test_ranks import TIGHT, answers, engine, tokens_of
from tests.support.tiny import VOCAB_SIZE, enlarge_weights, save_tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "head_dim": 16,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    },
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
}


@pytest.mark.parametrize("kind", ["qwen3_next", pytest.param("jamba", marks=pytest.mark.slow)])
def test_states_on_ranks_give_the_tokens_of_one_process(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | KINDS[kind]))
    enlarge_weights(model)
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    # Swaps move states too; prompts are not cached, since states have no blocks.
    options = TIGHT | {"enable_prefix_caching": False}
    wanted = tokens_of(run(engine(tmp_path, 1, **options)))
    shared = engine(tmp_path, 2, **options)
    try:
        assert tokens_of(run(shared)) == wanted
        assert shared.llm_engine.scheduler.num_preemptions > 0
    finally:
        shared.llm_engine.shutdown()


def run(llm: LLM) -> list[Any]:
    return answers(llm, VOCAB_SIZE - 4)
