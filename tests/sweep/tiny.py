"""A small config of any architecture of transformers: its defaults, with every size cut down."""

from typing import Any, Final

from transformers import CONFIG_MAPPING

# By the names that configs give to sizes; a name that an architecture lacks is left out.
_SIZES: Final[dict[str, Any]] = {
    **dict.fromkeys(("vocab_size", "text_vocab_size"), 128),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "emb_dim", "dim"), 64),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim", "dim_model", "input_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"), 128),
    **dict.fromkeys(("intermediate_size_mlp", "d_ff", "dim_ff", "ffn_hidden_size"), 128),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 4),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "v_head_dim", "rotary_dim"), 16),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 256),
    **dict.fromkeys(("max_target_positions", "max_source_positions"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("expert_ffn_hidden_size", "zero_expert_num"), 32),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"), 1),
    "sliding_window": 8,
    "attention_chunk_size": 16,
    "index_topk": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    **dict.fromkeys(("mamba_n_heads", "n_mamba_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 32),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 16),
    "mamba_d_ssm": 128,
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    "tie_word_embeddings": False,
}

_SHARED_KEYS: Final = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 128,
}
_HYBRID: Final = {"layer_types": ["linear_attention", "full_attention"] * 2}
# What defaults and sizes above do not agree on.
_OVERRIDES: Final[dict[str, dict[str, Any]]] = {
    "bailing_hybrid": _HYBRID
    | {"head_dim": 16, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "bamba": {"attn_layer_indices": [1, 3]},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "big_bird": {"attention_type": "original_full"},
    "blt": {"encoder_hash_byte_group_vocab": 128},
    "blt_local_decoder": {"hidden_size_global": 64},
    "blt_local_encoder": {"hidden_size_global": 64},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "dots3_note_vision_encoder": {
        "pyramid_num_routed": [-1, -1, 4, 4],
        "adapter_in_dim": 64,
        "adapter_out_dim": 64,
    },
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    "gemma3n_text": _SHARED_KEYS | {"activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": _SHARED_KEYS,
    "gemma4_unified_text": _SHARED_KEYS,
    "granitemoehybrid": _HYBRID,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "kimi_linear": _HYBRID | {"num_experts_per_tok": 2, "linear_head_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"head_dim": 32, "n_groups": 1},
    "ministral": {"head_dim": 16},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "nemotron_h": {"n_groups": 1},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ple_layer_ids": [1],
        "ple_embed_dim": 16,
        "ngram_vocab_size_base": 128,
        "hc_lowrank": 16,
    },
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 16]},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 32},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "hybrid_layer_ids": [1, 3]},
}


def tiny_config(model_type: str) -> Any:
    """The config, its parts for text, images and sound cut down alike."""
    return _tiny(CONFIG_MAPPING[model_type])


def _tiny(config_class: Any) -> Any:
    defaults = vars(config_class())
    sizes = {
        name: value
        for name, value in _SIZES.items()
        if (name.endswith("_token_id") or defaults.get(name) is not None)
        and not isinstance(getattr(config_class, name, None), property)
    }
    if "qk_rope_head_dim" in sizes:  # latent attention: a head is what is rotated
        sizes |= {"num_key_value_heads": 4, "head_dim": 8}
    parts = {
        name: _tiny(type(defaults[name]))
        for name in config_class.sub_configs
        if defaults.get(name) is not None
    }
    tokens = {
        name: 3
        for name, value in defaults.items()
        if name.endswith(("_token_id", "_token_index")) and name not in _SIZES and value
    }
    overrides = _OVERRIDES.get(config_class.model_type, {})
    return config_class(**(sizes | tokens | parts | overrides))
