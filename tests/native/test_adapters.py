"""Adapters on the native backend: the tokens of the torch backend over the same files."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagedserve import LLM, CompletionOutput, LoRARequest, RequestError, SamplingParams
from tests.support.adapter_files import save_adapter
from tests.support.decoders import VOCAB_SIZE, save_decoder

PIRATE = Path(__file__).parents[2] / "examples/adapters/pirate"
PROMPTS = [[1, 5, 9], [4, 8, 15, 16], [23], [42, 7, 7], [*range(30, 60)]]
BACKENDS: tuple[Any, ...] = ("native", "torch")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
# Families whose modules differ: biases, head norms, scaled embeddings, a separate head.
FAMILIES = ["llama", "llama, tied, biases", "qwen3", "gemma2", "gemma3"]


def save_adapters(directory: Path, head_size: int) -> list[LoRARequest]:
    """Adapters of each kind of module of a decoder, alone and together."""
    attention, mlp = "model.layers.{}.self_attn.", "model.layers.{}.mlp."
    shapes = {
        attention + "q_proj": (64, 4 * head_size),
        attention + "k_proj": (64, 2 * head_size),
        attention + "v_proj": (64, 2 * head_size),
        attention + "o_proj": (4 * head_size, 64),
        mlp + "gate_proj": (64, 96),
        mlp + "up_proj": (64, 96),
        mlp + "down_proj": (96, 64),
    }
    linears = {name.format(layer): size for layer in (0, 2) for name, size in shapes.items()}
    chosen = {
        "attention": {name: size for name, size in linears.items() if "attn" in name},
        "ups": {name: size for name, size in linears.items() if "up_proj" in name},
        "embedding": {"model.embed_tokens": (VOCAB_SIZE, 64)},
        "head": {"lm_head": (64, VOCAB_SIZE)},
        "all": linears | {"model.embed_tokens": (VOCAB_SIZE, 64), "lm_head": (64, VOCAB_SIZE)},
    }
    return [
        save_adapter(directory / kind, modules, rank=3 * number, number=number)
        for number, (kind, modules) in enumerate(chosen.items(), 1)
    ]


def answers(
    model: Path, backend: Any, adapters: list[Any], **options: Any
) -> list[CompletionOutput]:
    with LLM(str(model), backend=backend, enable_lora=True, num_gpu_blocks=128, **options) as llm:
        outputs = llm.generate(
            PROMPTS * len(adapters),
            GREEDY,
            lora_request=[adapter for adapter in adapters for _ in PROMPTS],
            use_tqdm=False,
        )
    return [output.outputs[0] for output in outputs]


def tokens(answers: list[CompletionOutput]) -> list[list[int]]:
    return [list(answer.token_ids) for answer in answers]


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_with_adapters_are_those_of_torch(name: str, tmp_path: Path) -> None:
    model = save_decoder(tmp_path / "model", name)
    head_size = 16 if name.startswith("llama") else 32
    adapters = [None, *save_adapters(tmp_path, head_size)]
    found = answers(model, "native", adapters, max_loras=2)
    expected = answers(model, "torch", adapters, max_loras=5)
    assert tokens(found) == tokens(expected)
    scores, others = ([answer.cumulative_logprob for answer in kept] for kept in (found, expected))
    assert scores == pytest.approx(others, abs=2e-3)
    of_each = {str(scores[row : row + len(PROMPTS)]) for row in range(0, len(scores), len(PROMPTS))}
    assert len(of_each) == len(adapters), "each adapter shows"


def test_refusals_are_those_of_torch(tmp_path: Path) -> None:
    model = save_decoder(tmp_path / "model", "llama")
    adapters = {
        "rank": save_adapter(tmp_path / "rank", {"lm_head": (64, VOCAB_SIZE)}, rank=20, number=1),
        "size": save_adapter(tmp_path / "size", {"lm_head": (63, VOCAB_SIZE)}, rank=2, number=2),
        "name": save_adapter(tmp_path / "name", {"head": (64, VOCAB_SIZE)}, rank=2, number=3),
        "none": LoRARequest("none", 4, str(tmp_path)),
    }
    said: list[list[str]] = []
    for backend in BACKENDS:
        said.append([])
        with LLM(str(model), backend=backend, enable_lora=True, num_gpu_blocks=16) as llm:
            for adapter in adapters.values():
                with pytest.raises(RequestError) as refusal:
                    llm.generate([PROMPTS[0]], GREEDY, lora_request=adapter)
                said[-1].append(str(refusal.value))
    assert said[0] == said[1]


def test_a_trained_adapter_of_a_gguf_file_speaks_its_way() -> None:
    questions = ("Why do birds sing?", "What is the capital of Italy?")
    talks = [[{"role": "user", "content": question}] for question in questions for _ in range(2)]
    params = SamplingParams(temperature=0, max_tokens=16)
    found = []
    for backend in BACKENDS:
        with LLM("smollm2", backend=backend, enable_lora=True, num_gpu_blocks=64) as llm:
            pirate = LoRARequest("pirate", 1, str(PIRATE))
            outputs = llm.chat(talks, params, lora_request=[pirate, None] * 2, use_tqdm=False)
        texts = [output.outputs[0].text for output in outputs]
        assert [text.startswith("Arr,") for text in texts] == [True, False] * 2
        found.append(texts)
    assert found[0] == found[1]


def test_adapters_are_read_without_torch_and_safetensors(tmp_path: Path) -> None:
    model = save_decoder(tmp_path / "model", "llama")
    adapter = save_adapters(tmp_path, 16)[-1]
    program = """
import sys

absent = dict.fromkeys(("torch", "transformers", "safetensors", "peft"))
sys.modules.update(absent)
from pagedserve import LLM, CompletionOutput, LoRARequest, SamplingParams

llm = LLM(sys.argv[1], enable_lora=True, num_gpu_blocks=16)
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
adapter = LoRARequest("all", 1, sys.argv[2])
(output,) = llm.generate([[1, 5, 9]], params, lora_request=adapter, use_tqdm=False)
print(list(output.outputs[0].token_ids))
"""
    command = [sys.executable, "-c", program, str(model), adapter.lora_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    (expected, *_) = tokens(answers(model, "torch", [adapter]))
    assert done.stdout.splitlines()[-1] == str(expected)
