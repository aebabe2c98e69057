"""Records what transformers answers: ``make references``."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagedserve import LLM
from tests.support import beams, greedy, logprobs, references


def load_transformers() -> Any:
    """transformers' own model of the real weights in float32."""
    directory = references.weights_directory()
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def main() -> None:
    """Ask everything and write the records."""
    model = load_transformers()
    tokenizer = AutoTokenizer.from_pretrained(references.weights_directory())
    text = references.SOURCE.read_text(encoding="utf-8")
    source = tokenizer(text, verbose=False).input_ids
    # Which sequences come out is ours to choose; what is said of them is transformers'.
    sequences = logprobs.sequences_of(LLM("smollm2", dtype="float32", num_gpu_blocks=256), source)
    records: dict[str, Callable[[], object]] = {
        logprobs.NAME: lambda: logprobs.ask(model, sequences),
        beams.NAME: lambda: beams.ask(model, tokenizer),
        greedy.NAME: lambda: greedy.ask(model, tokenizer),
    }
    for name, ask in records.items():
        num_bytes = references.write(name, ask())
        print(f"{references.path_of(name)}: {num_bytes} bytes", flush=True)  # noqa: T201  # progress


if __name__ == "__main__":
    main()
