"""A small model on the GPU that is not there."""

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from pagedserve.attention.backends import get_backend
from pagedserve.attention.interface import number_layers
from pagedserve.cache.layers import LayerShape
from pagedserve.models.attention_function import register
from pagedserve.models.loader import LoadedModel
from tests.support.fake_cuda import GPU

VOCAB_SIZE = 97
MAX_LEN = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_LEN,
}


def loaded_model(family: str, *, is_fused: bool) -> LoadedModel:
    """A model of the device as the loader leaves it, without what the loader compares."""
    from pagedserve.models.fused.gpu.layers import GpuDecoderLayer, can_fuse
    from pagedserve.models.fused.gpu.norms import GpuRMSNorm

    register()
    kinds: dict[str, tuple[type[Any], type[Any]]] = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }
    config, kind = kinds[family]
    hf_config = config(**SIZES)
    hf_config._attn_implementation = "pagedserve"
    with torch.device(GPU):
        model = kind._from_config(hf_config, dtype=torch.bfloat16)
    number_layers(model, [f"model.layers.{index}.self_attn" for index in range(2)])
    if is_fused:
        layers = model.model.layers
        assert all(can_fuse(layer) for layer in layers)
        model.model.layers = nn.ModuleList(GpuDecoderLayer(layer) for layer in layers)
        model.model.norm = GpuRMSNorm(model.model.norm)
    shape = LayerShape(num_kv_heads=2, key_size=32, value_size=32)
    return LoadedModel(
        model=model.eval(),
        layers=(shape,) * 2,
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_LEN,
        eos_token_ids=(2,),
        dtype=torch.bfloat16,
        device=GPU,
        attention_backend=get_backend("triton"),
        weight_bytes=1,
        replaced_modules="none",
    )
