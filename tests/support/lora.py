"""Random adapters, made and saved by peft."""

import copy
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from pagedserve.config.precision import Quantization
from pagedserve.models.fused.cpu.packing import quantize

# Ways to make an adapter; ranks from 4 to 64.
KINDS: dict[str, dict[str, Any]] = {
    "query and value": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    "all-linear": {"r": 16, "target_modules": "all-linear"},
    "rank-stabilized": {"r": 8, "target_modules": "all-linear", "use_rslora": True},
    "patterns": {
        "r": 8,
        "target_modules": ["q_proj", "k_proj", "o_proj", "down_proj"],
        "rank_pattern": {"layers.0.self_attn.q_proj": 32, "q_proj": 4, "down_proj": 12},
        "alpha_pattern": {"o_proj": 3, r"layers\.1\..*": 20},
    },
    "regex": {"r": 6, "target_modules": r".*\.1\.(self_attn\.o_proj|mlp\.(up|gate)_proj)"},
    "embeddings and head": {"r": 8, "target_modules": ["embed_tokens", "lm_head", "v_proj"]},
    "some layers": {"r": 8, "target_modules": ["up_proj"], "layers_to_transform": [1]},
    "rank 64": {"r": 64, "target_modules": "all-linear", "init_lora_weights": "gaussian"},
}


def random_adapter(base: PreTrainedModel, kind: str, *, seed: int = 0) -> PeftModel:
    """An adapter over a copy of a model, so large that tokens show it."""
    options: dict[str, Any] = {"lora_alpha": 16, "task_type": "CAUSAL_LM"}
    config = LoraConfig(**options | KINDS[kind])
    torch.manual_seed(seed)
    model = get_peft_model(copy.deepcopy(base), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.5 / parameter.shape["lora_A" in name] ** 0.5)
    return model.eval()


def load_adapter(base: PreTrainedModel, path: Path) -> PeftModel:
    """What peft makes of an adapter's files, over a copy of a model."""
    model: PeftModel = PeftModel.from_pretrained(copy.deepcopy(base), str(path))
    # Embeddings of the base that lie in the file took the place of the model's, rounded or not.
    inside: Any = model.base_model.model
    for name, layer in inside.named_modules():
        if isinstance(layer, LoraLayer):
            own: Any = base.get_submodule(name)
            cast(Any, layer).get_base_layer().weight.data.copy_(own.weight)
    return model.eval()


def save_random_adapter(base: PreTrainedModel, kind: str, path: Path, *, seed: int = 0) -> Path:
    """Saves it, as peft does unasked with the base's embeddings where they are changed."""
    model = random_adapter(base, kind, seed=seed)
    targets = KINDS[kind]["target_modules"]
    model.save_pretrained(str(path), save_embedding_layers="embed_tokens" in targets)
    return path


def rounded(base: PreTrainedModel, dtype: torch.dtype, quantization: Quantization | None) -> Any:
    """A copy of a model whose weights are the numbers that the engine holds."""
    model: Any = copy.deepcopy(base)
    model.to(dtype)
    for module in model.modules():
        if isinstance(module, nn.Linear) and quantization is not None:
            # In place: an embedding that is tied to the head holds the same.
            module.weight.data = quantize(module.weight.data).dequantize(dtype)
    return model
