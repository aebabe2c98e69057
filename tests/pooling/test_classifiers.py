"""Models that name classes: the logits and probabilities of transformers, whatever lies beside."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from pagedserve import LLM, PoolingParams, RequestError
from pagedserve.config import EngineArgs
from pagedserve.errors import UnsupportedModelError
from pagedserve.models.loader import load_model
from tests.support.classifiers import save_classifier

Save = Callable[..., Path]

PROMPTS = [[(31 * place + length) % 94 + 3 for place in range(length)] for length in (40, 1, 17, 5)]
RAW = PoolingParams(use_activation=False)
MODELS: dict[str, dict[str, Any]] = {
    "bert": {},
    "xlm-roberta": {"max_position_embeddings": 66},
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    "electra": {"embedding_size": 16},
    "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 2},
    "modernbert of means": {
        "local_attention": 8,
        "global_attn_every_n_layers": 2,
        "classifier_pooling": "mean",
    },
    "llama": {},
    "qwen3": {"head_dim": 8, "pad_token_id": None},
}


@pytest.fixture
def save(tmp_path: Path, tiny_config: dict[str, Any]) -> Save:
    """Saves a model with a head of classes, and a tokenizer of words that knows pairs."""

    def save(name: str, num_labels: int = 3, **options: Any) -> Path:
        kind = {"model_type": name.partition(" ")[0], "num_labels": num_labels}
        return save_classifier(tmp_path / "model", tiny_config | kind | MODELS[name] | options)

    return save


@torch.inference_mode()
def own_logits(directory: Path, inputs: list[dict[str, Any]]) -> torch.Tensor:
    """What transformers alone makes of each input alone, in float64."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(
        directory, attn_implementation="eager"
    )
    model = model.double().eval()
    return torch.stack([model(**given).logits[0] for given in inputs])


def classified(llm: LLM, prompts: Any, **options: Any) -> np.ndarray[Any, Any]:
    outputs = llm.classify(prompts, use_tqdm=False, **options)
    return np.array([output.outputs.probs for output in outputs])


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers_in_any_order(save: Save, name: str) -> None:
    directory = save(name)
    llm = LLM(str(directory), dtype="float32", max_num_seqs=3, use_tqdm_on_load=False)
    given: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    exact = own_logits(directory, [{"input_ids": torch.tensor([prompt])} for prompt in PROMPTS])
    found = classified(llm, given, pooling_params=RAW)
    np.testing.assert_allclose(found, exact, atol=2e-5 * float(exact.abs().max()))
    order = [2, 0, 3, 1]
    turned = classified(llm, [given[place] for place in order], pooling_params=RAW)
    np.testing.assert_allclose(turned, found[order], atol=1e-5)
    probabilities = classified(llm, given)
    np.testing.assert_allclose(probabilities, exact.softmax(dim=1), atol=1e-4)
    assert llm.llm_engine.scheduler.num_free_gpu_blocks == llm.llm_engine.memory.num_gpu_blocks


def test_a_decoder_over_cached_prefixes_and_chunks(save: Save) -> None:
    directory = save("llama")
    llm = LLM(
        str(directory),
        dtype="float32",
        block_size=4,
        num_gpu_blocks=24,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        max_num_batched_tokens=10,
        max_num_seqs=3,
        use_tqdm_on_load=False,
    )
    prompts = [[*PROMPTS[0][:24], 40 + place, 5] for place in range(3)]
    exact = own_logits(directory, [{"input_ids": torch.tensor([prompt])} for prompt in prompts])
    for _ in range(2):
        found = classified(llm, prompts, pooling_params=RAW)
        np.testing.assert_allclose(found, exact, atol=2e-5 * float(exact.abs().max()))


@pytest.mark.parametrize(
    ("num_labels", "options", "activation"),
    [
        (1, {}, torch.sigmoid),
        (2, {"problem_type": "multi_label_classification"}, torch.sigmoid),
        (2, {"problem_type": "single_label_classification"}, lambda logits: logits.softmax(1)),
        (1, {"problem_type": "regression"}, lambda logits: logits),
        (1, {"sentence_transformers": {"activation_fn": "torch.nn.Identity"}}, lambda x: x),
    ],
)
def test_probabilities_are_what_the_config_says(
    save: Save, num_labels: int, options: dict[str, Any], activation: Callable[..., Any]
) -> None:
    directory = save("bert", num_labels, **options)
    llm = LLM(str(directory), dtype="float32", use_tqdm_on_load=False)
    given: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    exact = own_logits(directory, [{"input_ids": torch.tensor([prompt])} for prompt in PROMPTS])
    np.testing.assert_allclose(classified(llm, given), activation(exact), atol=1e-4)


@pytest.mark.parametrize("name", ["bert", "xlm-roberta", "qwen3"])
def test_cross_encoders_score_pairs(save: Save, name: str) -> None:
    """Whose second text has token types of its own where the model has been told so (BERT)."""
    directory = save(name, 1)
    llm = LLM(str(directory), dtype="float32", use_tqdm_on_load=False)
    query, documents = "w5 w9 w11", ["w7 w5", "w40 w41 w42 w43 w44 w45", "w9"]
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    inputs = [dict(tokenizer(query, text, return_tensors="pt")) for text in documents]
    assert ("token_type_ids" in inputs[0]) == (name == "bert")
    exact = torch.sigmoid(own_logits(directory, inputs))[:, 0]
    for order in ([0, 1, 2], [2, 0, 1]):
        scores = llm.score(query, [documents[place] for place in order], use_tqdm=False)
        found = [score.outputs.score for score in scores]
        np.testing.assert_allclose(found, exact[order], atol=1e-5)
    assert scores[0].prompt_token_ids == inputs[2]["input_ids"][0].tolist()
    if name == "bert":  # one text of the same tokens is something else
        (single,) = classified(llm, {"prompt_token_ids": scores[0].prompt_token_ids})
        assert abs(single[0] - scores[0].outputs.score) > 1e-3


def test_pairs_are_shortened_as_the_tokenizer_does_it(save: Save) -> None:
    directory = save("bert", 1)
    llm = LLM(str(directory), dtype="float32", use_tqdm_on_load=False)
    long = " ".join(["w7"] * 80)
    params = PoolingParams(truncate_prompt_tokens=-1)
    (score,) = llm.score("w5 w6", long, use_tqdm=False, pooling_params=params)
    (same,) = llm.score("w5 w6", long, use_tqdm=False, truncate_prompt_tokens=-1)
    assert same.outputs.score == score.outputs.score
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    inputs = dict(tokenizer("w5 w6", long, truncation=True, max_length=64, return_tensors="pt"))
    exact = torch.sigmoid(own_logits(directory, [inputs]))
    assert score.outputs.score == pytest.approx(float(exact), abs=1e-5)
    shared: Any = llm.llm_engine.tokenizer  # which other threads use meanwhile
    assert shared.backend_tokenizer.truncation is None


def test_what_a_model_is_not_for_is_refused_by_name(save: Save) -> None:
    llm = LLM(str(save("bert")), use_tqdm_on_load=False)
    with pytest.raises(RequestError, match="the model names classes; accepted are classific"):
        llm.embed("w5", use_tqdm=False)
    with pytest.raises(RequestError, match="names 3 classes; scores are for models of one class"):
        llm.score("w5", "w6", use_tqdm=False)
    with pytest.raises(RequestError, match="dimensions is 2"):
        llm.classify("w5", use_tqdm=False, pooling_params=PoolingParams(dimensions=2))


def test_heads_that_are_not_known_are_refused_by_name(save: Save) -> None:
    args = EngineArgs(str(save("bert", sbert_ce_default_activation_function="torch.nn.Tanh")))
    with pytest.raises(UnsupportedModelError, match=r"its activation_fn is torch\.nn\.Tanh"):
        load_model(args, torch.device("cpu"))
    directory = save("bert")
    config = AutoConfig.from_pretrained(directory)
    config.architectures = ["BertForTokenClassification"]
    config.save_pretrained(directory)
    with pytest.raises(UnsupportedModelError, match="its classes are not those of whole texts"):
        load_model(EngineArgs(str(directory)), torch.device("cpu"))
