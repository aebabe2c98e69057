"""Decoders that pool on the native backend, against transformers and the torch backend."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from pagedserve import LLM, PoolingParams
from pagedserve.errors import ModelLoadError, UnsupportedModelError
from tests.support.decoders import save_decoder
from tests.support.tiny import enlarge_weights

PROMPTS = [[(31 * place + length) % 94 + 3 for place in range(length)] for length in (40, 1, 17, 5)]
BACKENDS: tuple[Any, ...] = ("native", "torch")
RAW = PoolingParams(use_activation=False)
FAMILIES = ["llama, tied, biases", "mistral", "qwen2", "qwen3", "smollm3", "gemma", "gemma3"]


def pooling(model: Path, backend: Any = "native", **options: Any) -> LLM:
    how: dict[str, Any] = {
        "runner": "pooling",
        "dtype": "float32",
        "use_tqdm_on_load": False,
    } | options
    return LLM(str(model), backend=backend, **how)


def embedded(llm: LLM) -> np.ndarray[Any, Any]:
    with llm:
        outputs = llm.embed(PROMPTS, use_tqdm=False, pooling_params=RAW)
    return np.array([output.outputs.embedding for output in outputs])


def classified(llm: LLM, params: PoolingParams | None = None) -> np.ndarray[Any, Any]:
    with llm:
        outputs = llm.classify(PROMPTS, use_tqdm=False, pooling_params=params)
    return np.array([output.outputs.probs for output in outputs])


@torch.inference_mode()
def own_states(directory: Path) -> np.ndarray[Any, Any]:
    """What transformers makes of the last token of each prompt, in float64."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    model = model.double().eval().model
    prompts = [torch.tensor([prompt]) for prompt in PROMPTS]
    return torch.stack([model(prompt).last_hidden_state[0, -1] for prompt in prompts]).numpy()


@torch.inference_mode()
def own_logits(directory: Path) -> np.ndarray[Any, Any]:
    model: Any = AutoModelForSequenceClassification.from_pretrained(
        directory, attn_implementation="eager"
    )
    model = model.double().eval()
    return torch.stack([model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS]).numpy()


def save_classes(directory: Path, name: str, num_labels: int = 3, **fields: Any) -> Path:
    """The decoder of ``save_decoder`` with a head of classes."""
    save_decoder(directory, name)
    config = AutoConfig.from_pretrained(directory, num_labels=num_labels, **fields)
    torch.manual_seed(2)
    model = AutoModelForSequenceClassification.from_config(config)
    enlarge_weights(model)
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("name", FAMILIES)
def test_states_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    exact = own_states(save_decoder(tmp_path, name))
    found = embedded(pooling(tmp_path))
    np.testing.assert_allclose(found, exact, atol=5e-5 * float(np.abs(exact).max()))


@pytest.mark.parametrize("name", [*FAMILIES, "gemma2"])
def test_logits_of_classes_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    exact = own_logits(save_classes(tmp_path, name))
    found = classified(pooling(tmp_path, runner="auto"), RAW)
    np.testing.assert_allclose(found, exact, atol=5e-5 * float(np.abs(exact).max()))


@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"dtype": "bfloat16"}])
def test_rounded_models_give_the_vectors_of_torch(tmp_path: Path, options: dict[str, Any]) -> None:
    tied = save_decoder(tmp_path / "tied", "llama, tied, biases")
    classes = save_classes(tmp_path / "classes", "qwen3")
    for found, expected in (
        [embedded(pooling(tied, backend, **options)) for backend in BACKENDS],
        [classified(pooling(classes, backend, **options), RAW) for backend in BACKENDS],
    ):
        scale = float(np.abs(expected).max())
        np.testing.assert_allclose(
            found, expected, atol=(2e-5 if "dtype" not in options else 0.03) * scale
        )


@pytest.mark.parametrize("num_labels", [1, 2])
def test_probabilities_follow_the_config(tmp_path: Path, num_labels: int) -> None:
    save_classes(tmp_path, "llama", num_labels)
    logits = torch.from_numpy(own_logits(tmp_path))
    exact = torch.sigmoid(logits) if num_labels == 1 else logits.softmax(1)
    np.testing.assert_allclose(classified(pooling(tmp_path)), exact, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"id2label": ["a"]}, ModelLoadError, r"id2label is \['a'\]; it must give names"),
        ({"id2label": {"a": "b"}}, ModelLoadError, "it must give names by numbers"),
        ({"id2label": None, "num_labels": 1e12}, ModelLoadError, "num_labels is 1000000000000.0;"),
        ({"num_labels": 5, "id2label": None}, ModelLoadError, r"'score.weight' is \(3, 64\)"),
        ({"problem_type": "x"}, UnsupportedModelError, "its problem_type is x; accepted are"),
        ({"sentence_transformers": {"activation_fn": "Tanh"}}, UnsupportedModelError, "is Tanh;"),
        (
            {"architectures": ["LlamaForTokenClassification"]},
            UnsupportedModelError,
            "LlamaForTokenClassification .* is not supported",
        ),
    ],
)
def test_heads_that_cannot_be_are_refused(
    tmp_path: Path, change: dict[str, Any], error: type[Exception], said: str
) -> None:
    file = save_classes(tmp_path, "llama") / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(error, match=said):
        pooling(tmp_path)


def test_vectors_without_torch(tmp_path: Path) -> None:
    embeds = save_decoder(tmp_path / "embeds", "qwen3")
    classes = save_classes(tmp_path / "classes", "qwen3")
    program = f"""
import json, sys

sys.modules.update(dict.fromkeys(("torch", "transformers", "safetensors")))
from pagedserve import LLM

embeds, classes = (LLM(path, runner="pooling") for path in sys.argv[1:])
vectors = [output.outputs.embedding for output in embeds.embed({PROMPTS}, use_tqdm=False)]
probs = [output.outputs.probs for output in classes.classify({PROMPTS}, use_tqdm=False)]
print(json.dumps([vectors, probs]))
"""
    command = [sys.executable, "-c", program, str(embeds), str(classes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    vectors, probs = json.loads(done.stdout.splitlines()[-1])
    states = own_states(embeds)
    exact = states / np.linalg.norm(states, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors, exact, atol=2e-5)
    logits = torch.from_numpy(own_logits(classes))
    np.testing.assert_allclose(probs, logits.softmax(1), atol=1e-4)


def test_a_gguf_file_pools_as_with_torch() -> None:
    texts = ["A cat sits on the mat.", "Stocks fell."]
    vectors = []
    for backend in BACKENDS:
        with LLM("smollm2", backend=backend, runner="pooling", use_tqdm_on_load=False) as llm:
            outputs = llm.embed(texts, use_tqdm=False)
        vectors.append([output.outputs.embedding for output in outputs])
    np.testing.assert_allclose(vectors[0], vectors[1], atol=2e-5)
