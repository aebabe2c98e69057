"""Encoder-decoders give what ``transformers.generate`` gives of each prompt alone."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from pagedserve import LLM, RequestOutput, SamplingParams
from pagedserve.errors import ConfigError, RequestError
from pagedserve.server.generation import Usage
from tests.encoder_decoder.conftest import FAMILIES, START, MakeFamily, prompts
from tests.support.tiny import EOS, save_tiny_llama

GREEDY = SamplingParams(temperature=0, max_tokens=20)
# Of each kind of positions one: absolute and relative.  The scheduler treats all families alike.
EVERYDAY = ("bart", "t5")


def every_family() -> list[Any]:
    """Names of all families, of which those that are not in `EVERYDAY` are slow."""
    return [
        pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.slow) for name in FAMILIES
    ]


def tokens_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[list(answer.token_ids) for answer in output.outputs] for output in outputs]


def generate(llm: Any, given: Any, params: Any) -> list[list[list[int]]]:
    return tokens_of(llm.generate(given, params, use_tqdm=False))


@pytest.mark.parametrize(
    ("name", "backend"), [*product(FAMILIES, ("rust", "torch")), ("bart", "sdpa")]
)
def test_prompts_together_are_answered_as_each_alone(
    family: MakeFamily, name: str, backend: str
) -> None:
    model, given = family(name), prompts(12)
    expected = [model.generate(prompt, 20) for prompt in given]
    assert len({str(answer) for answer in expected}) > 4  # the encoder's prompt tells
    assert generate(model.load(attention_backend=backend), given, GREEDY) == expected


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_a_decoder_goes_on_from_a_prompt_of_its_own(family: MakeFamily, name: str) -> None:
    model = family(name)
    given, begun = prompts(4), [[5, 6, 7], [START, 8], [9] * 17, [10]]
    pairs = [
        {"encoder_prompt": {"prompt_token_ids": prompt}, "decoder_prompt": begin}
        for prompt, begin in zip(given, begun, strict=True)
    ]
    expected = []
    for prompt, begin in zip(given, begun, strict=True):
        start = begin if begin[0] == START else [START, *begin]
        expected.append(model.generate(prompt, 20, decoder_input_ids=torch.tensor([start])))
    for options in ({}, {"enable_chunked_prefill": True, "max_num_batched_tokens": 8}):
        llm = model.load(max_num_seqs=4, **options)
        assert generate(llm, pairs, GREEDY) == expected
        nothing = [{"encoder_prompt": given[0], "decoder_prompt": None}]
        assert generate(llm, nothing, GREEDY) == [model.generate(given[0], 20)]


def test_text_goes_to_the_encoder(family: MakeFamily) -> None:
    model = family("bart")
    (output,) = model.load().generate("w5w6w7", GREEDY, use_tqdm=False)
    assert output.prompt == output.encoder_prompt == "w5w6w7"
    tokenizer = model.load().get_tokenizer()
    read = tokenizer("w5w6w7").input_ids
    assert (output.encoder_prompt_token_ids, output.prompt_token_ids) == (read, [START])
    assert tokens_of([output]) == [model.generate(read, 20)]


def test_the_text_of_a_decoder_gets_no_special_tokens_but_its_start(
    family: MakeFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm: Any = family("bart").load()
    ends = TemplateProcessing(single="$A w2", special_tokens=[("w2", EOS)])
    monkeypatch.setattr(llm.get_tokenizer().backend_tokenizer, "post_processor", ends)
    prompt = {"encoder_prompt": " w5", "decoder_prompt": " w6"}
    (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert output.encoder_prompt_token_ids == [5, EOS]
    assert output.prompt_token_ids == [START, 6]


def test_the_text_of_an_encoder_is_not_truncated_but_counted(family: MakeFamily) -> None:
    llm = family("bart").load()
    with pytest.raises(RequestError, match="truncate_prompt_tokens is 3, and the prompt of an enc"):
        llm.generate("w5w6w7", SamplingParams(truncate_prompt_tokens=3), use_tqdm=False)
    (output,) = llm.generate("w5w6w7", GREEDY, use_tqdm=False)
    usage = Usage()
    usage.count_prompt(0, output)
    num_read = len(output.encoder_prompt_token_ids or ())
    assert num_read > 0
    assert usage.prompt_tokens == {0: num_read + 1}


def test_a_forced_first_token_is_the_end_of_the_prompt(family: MakeFamily) -> None:
    model, prompt = family("bart", 5), prompts(1)[0]
    (output,) = model.load().generate([prompt], GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == [START, 5]
    assert [[5, *tokens] for tokens in tokens_of([output])[0]] == model.generate(prompt, 21)


@pytest.mark.parametrize("name", every_family())
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_requests_go_on_as_if_nothing_had_been(
    family: MakeFamily, mode: str, name: str
) -> None:
    model, given = family(name), prompts(8)
    expected = [model.generate(prompt, 20) for prompt in given]
    llm = model.load(num_gpu_blocks=34, preemption_mode=mode, swap_space=0.01)
    assert generate(llm, given, GREEDY) == expected
    assert llm.llm_engine.snapshot().num_preemptions > 0
    assert llm.llm_engine.scheduler.num_free_gpu_blocks == 34


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_samples_of_a_prompt_share_its_encoder_through_preemptions(
    family: MakeFamily, mode: str
) -> None:
    model, given = family("bart"), prompts(8)
    params = SamplingParams(n=3, seed=5, max_tokens=20, ignore_eos=True)
    expected = generate(model.load(), given, params)
    llm = model.load(num_gpu_blocks=40, preemption_mode=mode, swap_space=0.01)
    assert generate(llm, given, params) == expected
    assert llm.llm_engine.snapshot().num_preemptions > 0


@pytest.mark.parametrize("name", every_family())
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_beams_are_those_of_transformers_among_other_requests(
    family: MakeFamily, mode: str, name: str
) -> None:
    model, given = family(name), prompts(6)
    beams = SamplingParams(
        use_beam_search=True, temperature=0, best_of=4, n=4, max_tokens=12, length_penalty=1.0
    )
    expected = [
        model.generate(prompt, 12, num_beams=4, num_return_sequences=4)
        if place % 2
        else model.generate(prompt, 20)
        for place, prompt in enumerate(given)
    ]
    params = [beams if place % 2 else GREEDY for place in range(len(given))]
    llm = model.load(num_gpu_blocks=40, preemption_mode=mode, swap_space=0.01)
    assert generate(llm, given, params) == expected
    assert llm.llm_engine.snapshot().num_preemptions > 0


def test_an_encoder_that_fails_ends_its_request_alone(
    family: MakeFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, given = family("bart"), prompts(4)
    expected = [model.generate(prompt, 20) for prompt in given]
    llm = model.load()
    executor: Any = llm.llm_engine.model_executor
    encoder = executor.worker.loaded.model.get_encoder()
    forward = encoder.forward

    def failing(input_ids: torch.Tensor, **more: Any) -> Any:
        if input_ids[0].tolist() == given[2]:
            raise ValueError("unreadable")
        return forward(input_ids=input_ids, **more)

    monkeypatch.setattr(encoder, "forward", failing)
    params = SamplingParams(n=2, seed=1, max_tokens=20)
    outputs = llm.generate(given, [GREEDY, GREEDY, params, GREEDY], use_tqdm=False)
    failed = outputs.pop(2)
    assert failed.outputs[0].finish_reason == "error"
    assert failed.outputs[0].stop_reason == "its encoder input failed: ValueError: unreadable"
    assert tokens_of(outputs) == expected[:2] + expected[3:]
    assert llm.llm_engine.scheduler.num_free_gpu_blocks == 256


def test_an_aborted_request_gives_its_blocks_back(family: MakeFamily) -> None:
    engine = family("bart").load().llm_engine
    engine.add_request("first", {"prompt_token_ids": prompts(1)[0]}, GREEDY)
    engine.step()
    assert engine.scheduler.num_free_gpu_blocks < 255
    engine.abort_request("first")
    assert engine.scheduler.num_free_gpu_blocks == 256


@pytest.mark.parametrize(
    ("prompt", "refusal"),
    [
        ([5] * 65, "the prompt has 65 tokens for the encoder; it takes at most 64"),
        ({"decoder_prompt": [5]}, "the encoder_prompt of the prompt is None"),
        ({"encoder_prompt": [5], "prompt": "w5"}, "the prompt has the key 'prompt'; beside"),
        ({"encoder_prompt": {"encoder_prompt": [5]}}, "encoder_prompt within another"),
        ([97], "token 0 of the prompt is 97"),
    ],
)
def test_prompts_that_cannot_be_are_refused(family: MakeFamily, prompt: Any, refusal: str) -> None:
    with pytest.raises(RequestError, match=refusal):
        family("bart").load().generate(prompt, GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"enable_prefix_caching": True}, "depend on what its encoder read"),
        ({"enable_lora": True}, "decoder-only"),
        ({"quantization": "int8"}, "an encoder-decoder keeps its own modules"),
    ],
)
def test_options_that_cannot_be_obeyed_are_refused(
    family: MakeFamily, options: dict[str, Any], refusal: str
) -> None:
    with pytest.raises(ConfigError, match=refusal):
        family("bart").load(**options)


def test_a_model_without_an_encoder_reads_no_prompt_for_one(tmp_path: Path) -> None:
    llm = LLM(str(save_tiny_llama(tmp_path)), num_gpu_blocks=16, use_tqdm_on_load=False)
    with pytest.raises(RequestError, match="the model has no encoder that reads it"):
        llm.generate({"encoder_prompt": [5], "decoder_prompt": [6]}, GREEDY, use_tqdm=False)
