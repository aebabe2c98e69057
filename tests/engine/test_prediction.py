"""The caller's prediction of an output changes the number of its steps, never the output.

The oracle is an engine without draft tokens.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from pagedserve import (
    LLM,
    LLMEngine,
    RequestError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from pagedserve.drafts.prediction import Prediction
from pagedserve.engine.input_processor import InputProcessor
from pagedserve.inputs import TokensPrompt
from tests.support.drafts import MOST, NGRAM, draft_always, drafting
from tests.support.every_way import (
    AMPLE,
    MEMORIES,
    NUM_REQUESTS,
    Answer,
    Model,
    every_way,
    said_of,
    tiny_model,
)
from tests.support.formula import FormulaModel

PROMPT: TokensPrompt = {"prompt_token_ids": [5, 6, 7]}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 31, "ignore_eos": True}
DRAFTS: dict[str, Any] = {"speculative_config": NGRAM}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """The tiny model; its tokenizer decodes any words, and here it encodes them too."""

    others = InputProcessor._encode_word

    def encode(self: InputProcessor, text: str) -> list[int]:
        words = re.findall(r" w(\d+)", text)
        return [int(word) for word in words] or others(self, text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InputProcessor, "_encode_word", encode)
        yield from tiny_model(tmp_path_factory.mktemp("prediction"))


def words(token_ids: list[int]) -> str:
    return "".join(f" w{token}" for token in token_ids)


def greedy_tokens(tiny: Model) -> list[int]:
    (output,) = tiny.load(AMPLE).generate([PROMPT], SamplingParams(**GREEDY), use_tqdm=False)
    return list(output.outputs[0].token_ids)


@pytest.fixture(scope="module")
def answer(tiny: Model) -> list[int]:
    return greedy_tokens(tiny)


def counts(llm: LLM, expected: list[int], prediction: str | None) -> tuple[int, int, int]:
    """Steps of a greedy request, and its draft tokens verified and accepted of the prediction."""
    before = llm.llm_engine.stats.num_steps
    params = SamplingParams(prediction=prediction, **GREEDY)
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == expected
    metrics = output.metrics
    assert metrics is not None
    verified, accepted = metrics.num_prediction_tokens, metrics.num_accepted_prediction_tokens
    return llm.llm_engine.stats.num_steps - before, verified, accepted


class Silent:
    """Proposes nothing, so that all draft tokens are of predictions."""

    def propose(self, texts: Any, most: Any) -> list[list[int]]:
        return [[] for _ in zip(texts, most, strict=True)]

    def end(self, text: Any) -> None:
        assert text.token_ids is not None


def test_a_right_prediction_takes_one_step_for_all_its_draft_tokens(
    tiny: Model, answer: list[int]
) -> None:
    llm = drafting(tiny.load(AMPLE | DRAFTS), Silent())
    assert counts(llm, answer, None) == (31, 0, 0)
    # The prompt's token, and then six at a time.
    assert counts(llm, answer, words(answer)) == (1 + 30 // (MOST + 1), 25, 25)
    # A prediction may go on after the output, or end before it.
    assert counts(llm, answer, words([*answer, 1, 2])) == (6, 25, 25)
    assert counts(llm, answer, words(answer[:13])) == (1 + 2 + 18, 10, 10)


def test_a_prediction_ends_before_a_token_that_the_model_lacks(
    tiny: Model, answer: list[int]
) -> None:
    llm = drafting(tiny.load(AMPLE | DRAFTS), Silent())
    assert counts(llm, answer, words([*answer[:13], 97, *answer[13:]])) == (1 + 2 + 18, 10, 10)


def test_a_wrong_prediction_is_not_verified(tiny: Model, answer: list[int]) -> None:
    llm = drafting(tiny.load(AMPLE | DRAFTS), Silent())
    wrong = [next(token for token in range(3, 97) if token not in answer)] * 31
    assert counts(llm, answer, words(wrong)) == (31, 0, 0)
    # The first token is right: the next ones are verified once.
    assert counts(llm, answer, words([answer[0], *wrong])) == (31, MOST, 0)


@pytest.mark.parametrize(
    ("changed", "num_steps"),
    [
        (lambda tokens: [*tokens[:13], 1, *tokens[14:]], 6 + 3),  # one replaced
        (lambda tokens: [*tokens[:13], *tokens[15:]], 6 + 4),  # two are missing
        (lambda tokens: [*tokens[:13], 1, 2, 1, *tokens[13:]], 6 + 3),  # three more
        (lambda tokens: [1, 2, *tokens], 6 + 2),  # other ones before it
        (lambda tokens: tokens[16:], 6 + 15),  # the second half
    ],
)
def test_a_prediction_is_followed_again_after_a_divergence(
    tiny: Model, answer: list[int], changed: Any, num_steps: int
) -> None:
    llm = drafting(tiny.load(AMPLE | DRAFTS), Silent())
    found, verified, accepted = counts(llm, answer, words(changed(answer)))
    assert found <= num_steps
    assert 0 < accepted <= verified
    assert accepted == 31 - found  # each saves a step


def test_without_draft_tokens_a_prediction_is_passed_over(tiny: Model, answer: list[int]) -> None:
    assert counts(tiny.load(AMPLE), answer, words(answer)) == (31, 0, 0)


def test_a_stream_has_all_tokens_of_a_step_at_once(tiny: Model, answer: list[int]) -> None:
    engine = drafting(tiny.load(AMPLE | DRAFTS), Silent()).llm_engine
    params = SamplingParams(output_kind=RequestOutputKind.DELTA, prediction=words(answer), **GREEDY)
    engine.add_request("a", PROMPT, params)
    deltas: list[list[int]] = []
    while engine.has_unfinished_requests():
        deltas += [list(output.outputs[0].token_ids) for output in engine.step()]
    assert deltas == [answer[:1], *(answer[start : start + 6] for start in range(1, 31, 6))]


def test_a_grammar_holds_whatever_is_predicted(formula: FormulaModel) -> None:
    held: dict[str, Any] = {
        "structured_outputs": {"regex": "[a-z]{9}-[a-z]{9}"},
        "temperature": 0.9,
        "seed": 3,
        "max_tokens": 31,
    }

    def run(engine: LLMEngine, prediction: str | None) -> RequestOutput:
        params = SamplingParams(prediction=prediction, **held)
        engine.add_request("a", PROMPT, params)
        return formula.finish(engine)["a"]

    expected = run(formula.engine(), None).outputs[0]
    text = expected.text
    accepted = []
    for prediction in (text, f"{text[:4]}7{text[5:]}", "777 777 777"):
        engine = formula.engine(**DRAFTS)
        draft_always(engine, Silent())
        found = run(engine, prediction)
        assert found.outputs[0].token_ids == expected.token_ids
        assert found.metrics is not None
        accepted.append(found.metrics.num_accepted_prediction_tokens)
    assert accepted[0] >= 14
    assert accepted[0] > accepted[1] > accepted[2] == 0


def predicted(number: int, said: Answer) -> str | None:
    """Right, right up to the middle, right but for one, of another sequence, wrong, or none."""
    tokens: list[int] = list(said[0][0])  # type: ignore[call-overload]
    last: list[int] = list(said[-1][0])  # type: ignore[call-overload]
    half = len(tokens) // 2
    kinds = [tokens, tokens[:half] + [1] * half, [*tokens[:3], 1, *tokens[4:]], last, [3] * 9]
    kind = kinds[number // 8 % len(kinds)]
    return words(kind) if number % 9 else None


@pytest.mark.parametrize("memory", ["recompute", "swap", "prefixes", "all at once"])
def test_every_way_of_decoding_gives_the_same_outputs(tiny: Model, memory: str) -> None:
    expected = tiny.expected(is_async=False)
    llm = drafting(tiny.load(MEMORIES[memory] | DRAFTS), Silent())
    params = [every_way(number, tiny.stops) for number in range(NUM_REQUESTS)]
    for number, said in enumerate(expected):
        params[number].prediction = predicted(number, said)
    outputs = llm.generate(tiny.prompts, params, use_tqdm=False)
    found = [said_of(output) for output in outputs]
    different = [number for number in range(NUM_REQUESTS) if found[number] != expected[number]]
    assert found == expected, f"requests {different} differ"
    metrics = [output.metrics for output in outputs]
    assert sum(request.num_accepted_prediction_tokens for request in metrics) > 100
    assert memory not in {"recompute", "swap"} or llm.llm_engine.scheduler.num_preemptions > 0
    llm.llm_engine.scheduler.check()


def by_scan(predicted: list[int], token_ids: list[int]) -> list[int]:
    """Where a prediction has the end of a text once: what follows it."""
    for length in range(min(len(token_ids), 8), 1, -1):
        end = token_ids[-length:]
        found = [at + length for at in range(len(predicted)) if predicted[at : at + length] == end]
        if found:
            return predicted[found[0] :]
    return []


def test_the_longest_match_counts() -> None:
    predicted = [1, 2, 3, 40, 0, 2, 3, 50, 9, 8, 7, 6]
    for token_ids in ([1, 2, 3], [5, 1, 2, 3], [4, 0, 2, 3], [9, 8, 7], [7, 7], [8, 9]):
        place = Prediction(predicted, 2, 8)
        assert place.propose([0], 4) == []  # lost at once
        assert place.propose([0, *token_ids], 99) == by_scan(predicted, [0, *token_ids])


def test_of_equal_matches_the_nearest_counts() -> None:
    predicted = [7, 1, 2, 3, 7, 1, 2, 4, 7, 1, 2, 5]
    place = Prediction(predicted, 2, 8)
    assert place.propose([7, 1, 2, 3, 7, 1, 2], 2) == [4, 7]
    assert place.propose([7, 1, 2, 3, 7, 1, 2, 9], 2) == []
    assert place.propose([7, 1, 2, 3, 7, 1, 2, 9, 7, 1], 2) == [2, 4]  # two places as near
    assert Prediction([], 2, 8).propose([1], 2) == []


@pytest.mark.parametrize("given", [5, "", ["a"], b"a"])
def test_a_prediction_that_is_no_text_is_refused(given: Any) -> None:
    with pytest.raises(RequestError, match=r"prediction is .*non-empty string"):
        SamplingParams(prediction=given)
