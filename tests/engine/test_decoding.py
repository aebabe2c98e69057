"""What users notice of every way of decoding, on a model that is a formula."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedserve import LLMEngine, RequestError, RequestOutput, SamplingParams
from pagedserve.inputs import TokensPrompt

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
RANDOM: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "seed": 11}
BEAMS: dict[str, Any] = {"use_beam_search": True, "temperature": 0, "max_tokens": 8}


def ids(*token_ids: int) -> TokensPrompt:
    return {"prompt_token_ids": list(token_ids)}


def token_of(character: str) -> int:
    """The formula's token for a printable character."""
    return ord(character) - ord("!")


def writes(text: str) -> Callable[[list[int], Tensor], Tensor]:
    """A logits processor that leaves nothing but ``text``, again and again."""

    def process(token_ids: list[int], logits: Tensor) -> Tensor:
        forced = torch.full_like(logits, -math.inf)
        forced[token_of(text[len(token_ids) % len(text)])] = 0
        return forced

    return process


def follow(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    """Step until nothing is left; all outputs of each request, in order."""
    seen: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            seen.setdefault(output.request_id, []).append(output)
    return seen


def answer(formula: Any, prompt: Any, params: SamplingParams) -> RequestOutput:
    """The last output of a request that has an engine for itself."""
    engine = formula.engine()
    engine.add_request("a", prompt, params)
    output: RequestOutput = formula.finish(engine)["a"]
    formula.check_idle(engine)
    return output


def test_all_outputs_of_a_followed_request_grow_and_end(formula: Any) -> None:
    engine = formula.engine()
    engine.add_request("a", ids(1, 2, 3), SamplingParams(**RANDOM, n=3))
    outputs = follow(engine)["a"]
    assert [output.finished for output in outputs] == [False] * 7 + [True]
    for count, output in enumerate(outputs, 1):
        assert [completion.index for completion in output.outputs] == [0, 1, 2]
        assert [len(completion.token_ids) for completion in output.outputs] == [count] * 3
    last = [completion.token_ids for completion in outputs[-1].outputs]
    assert len({tuple(token_ids) for token_ids in last}) == 3
    for output in outputs:
        for completion, whole in zip(output.outputs, last, strict=True):
            assert completion.token_ids == whole[: len(completion.token_ids)]
    assert [completion.finish_reason for completion in outputs[-1].outputs] == ["length"] * 3
    formula.check_idle(engine)


def test_an_output_that_has_ended_stays_while_others_go_on(formula: Any) -> None:
    engine = formula.engine()
    params = SamplingParams(n=4, seed=5, max_tokens=30, stop_token_ids=range(0, 256, 12))
    engine.add_request("a", ids(1), params)
    outputs = follow(engine)["a"]
    lengths = {len(completion.token_ids) for completion in outputs[-1].outputs}
    assert len(lengths) > 1
    for before, after in pairwise(outputs):
        for earlier, later in zip(before.outputs, after.outputs, strict=True):
            if earlier.finish_reason is None:
                assert len(later.token_ids) == len(earlier.token_ids) + 1
            else:
                assert later == earlier
    formula.check_idle(engine)


def test_outputs_do_not_depend_on_company(formula: Any) -> None:
    wishes = [
        SamplingParams(**RANDOM, n=3),
        SamplingParams(**BEAMS, n=2, best_of=3),
        SamplingParams(**RANDOM, n=1, best_of=4, presence_penalty=1),
        GREEDY,
    ]
    alone = [answer(formula, ids(1, 2), params).outputs for params in wishes]
    engine = formula.engine()
    for number, params in enumerate(wishes):
        engine.add_request(str(number), ids(1, 2), params)
    together = formula.finish(engine)
    assert [together[str(number)].outputs for number in range(len(wishes))] == alone
    formula.check_idle(engine)


def raises(token_ids: list[int], logits: Tensor) -> Tensor:
    if len(token_ids) == 2:
        raise LookupError("no third token")
    return logits


GARBAGE: dict[str, tuple[Callable[[list[int], Tensor], Any], str]] = {
    "raises": (raises, "logits processor raises raised LookupError: no third token"),
    "nothing": (
        lambda _, __: None,
        "returned NoneType, expected a dense float tensor of shape [257]",
    ),
    "short": (lambda _, __: torch.zeros(3), "returned float32 [3], expected"),
    "integers": (lambda _, logits: logits.long(), "returned int64 [257], expected"),
    "nan": (lambda _, logits: logits * math.nan, "returned NaN"),
    "nothing left": (lambda _, logits: logits - math.inf, "no token is left to sample"),
    "infinity": (lambda _, logits: logits + math.inf, "hold infinity"),
}


@pytest.mark.parametrize("ways", [{"temperature": 0}, RANDOM | {"n": 3}, BEAMS | {"best_of": 3}])
@pytest.mark.parametrize("name", GARBAGE)
def test_a_bad_logits_processor_fails_its_request_alone(
    formula: Any, name: str, ways: dict[str, Any]
) -> None:
    processor, reason = GARBAGE[name]
    others = {"greedy": GREEDY, "random": SamplingParams(**RANDOM, n=2)}
    alone = {name: answer(formula, ids(7), params).outputs for name, params in others.items()}
    engine = formula.engine()
    engine.add_request("greedy", ids(7), others["greedy"])
    engine.add_request("bad", ids(1, 2), SamplingParams(**ways, logits_processors=[processor]))
    engine.add_request("random", ids(7), others["random"])
    outputs = formula.finish(engine)
    for completion in outputs["bad"].outputs:
        assert completion.finish_reason == "error"
        assert reason in str(completion.stop_reason)
        assert len(completion.token_ids) == (2 if processor is raises else 0)
    assert len(outputs["bad"].outputs) >= 1
    assert {name: outputs[name].outputs for name in others} == alone
    formula.check_idle(engine)
    engine.add_request("bad", ids(7), GREEDY)
    assert formula.finish(engine)["bad"].outputs[0].token_ids == formula.greedy([7], 8)


def test_a_request_whose_every_token_is_banned_fails_by_name(formula: Any) -> None:
    params = SamplingParams(temperature=0, min_tokens=1, allowed_token_ids=[formula.eos])
    (output,) = answer(formula, ids(1), params).outputs
    assert (output.finish_reason, output.token_ids) == ("error", [])
    assert "no token is left to sample" in str(output.stop_reason)


def test_a_large_bias_forces_a_token_and_only_allowed_ones_come(formula: Any) -> None:
    params = SamplingParams(**RANDOM, n=2, logit_bias={77: 300})  # the formula's span 128
    outputs = answer(formula, ids(1), params).outputs
    assert [completion.token_ids for completion in outputs] == [[77] * 8] * 2
    params = SamplingParams(**RANDOM, n=4, allowed_token_ids=[3, 40, 200])
    outputs = answer(formula, ids(1), params).outputs
    assert {token for completion in outputs for token in completion.token_ids} <= {3, 40, 200}


def test_bad_words_never_come(formula: Any) -> None:
    letters = [token_of(letter) for letter in "abc"]
    ways: dict[str, Any] = {"n": 4, "temperature": 50, "max_tokens": 60, "seed": 1}
    free = SamplingParams(**ways, allowed_token_ids=letters)
    assert all("ab" in completion.text for completion in answer(formula, ids(1), free).outputs)
    bad = SamplingParams(**ways, allowed_token_ids=letters, bad_words=["ab", "cca"])
    for completion in answer(formula, ids(1), bad).outputs:
        assert len(completion.text) == 60
        assert "ab" not in completion.text
        assert "cca" not in completion.text


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_tokens_cuts_the_text(formula: Any, include: bool) -> None:
    engine = formula.engine()
    params = SamplingParams(
        temperature=0,
        max_tokens=20,
        stop=["no", "halt"],
        include_stop_str_in_output=include,
        logits_processors=[writes("gohahalthere")],
    )
    engine.add_request("a", ids(1), params)
    outputs = follow(engine)["a"]
    (last,) = outputs[-1].outputs
    assert last.text == ("gohahalt" if include else "goha")
    assert last.token_ids == [token_of(letter) for letter in "gohahalt"]
    assert (last.finish_reason, last.stop_reason) == ("stop", "halt")
    texts = [output.outputs[0].text for output in outputs]
    if include:
        assert texts == ["gohahalt"[:count] for count in range(1, 9)]
    else:  # what may be the start of a stop string is held back
        assert texts == ["g", "go", "go", "go", "goha", "goha", "goha", "goha"]
    for before, after in pairwise(texts):
        assert after.startswith(before)
    assert len(outputs) == 8
    formula.check_idle(engine)


def test_stop_strings_end_each_output_by_itself(formula: Any) -> None:
    letters = [token_of(letter) for letter in "abcd"]
    ways: dict[str, Any] = {"n": 4, "temperature": 50, "max_tokens": 40, "seed": 2}
    params = SamplingParams(**ways, allowed_token_ids=letters, stop="da")
    free = SamplingParams(**ways, allowed_token_ids=letters)
    engine = formula.engine()
    engine.add_request("a", ids(1), params)
    outputs = follow(engine)["a"]
    whole = [completion.text for completion in answer(formula, ids(1), free).outputs]
    for place, text in enumerate(whole):
        shown = [output.outputs[place].text for output in outputs]
        assert shown[-1] == text.partition("da")[0]
        for before, after in pairwise(shown):
            assert after.startswith(before)
        last = outputs[-1].outputs[place]
        expected = ("stop", "da") if "da" in text else ("length", None)
        assert (last.finish_reason, last.stop_reason) == expected
    formula.check_idle(engine)


@pytest.mark.parametrize("include", [False, True])
def test_beams_stop_at_strings(formula: Any, include: bool) -> None:
    params = SamplingParams(
        **BEAMS | {"max_tokens": 20},
        best_of=3,
        n=3,
        early_stopping="never",
        allowed_token_ids=[token_of(letter) for letter in "abcd"],
        stop="ca",
        include_stop_str_in_output=include,
    )
    outputs = answer(formula, ids(1), params).outputs
    assert {completion.finish_reason for completion in outputs} == {"stop", "length"}
    for completion in outputs:
        written = "".join(chr(token + ord("!")) for token in completion.token_ids)
        before, found, after = written.partition("ca")
        assert completion.text == (before + found if include else before)
        assert after == ""  # it ends with the token that completes the string
        expected = ("stop", "ca") if found else ("length", None)
        assert (completion.finish_reason, completion.stop_reason) == expected


@pytest.mark.parametrize("ways", [{"temperature": 0}, BEAMS | {"best_of": 2}])
def test_stop_strings_among_the_first_tokens_do_not_count(
    formula: Any, ways: dict[str, Any]
) -> None:
    params = SamplingParams(**ways, min_tokens=3, stop="a", logits_processors=[writes("abacus")])
    (output,) = answer(formula, ids(1), params).outputs
    assert (output.text, output.stop_reason) == ("abacus", "a")
    assert len(output.token_ids) == 7


def test_the_prompt_of_an_output_is_the_callers_to_change(formula: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, repetition_penalty=1.5)
    expected = answer(formula, ids(1, 2, 3), params).outputs
    engine = formula.engine()
    engine.add_request("a", ids(1, 2, 3), params)
    while engine.has_unfinished_requests():
        (output,) = engine.step()
        output.prompt_token_ids.append(10**6)
    assert output.outputs == expected
    formula.check_idle(engine)


def test_truncation_keeps_the_last_tokens(formula: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, truncate_prompt_tokens=3)
    output = answer(formula, ids(*range(10)), params)
    assert output.prompt_token_ids == [7, 8, 9]
    assert output.outputs[0].token_ids == formula.greedy([7, 8, 9], 4)
    assert answer(formula, ids(1, 2), params).prompt_token_ids == [1, 2]


@pytest.mark.parametrize("ways", [{"temperature": 0}, {"n": 2, "seed": 1}])
def test_no_end_before_min_tokens(formula: Any, ways: dict[str, Any]) -> None:
    params = SamplingParams(
        **ways, max_tokens=10, min_tokens=3, logit_bias={formula.eos: 500, 50: 300}
    )
    for completion in answer(formula, ids(1), params).outputs:
        assert completion.token_ids == [50, 50, 50, formula.eos]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
        assert "<|end|>" not in completion.text


@pytest.mark.parametrize(
    "ways", [RANDOM | {"best_of": 5}, BEAMS | {"best_of": 5}], ids=["best of", "beams"]
)
def test_who_is_chosen_at_the_end_has_one_output(formula: Any, ways: dict[str, Any]) -> None:
    engine = formula.engine()
    engine.add_request("a", ids(1, 2), SamplingParams(**ways, n=2))
    (output,) = follow(engine)["a"]
    assert output.finished
    assert [completion.index for completion in output.outputs] == [0, 1]
    assert [completion.finish_reason for completion in output.outputs] == ["length"] * 2
    first, second = (completion.cumulative_logprob for completion in output.outputs)
    assert first is not None
    assert second is not None
    assert first >= second
    formula.check_idle(engine)


@pytest.mark.parametrize("num_steps", [0, 1, 4])
@pytest.mark.parametrize(
    "ways", [RANDOM | {"n": 4}, RANDOM | {"n": 3, "best_of": 5}, BEAMS | {"n": 3, "best_of": 4}]
)
def test_aborted_in_the_middle(formula: Any, ways: dict[str, Any], num_steps: int) -> None:
    params = SamplingParams(**ways)
    engine = formula.engine()
    engine.add_request("a", ids(1, 2), params)
    engine.add_request("b", ids(3), GREEDY)
    for _ in range(num_steps):
        engine.step()
    (aborted,) = engine.abort_request("a")
    assert aborted.finished
    # Before its first token a request is one sequence.
    assert len(aborted.outputs) == (params.n if num_steps else 1)
    for completion in aborted.outputs:
        assert completion.finish_reason == "abort"
        assert len(completion.token_ids) == num_steps
    outputs = formula.finish(engine)
    assert set(outputs) == {"b"}
    assert outputs["b"].outputs[0].token_ids == formula.greedy([3], 8)
    formula.check_idle(engine)


def test_kept_logprobs_refer_to_no_array_of_the_whole_step(formula: Any) -> None:
    engine = formula.engine()
    given: dict[str, Any] = {"temperature": 0, "max_tokens": 3, "ignore_eos": True}
    few = given | {"logprobs": 2, "prompt_logprobs": 2}
    engine.add_request("all", ids(1, 2), SamplingParams(**few | {"logprobs": 257}))
    engine.add_request("few", ids(1, 2), SamplingParams(**few))
    engine.add_request("beams", ids(1, 2), SamplingParams(**BEAMS | few, n=2))
    last = formula.finish(engine)
    for name in ("few", "beams"):
        for view in (last[name].outputs[0].logprobs, last[name].prompt_logprobs):
            tops = [entry.top for entry in view._entries if entry is not None]
            assert [len(array) for top in tops for array in top] == [2, 2] * len(tops)
            assert all(array.base is None for top in tops for array in top)


def test_forgotten_prefixes_are_not_hit(formula: Any) -> None:
    engine: LLMEngine = formula.engine(enable_prefix_caching=True)
    scheduler = engine.scheduler

    def num_hits() -> int:
        before = scheduler.num_cached_tokens
        engine.add_request("a", ids(*range(16)), GREEDY)
        assert formula.finish(engine)["a"].outputs[0].token_ids == formula.greedy(range(16), 8)
        return scheduler.num_cached_tokens - before

    assert num_hits() == 0
    assert num_hits() > 0
    engine.add_request("b", ids(*range(16)), GREEDY)
    engine.step()
    assert not engine.reset_prefix_cache()
    formula.finish(engine)
    assert num_hits() > 0
    assert engine.reset_prefix_cache()
    assert num_hits() == 0
    assert num_hits() > 0
    formula.check_idle(engine)


REFUSALS: dict[str, tuple[dict[str, Any], Sequence[str]]] = {
    "n": ({"n": 33}, ["n is 33", "max_num_seqs is 32"]),
    "best_of": ({"best_of": 33}, ["best_of is 33", "max_num_seqs is 32"]),
    "beams": (BEAMS | {"best_of": 33}, ["best_of is 33", "max_num_seqs is 32"]),
    "logprobs": ({"logprobs": 258}, ["logprobs is 258", "at most 257"]),
    "prompt_logprobs": ({"prompt_logprobs": 258}, ["prompt_logprobs is 258", "at most 257"]),
    "logit_bias": ({"logit_bias": {257: 1}}, ["logit_bias has 257", "from 0 to 256"]),
    "allowed": ({"allowed_token_ids": [1, 999]}, ["allowed_token_ids has 999", "from 0 to 256"]),
    "stop": ({"stop_token_ids": [257]}, ["stop_token_ids has 257", "from 0 to 256"]),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_done_is_refused_by_name(formula: Any, name: str) -> None:
    given, reasons = REFUSALS[name]
    engine = formula.engine()
    with pytest.raises(RequestError) as caught:
        engine.add_request("a", ids(1), SamplingParams(**given))
    assert all(reason in str(caught.value) for reason in reasons)
    formula.check_idle(engine)
    engine.add_request("a", ids(1), GREEDY)
    assert formula.finish(engine)["a"].outputs[0].token_ids == formula.greedy([1], 8)


@pytest.mark.parametrize(
    "given",
    [
        {"n": 32},
        {"logprobs": 257, "prompt_logprobs": 257},
        {"logprobs": 257, "prompt_logprobs": 257, "temperature": 0}
        | {"use_beam_search": True, "best_of": 2},
        {"logit_bias": {256: 1}, "allowed_token_ids": [256, 3], "stop_token_ids": [256]},
    ],
)
def test_the_most_that_is_accepted_runs(formula: Any, given: dict[str, Any]) -> None:
    output = answer(formula, ids(1, 2), SamplingParams(seed=1, max_tokens=4, **given))
    assert len(output.outputs) == given.get("n", 1)
    if "logprobs" in given:
        assert output.outputs[0].logprobs is not None
        assert output.prompt_logprobs is not None
        assert [len(entry) for entry in output.outputs[0].logprobs] == [257] * 4
        assert [entry and len(entry) for entry in output.prompt_logprobs] == [None, 257]
