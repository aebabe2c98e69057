"""Files of a random adapter without peft, which is not everywhere where there is a GPU."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from pagedserve import LoRARequest


def save_adapter(
    directory: Path, shapes: Mapping[str, tuple[int, int]], *, rank: int, number: int
) -> LoRARequest:
    """An adapter of modules with these features in and out, so large that tokens show it."""
    generator = np.random.default_rng(number)
    tensors = {}
    for name, (num_in, num_out) in shapes.items():
        key = f"base_model.model.{name}"
        a = generator.standard_normal((rank, num_in)) / num_in**0.5
        b = generator.standard_normal((num_out, rank)) / rank**0.5
        tensors[f"{key}.lora_A.weight"] = a.astype(np.float32)
        tensors[f"{key}.lora_B.weight"] = b.astype(np.float32)
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(directory.name, number, str(directory))
