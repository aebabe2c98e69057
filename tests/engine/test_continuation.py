"""A request that goes on behind tokens of another engine says what that one would have said."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pagedserve import LLM, LLMEngine, RequestError, RequestOutput, SamplingParams
from pagedserve.engine.row_sampler import DrawKey
from pagedserve.inputs.prompts import parse_prompt
from pagedserve.sampling_params import RequestOutputKind
from pagedserve.sampling_params.structured_outputs import StructuredOutputsParams

PROMPT = "Write a short story about a fox:\n"
LETTERS = StructuredOutputsParams(regex="([a-z]{1,8} ){30}")
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.8, "seed": 7, "top_p": 0.95},
    "penalties": {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.3, "presence_penalty": 1},
    "lengths": {"temperature": 0, "min_tokens": 30, "logprobs": 2},
    "stop": {"temperature": 0.8, "seed": 11, "stop": ["zebra", "qqq"], "bad_words": ["fox"]},
    "grammar": {"temperature": 0.8, "seed": 5, "structured_outputs": LETTERS},
    # Characters of several tokens, which a cut may part.
    "bytes": {"temperature": 0, "structured_outputs": StructuredOutputsParams(regex="(字🦊é){9}")},
}


FINAL, DELTA = RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA


@pytest.fixture(scope="module")
def llm(stand_in: Path) -> LLM:
    return LLM(str(stand_in), dtype="float32", num_gpu_blocks=256, use_tqdm_on_load=False)


def answers(
    engine: LLMEngine, way: str, requests: Sequence[tuple[RequestOutputKind, Sequence[int]]]
) -> list[list[RequestOutput]]:
    """The outputs of each request, all in the same steps."""
    for number, (kind, given) in enumerate(requests):
        params = SamplingParams(max_tokens=48, output_kind=kind, **WAYS[way])
        engine.add_request(str(number), PROMPT, params, output_token_ids=given)
    outputs: list[list[RequestOutput]] = [[] for _ in requests]
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[int(output.request_id)].append(output)
    return outputs


@pytest.mark.parametrize("way", WAYS)
def test_what_follows_is_what_followed_there(llm: LLM, way: str) -> None:
    engine = llm.llm_engine
    (whole,), deltas = answers(engine, way, [(FINAL, []), (DELTA, [])])
    wanted = whole.outputs[0]
    tokens = list(wanted.token_ids)
    cuts = (1, 2, 3, 5, 17, len(tokens) - 1)
    finals = answers(engine, way, [(FINAL, tokens[:cut]) for cut in cuts])
    for (found,) in finals:
        assert list(found.outputs[0].token_ids) == tokens
        assert found.outputs[0].text == wanted.text
        assert found.outputs[0].finish_reason == wanted.finish_reason
    for cut, rest in zip(
        cuts, answers(engine, way, [(DELTA, tokens[:cut]) for cut in cuts]), strict=True
    ):
        said = [delta.outputs[0] for delta in [*deltas[:cut], *rest]]
        assert [token for part in said for token in part.token_ids] == tokens
        assert "".join(part.text for part in said) == wanted.text


@pytest.mark.parametrize("cut", [0, 1, 9])
def test_one_of_several_texts_goes_on_by_itself(llm: LLM, cut: int) -> None:
    engine = llm.llm_engine
    several = SamplingParams(n=3, temperature=1.0, seed=8, max_tokens=24, ignore_eos=True)
    (output,) = llm.generate(PROMPT, several, use_tqdm=False)
    wanted = [list(completion.token_ids) for completion in output.outputs]
    assert len({tuple(tokens) for tokens in wanted}) == 3
    single = several.clone()
    single.n, single.output_kind = 1, RequestOutputKind.FINAL_ONLY
    prompt = parse_prompt(PROMPT, "the prompt")
    for choice, tokens in enumerate(wanted):
        request = engine.input_processor.process(
            str(choice), prompt, single, output_token_ids=tokens[:cut], draws=DrawKey(choice=choice)
        )
        engine.add(request)
    found: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step()}
    assert [found[str(choice)] for choice in range(3)] == wanted


def test_log_probabilities_are_those_of_new_tokens(llm: LLM) -> None:
    engine = llm.llm_engine
    [(whole,)] = answers(engine, "lengths", [(FINAL, [])])
    wanted = whole.outputs[0]
    assert wanted.logprobs is not None
    given = list(wanted.token_ids[:9])
    (found,), deltas = answers(engine, "lengths", [(FINAL, given), (DELTA, given)])
    logprobs: Any = found.outputs[0].logprobs
    assert list(logprobs[:9]) == [None] * 9
    for place in range(9, len(wanted.logprobs)):
        token = wanted.token_ids[place]
        assert abs(logprobs[place][token].logprob - wanted.logprobs[place][token].logprob) < 1e-4
    known = zip(list(logprobs)[9:], wanted.token_ids[9:], strict=True)
    total = sum(entry[token].logprob for entry, token in known)
    assert found.outputs[0].cumulative_logprob == pytest.approx(total)
    for delta in deltas:
        shown: Any = delta.outputs[0].logprobs
        for entry, token in zip(shown, delta.outputs[0].token_ids, strict=True):
            assert token in entry


def test_a_prefix_that_is_cached_is_not_computed_again(formula: Any) -> None:
    engine = formula.engine(enable_prefix_caching=True, block_size=4)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    engine.add_request("a", {"prompt_token_ids": [1, 2, 3]}, params)
    tokens = list(formula.finish(engine)["a"].outputs[0].token_ids)
    engine.add_request("b", {"prompt_token_ids": [1, 2, 3]}, params, output_token_ids=tokens[:30])
    found = formula.finish(engine)["b"]
    assert list(found.outputs[0].token_ids) == tokens
    assert found.num_cached_tokens == 32
    formula.check_idle(engine)


@pytest.mark.parametrize(
    ("change", "given", "message"),
    [
        ({}, [1, -1], "token 1 of output_token_ids is -1; token ids must be from 0 to"),
        ({}, [1, "a"], "token 1 of output_token_ids is 'a'"),
        ({}, "ab", "output_token_ids"),
        ({"n": 2}, [1], "output_token_ids continues one text"),
        ({"best_of": 2}, [1], "output_token_ids continues one text"),
        ({"prompt_logprobs": 1}, [1], "cannot be given with prompt_logprobs"),
        ({"max_tokens": 3}, [1, 2, 3], "number 3 ends the text \\(length\\)"),
        ({"stop_token_ids": [9]}, [8, 9, 8], "number 2 ends the text \\(stop\\)"),
        ({}, [1] * 10_000, "the prompt with output_token_ids has 10003 tokens"),
    ],
)
def test_what_cannot_go_on_is_refused(
    formula: Any, change: dict[str, Any], given: Any, message: str
) -> None:
    engine = formula.engine()
    prompt: Any = {"prompt_token_ids": [1, 2, 3]}
    params = SamplingParams(**({"temperature": 0.5, "max_tokens": 20} | change))
    with pytest.raises(RequestError, match=message):
        engine.add_request("a", prompt, params, output_token_ids=given)
    formula.check_idle(engine)


def test_a_stop_string_among_them_is_refused(llm: LLM) -> None:
    engine = llm.llm_engine
    given = llm.get_tokenizer()("once upon a time", add_special_tokens=False).input_ids
    with pytest.raises(RequestError, match="has the stop string 'upon'"):
        engine.add_request("a", PROMPT, SamplingParams(stop="upon"), output_token_ids=given)
    assert not engine.has_unfinished_requests()


def test_a_stop_string_among_the_first_min_tokens_is_text(formula: Any) -> None:
    engine = formula.engine()
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompt: Any = {"prompt_token_ids": [1, 2, 3]}
    engine.add_request("a", prompt, params)
    whole = formula.finish(engine)["a"].outputs[0]
    params.stop, params.min_tokens = (engine.tokenizer.decode(whole.token_ids[2:4]),), 6
    engine.add_request("b", prompt, params, output_token_ids=whole.token_ids[:8])
    assert formula.finish(engine)["b"].outputs[0].text == whole.text
    formula.check_idle(engine)
