"""Generation whose rows have adapters, by pagedserve or by vLLM, which take the same calls.

Runs in the Python where the package is.  A decode step takes the difference of a long and a
short generation, over the tokens between.
"""

import argparse
import importlib
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from safetensors.torch import save_file

SHORT, LONG = 2, 34
PROMPT_TOKENS = 32
LINEARS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Features in and out of each linear layer but the head, by peft's names, of a Llama."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    sizes = {
        "q_proj": (hidden, hidden),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "o_proj": (hidden, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }
    return {
        f"base_model.model.model.layers.{layer}.{part}.{name}": sizes[name]
        for layer in range(config["num_hidden_layers"])
        for part, names in LINEARS.items()
        for name in names
    }


def save_adapter(directory: Path, config: dict[str, Any], rank: int, seed: int) -> None:
    """Random weights of all linear layers, as peft writes them."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (num_in, num_out) in shapes(config).items():
        tensors[f"{name}.lora_A.weight"] = 0.02 * torch.randn(rank, num_in, generator=generator)
        tensors[f"{name}.lora_B.weight"] = 0.02 * torch.randn(num_out, rank, generator=generator)
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    targets = [name for names in LINEARS.values() for name in names]
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (directory / "adapter_config.json").write_text(json.dumps(about))


def requests(options: argparse.Namespace, folder: Path) -> list[Any]:
    """One of the adapters for each row, in turn."""
    package = "vllm.lora.request" if options.package == "vllm" else "pagedserve"
    make = importlib.import_module(package).LoRARequest
    config = json.loads((Path(options.model) / "config.json").read_text())
    for index in range(options.adapters):
        save_adapter(folder / str(index), config, options.rank, index)
    loras = [make(f"a{i}", i + 1, str(folder / str(i))) for i in range(options.adapters)]
    return [loras[row % options.adapters] for row in range(options.rows)]


def step_ms(generate: Callable[[int], object], rounds: int) -> float:
    """Milliseconds of a decode step."""
    found = []
    for _ in range(rounds + 1):
        seconds = []
        for num_tokens in (SHORT, LONG):
            started = perf_counter()
            generate(num_tokens)
            seconds.append(perf_counter() - started)
        found.append(1e3 * (seconds[1] - seconds[0]) / (LONG - SHORT))
    return median(found[1:])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print one object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--package", choices=["pagedserve", "vllm"], default="pagedserve")
    parser.add_argument("--model", required=True, help="a directory in Hugging Face format")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    package = importlib.import_module(options.package)
    llm = package.LLM(
        model=options.model,
        dtype=options.dtype,
        max_model_len=256,
        max_num_seqs=options.rows,
        enable_lora=True,
        max_loras=options.adapters,
        max_lora_rank=options.rank,
    )
    prompts = [
        {"prompt_token_ids": [100 + row + at for at in range(PROMPT_TOKENS)]}
        for row in range(options.rows)
    ]

    def generate(num_tokens: int, loras: list[Any] | None) -> object:
        params = package.SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        return llm.generate(prompts, params, use_tqdm=False, lora_request=loras)

    with tempfile.TemporaryDirectory() as folder:
        loras = requests(options, Path(folder))
        with_adapters = step_ms(lambda num: generate(num, loras), options.rounds)
        without = step_ms(lambda num: generate(num, None), options.rounds)
    print(
        json.dumps(
            {
                "package": options.package,
                "dtype": options.dtype,
                "rows": options.rows,
                "adapters_ms": round(with_adapters, 2),
                "none_ms": round(without, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
