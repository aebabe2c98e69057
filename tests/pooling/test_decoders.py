"""Decoders that embed, as Qwen3-Embedding: the last token's state, over cached prefixes too."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from pagedserve import LLM, ConfigError, PoolingParams, RequestError
from pagedserve.errors import UnsupportedModelError
from tests.support.tiny import enlarge_weights

SaveEncoder = Callable[..., Path]

LAST = {"pooling_mode_lasttoken": True, "include_prompt": True}
PREFIX = [(7 * place) % 96 + 1 for place in range(24)]
PROMPTS = [[*PREFIX, 40 + place, 5, 6] for place in range(3)] + [[9, 8, 7], PREFIX[:1]]


@pytest.fixture(params=["torch", "native"])
def backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def save_decoder(save_bare: SaveEncoder) -> SaveEncoder:
    """With a head, as its makers save it."""

    def save(**options: Any) -> Path:
        directory = save_bare("qwen3", head_dim=8, intermediate_size=64, **options)
        config = AutoConfig.from_pretrained(directory)
        model = AutoModelForCausalLM.from_config(config)
        enlarge_weights(model)
        model.save_pretrained(directory)
        return directory

    return save


@torch.inference_mode()
def expected(
    directory: Path,
    pool: Callable[[Tensor], Tensor] = lambda states: states[-1],
    *,
    normalizes: bool = True,
) -> np.ndarray[Any, Any]:
    model: Any = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    model = model.double().eval().model
    states = torch.stack(
        [pool(model(input_ids=torch.tensor([prompt])).last_hidden_state[0]) for prompt in PROMPTS]
    )
    return (torch.nn.functional.normalize(states) if normalizes else states).numpy()


@pytest.mark.parametrize("normalizes", [True, False])
def test_the_state_of_the_last_token(
    save_decoder: SaveEncoder, write_rules: Callable[..., None], backend: Any, *, normalizes: bool
) -> None:
    directory = save_decoder()
    write_rules(directory, LAST, normalizes=normalizes)
    llm = LLM(
        str(directory),
        dtype="float32",
        block_size=4,
        num_gpu_blocks=24,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        max_num_batched_tokens=10,
        max_num_seqs=3,
        backend=backend,
        use_tqdm_on_load=False,
    )
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    exact = expected(directory, normalizes=normalizes)
    for _ in range(2):
        outputs = llm.embed(prompts, use_tqdm=False)
        found = np.array([output.outputs.embedding for output in outputs])
        np.testing.assert_allclose(found, exact, rtol=2e-5, atol=2e-5)
    assert outputs[0].num_cached_tokens == 24
    scheduler = llm.llm_engine.scheduler
    assert scheduler.num_running == scheduler.num_waiting == 0
    assert scheduler.num_free_gpu_blocks == 24


@pytest.mark.parametrize(
    ("mode", "pool"),
    [
        ("pooling_mode_mean_tokens", lambda states: states.mean(dim=0)),
        ("pooling_mode_cls_token", lambda states: states[0]),
    ],
)
def test_the_states_of_other_tokens(
    save_decoder: SaveEncoder,
    write_rules: Callable[..., None],
    backend: Any,
    mode: str,
    pool: Callable[[Tensor], Tensor],
) -> None:
    directory = save_decoder()
    write_rules(directory, {mode: True})
    for name in ("enable_prefix_caching", "enable_chunked_prefill"):
        options: Any = {name: True}
        with pytest.raises(ConfigError, match=f"{name} is True, and the model pools"):
            LLM(str(directory), backend=backend, use_tqdm_on_load=False, **options)
    llm = LLM(
        str(directory),
        dtype="float32",
        max_num_batched_tokens=64,
        max_num_seqs=3,
        backend=backend,
        use_tqdm_on_load=False,
    )
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.embed(prompts, use_tqdm=False)
    found = np.array([output.outputs.embedding for output in outputs])
    np.testing.assert_allclose(found, expected(directory, pool), atol=2e-5)


def test_prompts_of_the_model_come_before_texts(
    save_decoder: SaveEncoder, write_rules: Callable[..., None], backend: Any
) -> None:
    directory = save_decoder()
    prompts = {"query": "w7", "document": ""}
    write_rules(directory, LAST, prompts=prompts, default_prompt_name="document")
    llm = LLM(str(directory), backend=backend, use_tqdm_on_load=False)
    (plain,) = llm.embed("w8", use_tqdm=False)
    (query,) = llm.embed("w8", use_tqdm=False, pooling_params=PoolingParams(prompt_name="query"))
    assert plain.prompt_token_ids == llm.get_tokenizer()("w8").input_ids
    assert query.prompt_token_ids == llm.get_tokenizer()("w7w8").input_ids
    with pytest.raises(RequestError, match="prompt_name is 'other'; the model has query, document"):
        llm.embed("w8", use_tqdm=False, pooling_params=PoolingParams(prompt_name="other"))


def test_texts_are_lowercased_where_the_model_has_it(
    save_decoder: SaveEncoder, write_rules: Callable[..., None], backend: Any
) -> None:
    directory = save_decoder()
    write_rules(directory, LAST)
    (directory / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    llm = LLM(str(directory), backend=backend, use_tqdm_on_load=False)
    (output,) = llm.embed("W8", use_tqdm=False)
    assert output.prompt_token_ids == [8]


def test_runner_says_which_of_both(save_decoder: SaveEncoder, backend: Any) -> None:
    directory = str(save_decoder())
    llm = LLM(directory, backend=backend, use_tqdm_on_load=False)
    with pytest.raises(RequestError, match=r"loaded to generate.*runner='pooling'"):
        llm.embed("w8", use_tqdm=False)
    pooling = LLM(directory, runner="pooling", backend=backend, use_tqdm_on_load=False)
    scores = pooling.score("w8", ["w8", "w9"], use_tqdm=False)
    assert scores[0].outputs.score == pytest.approx(1.0)
    assert scores[1].outputs.score < 1.0
    for text in ({"prompt": "w8"}, [{"prompt": "w8"}], [[8]], 5, None):
        with pytest.raises(RequestError, match="must each be a string or a list of strings"):
            pooling.score(text, "w9")  # type: ignore[arg-type]
    for task in ("token_embed", "rank", None):
        with pytest.raises(RequestError, match=r"pooling_task is .*; it must be one of encode"):
            pooling.encode("w8", pooling_task=task)  # type: ignore[arg-type]
    named = PoolingParams(task="embed", normalize=False)
    assert named == PoolingParams(task="embed", use_activation=False)
    assert len(pooling.encode("w8", named)[0].outputs.data) > 1
    for refused in ({"task": "classify"}, {"task": "rank"}, {"normalize": 1}):
        with pytest.raises(RequestError):
            pooling.encode("w8", PoolingParams(**refused))
    with pytest.raises(RequestError, match="normalize is True; it must be use_activation"):
        PoolingParams(normalize=True, use_activation=False)
    branch: Any = {"prompt_token_ids": [5], "label_token_ids": [4]}
    with pytest.raises(RequestError, match="has branches, and pooling models take none"):
        pooling.embed({"prompt_token_ids": [3], "branches": [branch]})


def test_adapters_of_a_model_that_pools_are_refused(
    save_decoder: SaveEncoder, write_rules: Callable[..., None], backend: Any
) -> None:
    directory = save_decoder()
    write_rules(directory, LAST)
    with pytest.raises(ConfigError, match="enable_lora is True, and adapters are for models that"):
        LLM(str(directory), enable_lora=True, backend=backend, use_tqdm_on_load=False)


def test_what_is_not_there_is_refused(
    save_decoder: SaveEncoder, write_rules: Callable[..., None], backend: Any
) -> None:
    directory = save_decoder()
    write_rules(directory, {"pooling_mode_max_tokens": True})
    with pytest.raises(UnsupportedModelError, match=r"pooling_mode_max_tokens.*accepted is one of"):
        LLM(str(directory), backend=backend, use_tqdm_on_load=False)


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_model_without_a_head_pools(save_bare: SaveEncoder, backend: Any, is_tied: bool) -> None:
    directory = save_bare("qwen3", head_dim=8, intermediate_size=64, tie_word_embeddings=is_tied)
    llm = LLM(str(directory), backend=backend, dtype="float32", use_tqdm_on_load=False)
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.embed(prompts, use_tqdm=False)
    found = np.array([output.outputs.embedding for output in outputs])
    model: Any = AutoModel.from_pretrained(directory, attn_implementation="eager").double().eval()
    with torch.inference_mode():
        states = [model(torch.tensor([prompt])).last_hidden_state[0, -1] for prompt in PROMPTS]
    exact = torch.nn.functional.normalize(torch.stack(states)).numpy()
    np.testing.assert_allclose(found, exact, atol=2e-5)
