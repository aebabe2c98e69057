"""Encoders: their embeddings are those of transformers' own attention, whatever lies beside."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModel

from pagedserve import LLM, ConfigError, PoolingParams, RequestError, SamplingParams
from pagedserve.config import EngineArgs
from pagedserve.errors import UnsupportedModelError
from pagedserve.models.loader import load_model

SaveEncoder = Callable[..., Path]

MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
PROMPTS = [[(31 * place + length) % 95 + 2 for place in range(length)] for length in (40, 1, 17, 5)]
# Beyond its window a token sees nothing: of 8 tokens, on either side half of them.
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {},
    "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 2},
    "xlm-roberta": {"pad_token_id": 1, "max_position_embeddings": 66},
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
}


@torch.inference_mode()
def expected(directory: Path, pool: Callable[[Tensor], Tensor]) -> np.ndarray[Any, Any]:
    """What transformers alone makes of each prompt alone, in float64, of length 1."""
    model: Any = AutoModel.from_pretrained(directory, attn_implementation="eager").double().eval()
    vectors = [
        pool(model(input_ids=torch.tensor([prompt])).last_hidden_state[0]) for prompt in PROMPTS
    ]
    return torch.nn.functional.normalize(torch.stack(vectors)).numpy()


def embed(llm: LLM, prompts: list[list[int]], **options: Any) -> np.ndarray[Any, Any]:
    given: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.embed(given, use_tqdm=False, **options)
    assert [output.prompt_token_ids for output in outputs] == prompts
    return np.array([output.outputs.embedding for output in outputs])


@pytest.mark.parametrize("backend", ["rust", "torch", "sdpa"])
@pytest.mark.parametrize("model_type", ENCODERS)
def test_embeddings_are_those_of_transformers(
    save_bare: SaveEncoder, model_type: str, backend: Any
) -> None:
    directory = save_bare(model_type, **ENCODERS[model_type])
    llm = LLM(str(directory), attention_backend=backend, dtype="float32", use_tqdm_on_load=False)
    found = embed(llm, PROMPTS)
    np.testing.assert_allclose(found, expected(directory, lambda states: states[0]), atol=2e-5)
    assert llm.llm_engine.scheduler.num_free_gpu_blocks == llm.llm_engine.memory.num_gpu_blocks


def test_the_mean_of_all_tokens_and_any_order(
    save_bare: SaveEncoder, write_rules: Callable[..., None]
) -> None:
    directory = save_bare("bert")
    write_rules(directory, MEAN)
    llm = LLM(
        str(directory),
        dtype="float32",
        max_num_batched_tokens=64,
        max_num_seqs=3,
        use_tqdm_on_load=False,
    )
    found = embed(llm, PROMPTS)
    np.testing.assert_allclose(
        found, expected(directory, lambda states: states.mean(dim=0)), atol=2e-5
    )
    order = [2, 0, 3, 1]
    shuffled = embed(llm, [PROMPTS[place] for place in order])
    np.testing.assert_allclose(shuffled, found[order], atol=1e-6)


def test_states_in_triton(save_bare: SaveEncoder, device: torch.device) -> None:
    directory = save_bare("modernbert", **ENCODERS["modernbert"])
    args = EngineArgs(model=str(directory), attention_backend="triton", dtype="float32")
    assert load_model(args, device).is_encoder


def test_an_encoder_that_attends_by_itself_is_refused(save_bare: SaveEncoder) -> None:
    directory = save_bare("mpnet")
    with pytest.raises(UnsupportedModelError, match="MPNet"):
        load_model(EngineArgs(model=str(directory)), torch.device("cpu"))


def test_what_an_encoder_does_not_do_is_refused_by_name(save_bare: SaveEncoder) -> None:
    directory = str(save_bare("bert"))
    for name in ("enable_prefix_caching", "enable_chunked_prefill", "enable_lora"):
        options: Any = {name: True}
        with pytest.raises(ConfigError, match=name):
            LLM(directory, use_tqdm_on_load=False, **options)
    llm = LLM(directory, use_tqdm_on_load=False)
    with pytest.raises(RequestError, match=r"loaded to pool .*accepted are embeddings"):
        llm.generate("w1 w2", SamplingParams(max_tokens=1), use_tqdm=False)
    with pytest.raises(RequestError, match="65 tokens; it must have at most 64"):
        embed(llm, [[3] * 65])
    assert len(embed(llm, [[3] * 64])) == 1
    long: Any = {"prompt_token_ids": [3] * 70}
    (cut,) = llm.embed(
        long, use_tqdm=False, pooling_params=PoolingParams(truncate_prompt_tokens=-1)
    )
    assert len(cut.prompt_token_ids) == 64


@pytest.mark.parametrize(
    ("said", "accepted"),
    [
        ({"is_matryoshka": True}, "from 1 to 32"),
        ({"matryoshka_dimensions": [6, 12]}, "6, 12, 32$"),
        ({}, "32$"),
    ],
)
def test_some_of_the_dimensions(
    save_bare: SaveEncoder, said: dict[str, Any], accepted: str
) -> None:
    llm = LLM(str(save_bare("bert", **said)), use_tqdm_on_load=False)
    with pytest.raises(RequestError, match=f"dimensions is 33; .* accepts is {accepted}"):
        embed(llm, PROMPTS[:1], pooling_params=PoolingParams(dimensions=33))
    (whole,) = embed(llm, PROMPTS[:1], pooling_params=PoolingParams(use_activation=False))
    (scaled,) = embed(llm, PROMPTS[:1], pooling_params=PoolingParams(dimensions=32))
    np.testing.assert_allclose(scaled, whole / np.linalg.norm(whole), atol=1e-6)
    if not said:
        return
    (cut,) = embed(llm, PROMPTS[:1], pooling_params=PoolingParams(dimensions=6))
    np.testing.assert_allclose(cut, whole[:6] / np.linalg.norm(whole[:6]), atol=1e-6)


def test_parameters_may_be_given_for_each_prompt(save_bare: SaveEncoder) -> None:
    llm = LLM(str(save_bare("bert", is_matryoshka=True)), use_tqdm_on_load=False)
    given: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:3]]
    params = [PoolingParams(dimensions=size) for size in (6, None, 12)]
    outputs = llm.embed(
        given, pooling_params=params, truncate_prompt_tokens=5, use_tqdm=False, lora_request=None
    )
    assert [len(output.outputs.embedding) for output in outputs] == [6, 32, 12]
    assert [output.prompt_token_ids for output in outputs] == [prompt[:5] for prompt in PROMPTS[:3]]
    (vector, *_) = llm.encode(given, params, truncate_prompt_tokens=5, use_tqdm=False)
    assert (len(vector.outputs.data), vector.prompt_token_ids) == (6, PROMPTS[0][:5])
    kwargs = {"truncate_prompt_tokens": 5, "add_special_tokens": True}
    (same, *_) = llm.embed(given, tokenization_kwargs=kwargs, use_tqdm=False)
    assert same.prompt_token_ids == PROMPTS[0][:5]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pooling_params": [PoolingParams()]}, "1 pooling_params for 2 prompts; it must be one"),
        ({"pooling_params": [PoolingParams(), 5]}, r"pooling_params is \[.*it must be one Pooling"),
        ({"pooling_params": SamplingParams()}, "pooling_params is SamplingParams.*it must be one"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0; it must be at least 1"),
        (
            {"tokenization_kwargs": {"add_special_tokens": False}},
            "not supported yet: tokenization_kwargs={'add_special_tokens': False}",
        ),
        ({"lora_request": "a"}, "not supported yet: lora_request='a'; leave it out"),
    ],
)
def test_other_parameters_are_refused_by_name(
    save_bare: SaveEncoder, options: dict[str, Any], said: str
) -> None:
    llm = LLM(str(save_bare("bert")), use_tqdm_on_load=False)
    with pytest.raises(RequestError, match=said):
        embed(llm, PROMPTS[:2], **options)
