"""What becomes of images: how often the tower runs, who shares prefixes, what ends a request."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import pagedserve.models.check.image_check as image_check
from pagedserve import LLM, EngineArgs, LLMEngine, LoRARequest, RequestOutput, SamplingParams
from pagedserve.errors import ConfigError, RequestError
from pagedserve.inputs.prompts import parse_prompt
from pagedserve.metrics import Counter
from pagedserve.models.image_features import image_features
from tests.images.conftest import Family, MakeFamily
from tests.support.images import picture
from tests.support.tiny import save_tiny_llama
from tests.sweep.outcome import save_random

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
CHUNKS: dict[str, Any] = {
    "enable_chunked_prefill": True,
    "max_num_batched_tokens": 8,
    "max_num_seqs": 8,
}


def prompt_of(made: Family, *seeds: int) -> Any:
    """A prompt with pictures of these seeds."""
    text = "w1 w2 w3 w4 " + "".join(f"{made.oracle.token} w5 " for _ in seeds)
    return {"prompt": text, "multi_modal_data": {"image": [picture(seed) for seed in seeds]}}


def answers(made: Family, *seeds: int) -> list[int]:
    prompt = prompt_of(made, *seeds)
    images = prompt["multi_modal_data"]["image"]
    return made.oracle.generate(prompt["prompt"], images, 6)[0]


def tokens_of(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def count_tower(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each image that the tower sees."""
    executor: Any = llm.llm_engine.model_executor
    model, calls = executor.worker.loaded.model, []
    features = model.get_image_features

    def counted(**arrays: Any) -> Any:
        calls.append(1)
        return features(**arrays)

    monkeypatch.setattr(model, "get_image_features", counted)
    return calls


def image_lookups(llm: LLM) -> tuple[float, float]:
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    queries, hits = metrics["vllm:mm_cache_queries"], metrics["vllm:mm_cache_hits"]
    assert isinstance(queries, Counter)
    assert isinstance(hits, Counter)
    return queries.value, hits.value


def test_the_tower_sees_an_image_once(family: MakeFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    made = family("llava")
    llm = made.load(**CHUNKS)
    calls = count_tower(llm, monkeypatch)
    prompts = [prompt_of(made, 1), prompt_of(made, 1, 2), prompt_of(made, 1)]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [tokens_of(output) for output in outputs] == [
        answers(made, 1),
        answers(made, 1, 2),
        answers(made, 1),
    ]
    assert len(calls) == 2
    before = image_lookups(llm)
    assert before[0] - before[1] == 2
    llm.generate(prompt_of(made, 2, 1), GREEDY, use_tqdm=False)
    assert len(calls) == 2, "what was made is kept"
    num_queries, num_hits = np.subtract(image_lookups(llm), before)
    assert num_queries == num_hits >= 2


def test_without_room_images_are_seen_again_and_answers_stay(
    family: MakeFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = family("qwen2_vl")
    llm = made.load(mm_processor_cache_gb=0, **CHUNKS)
    calls = count_tower(llm, monkeypatch)
    for _ in range(2):
        (output,) = llm.generate(prompt_of(made, 1, 2, 1), GREEDY, use_tqdm=False)
        assert tokens_of(output) == answers(made, 1, 2, 1)
    assert len(calls) == 5, "the last stays until another comes"


def test_prefixes_are_shared_with_the_same_images_alone(
    family: MakeFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = family("qwen2_5_vl")
    llm = made.load(enable_prefix_caching=True, block_size=4)
    calls = count_tower(llm, monkeypatch)

    def cached(prompt: Any) -> int:
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        return output.num_cached_tokens or 0

    assert cached(prompt_of(made, 1)) == 0
    assert cached(prompt_of(made, 1)) >= 16
    assert cached(prompt_of(made, 2)) == 0, "not even what comes before the image"
    assert cached("w1 w2 w3 w4 w5 w6") == 0
    assert cached("w1 w2 w3 w4 w5 w6") == 4, "texts share as ever"
    assert cached(prompt_of(made, 1) | {"cache_salt": "mine"}) == 0
    (output,) = llm.generate(prompt_of(made, 1), GREEDY, use_tqdm=False)
    assert tokens_of(output) == answers(made, 1)
    assert len(calls) == 2


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_tower_that_fails_ends_its_request_alone(
    family: MakeFamily, monkeypatch: pytest.MonkeyPatch, *, async_scheduling: bool
) -> None:
    made = family("llava")
    llm = made.load(async_scheduling=async_scheduling, max_num_seqs=2)
    executor: Any = llm.llm_engine.model_executor
    features = executor.worker.loaded.model.get_image_features

    def failing(pixel_values: torch.Tensor, **more: Any) -> Any:
        if pixel_values.amin((2, 3)).equal(pixel_values.amax((2, 3))):
            raise ValueError("nothing to see")
        return features(pixel_values=pixel_values, **more)

    monkeypatch.setattr(executor.worker.loaded.model, "get_image_features", failing)
    flat = prompt_of(made, 1)
    flat["multi_modal_data"] = {"image": Image.new("RGB", (16, 16))}  # of one colour
    prompts = ["w5 w6 w7", prompt_of(made, 2), flat, prompt_of(made, 2)]
    text, seen, failed, again = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert failed.outputs[0].finish_reason == "error"
    assert "its images failed: ValueError: nothing to see" in str(failed.outputs[0].stop_reason)
    assert tokens_of(text) == made.oracle.generate("w5 w6 w7", [], 6)[0]
    assert tokens_of(seen) == tokens_of(again) == answers(made, 2)
    assert llm.llm_engine.scheduler.num_free_gpu_blocks == llm.llm_engine.memory.num_gpu_blocks


def test_an_abort_between_chunks_of_an_image_disturbs_nobody(family: MakeFamily) -> None:
    made = family("smolvlm")
    args = EngineArgs(model=str(made.directory), max_model_len=128, num_gpu_blocks=64, **CHUNKS)
    engine = LLMEngine(args)
    for name, seed in (("gone", 1), ("stays", 2)):
        engine.add_request(name, prompt_of(made, seed), GREEDY)
    engine.step()
    engine.step()
    engine.abort_request("gone")
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += [output for output in engine.step() if output.finished]
    assert [tokens_of(output) for output in outputs] == [answers(made, 2)]
    assert engine.scheduler.num_free_gpu_blocks == engine.memory.num_gpu_blocks


def test_log_probabilities_of_a_prompt_with_images(family: MakeFamily) -> None:
    made = family("qwen2_vl")
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0, ignore_eos=True)
    llm = made.load(enable_prefix_caching=True)
    first, second = llm.generate([prompt_of(made, 1)] * 2, params, use_tqdm=False)
    assert len(first.prompt_logprobs or ()) == len(first.prompt_token_ids)
    assert first.prompt_logprobs == second.prompt_logprobs


@pytest.mark.parametrize("name", ["qwen2_vl", "llava"])
def test_images_that_come_out_wrong_are_found_at_load(
    family: MakeFamily, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    made = family(name)
    monkeypatch.setenv("PAGEDSERVE_CACHE", str(tmp_path))  # where no earlier check is known
    if name == "qwen2_vl":  # positions of a text
        monkeypatch.setattr(image_check, "image_positions", lambda *_: None)
    else:
        features = image_features
        monkeypatch.setattr(
            image_check, "image_features", lambda model, image: features(model, image).flip(0)
        )
    llm = made.load()
    with pytest.raises(RequestError, match=r"has images, and images are not taken with .* differ"):
        llm.generate(prompt_of(made, 1), GREEDY, use_tqdm=False)
    (output,) = llm.generate("w5 w6 w7", GREEDY, use_tqdm=False)
    assert tokens_of(output) == made.oracle.generate("w5 w6 w7", [], 6)[0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"image": []}, "0 images and 1 times the image token '<image>'"),
        ({"image": [picture(1), picture(2)]}, "2 images and 1 times the image token"),
        ({"image": [picture(1)] * 3}, "3 images; limit_mm_per_prompt allows 2"),
        ({"video": picture(1)}, r"multi_modal_data of the prompt has \['video'\]"),
        ({"image": "cat.png"}, "has a str; it must be .* with an image of Pillow"),
        ({"image": Image.new("1", (9000, 9000))}, "has 9000 x 9000 pixels; accepted are 1 to"),
    ],
)
def test_what_is_no_image_of_the_prompt_is_refused(
    family: MakeFamily, data: dict[str, Any], message: str
) -> None:
    made = family("llava")
    llm = made.load(limit_mm_per_prompt={"image": 2})
    prompt: Any = {"prompt": "w1 <image> w2", "multi_modal_data": data}
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt, GREEDY, use_tqdm=False)


def test_what_goes_with_text_alone_is_refused_with_images(family: MakeFamily) -> None:
    made = family("llava")
    llm = made.load()
    cut = SamplingParams(max_tokens=2, truncate_prompt_tokens=4)
    with pytest.raises(RequestError, match="truncate_prompt_tokens would cut them"):
        llm.generate(prompt_of(made, 1), cut, use_tqdm=False)
    with pytest.raises(RequestError, match="adapters are for prompts of text alone"):
        llm.llm_engine.input_processor.process(
            "0",
            parse_prompt(prompt_of(made, 1), "the prompt"),
            GREEDY,
            lora_request=LoRARequest("pirate", 1, "examples/adapters/pirate"),
        )
    with pytest.raises(ConfigError, match=r"limit_mm_per_prompt is .* a mapping like"):
        EngineArgs(model="m", limit_mm_per_prompt={"images": 1})


def test_names_of_cached_images_have_no_effect() -> None:
    prompt: Any = {"prompt": "w1 <image>", "multi_modal_data": {"image": picture(1)}}
    named = prompt | {"multi_modal_uuids": {"image": "cat"}}
    assert parse_prompt(named, "the prompt") == parse_prompt(prompt, "the prompt")


def test_a_model_of_text_refuses_images_by_name(tmp_path: Path) -> None:
    llm = LLM(str(save_tiny_llama(tmp_path)), num_gpu_blocks=8, use_tqdm_on_load=False)
    prompt: Any = {"prompt": "w1", "multi_modal_data": {"image": picture(1)}}
    with pytest.raises(RequestError, match="has images, and the model does not accept images"):
        llm.generate(prompt, GREEDY, use_tqdm=False)


def test_images_that_see_in_both_directions_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDSERVE_CACHE", str(tmp_path / "cache"))
    save_random("gemma3", tmp_path / "model")
    llm = LLM(str(tmp_path / "model"), num_gpu_blocks=8, max_model_len=64, use_tqdm_on_load=False)
    prompt: Any = {"prompt_token_ids": [5, 3, 6], "multi_modal_data": {"image": picture(1)}}
    with pytest.raises(RequestError, match="images of gemma3 see each other in both directions"):
        llm.generate(prompt, GREEDY, use_tqdm=False)


def test_without_pillow_the_extra_is_named(
    family: MakeFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = family("llava")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"needs PIL, .* pip install .*'?pillow"):
        made.load()
