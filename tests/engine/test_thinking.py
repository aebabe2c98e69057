"""A thinking budget closes reasoning with the model's end tag, and changes nothing before it.

The oracle is an engine without budgets: its tokens up to the budget, the tag, and what it generates
after both.
"""

import re
from collections.abc import Iterator, Sequence
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
from pagedserve.config.reasoning import REASONING_FORMATS, ReasoningFormat, reasoning_format_of
from pagedserve.errors import ConfigError
from pagedserve.inputs import TokensPrompt
from tests.support.drafts import NGRAM, Guesser, Noise, drafting
from tests.support.every_way import AMPLE, MEMORIES, Model, tiny_model
from tests.support.formula import FormulaModel, byte_tokenizer

ASYNC: dict[str, Any] = {"async_scheduling": True}


def tags(start: str, end: str) -> dict[str, Any]:
    return {"reasoning_config": {"reasoning_start_str": start, "reasoning_end_str": end}}


def ids(text: str) -> list[int]:
    token_ids: list[int] = byte_tokenizer().encode(text)
    return token_ids


def text_of(token_ids: Sequence[int]) -> str:
    return str(byte_tokenizer().decode([*token_ids]))


OPEN = ids("Why?<t>\n")
TAGS = tags("<t>", "</t>")
END = ids("</t>")


def greedy(num_tokens: int, budget: int | None = None, **given: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0,
        max_tokens=num_tokens,
        ignore_eos=True,
        thinking_token_budget=budget,
        **given,
    )


def run(
    formula: FormulaModel, engine: LLMEngine, prompt: list[int], params: SamplingParams
) -> list[int]:
    engine.add_request("a", TokensPrompt(prompt_token_ids=prompt), params)
    (output,) = formula.finish(engine)["a"].outputs
    formula.check_idle(engine)
    return list(output.token_ids)


def closed(
    formula: FormulaModel, prompt: list[int], num_before: int, end: list[int], num_tokens: int
) -> list[int]:
    """The tokens of a text whose end tag follows ``num_before`` tokens."""
    begun = formula.greedy(prompt, num_before) + end
    return (begun + formula.greedy(prompt + begun, num_tokens))[:num_tokens]


@pytest.mark.parametrize("options", [{}, ASYNC])
@pytest.mark.parametrize("budget", [0, 1, 2, 9, 30])
def test_reasoning_that_reaches_its_budget_is_closed(
    formula: FormulaModel, budget: int, options: dict[str, Any]
) -> None:
    engine = formula.engine(**TAGS, **options)
    found = run(formula, engine, OPEN, greedy(50, budget))
    assert found == closed(formula, OPEN, budget, END, 50)
    # Only around the budget does a step wait for the tokens of the last.
    assert engine.stats.num_async_steps >= (35 if options else 0)


@pytest.mark.parametrize("prompt", [OPEN, ids("Why?"), ids("<t>so</t>")])
def test_a_budget_that_is_not_reached_changes_no_token(
    formula: FormulaModel, prompt: list[int]
) -> None:
    engine = formula.engine(**TAGS)
    budget = 40 if prompt == OPEN else 0  # the others do not begin to reason
    assert run(formula, engine, prompt, greedy(40, budget)) == formula.greedy(prompt, 40)


def written(formula: FormulaModel, first: int, num_tokens: int) -> tuple[list[int], str]:
    """A prompt, and the visible text of its tokens from ``first`` on, which is new there."""
    for number in range(60):
        prompt = [0] * number + OPEN if first else [*ids("Why?"), number]
        tokens = formula.greedy(prompt, first + num_tokens)
        text = text_of(tokens[first:])
        is_visible = text.isascii() and text.isprintable() and " " not in text
        if is_visible and text not in text_of(tokens[:-1]):
            return prompt, text
    raise AssertionError("no such prompt")


@pytest.mark.parametrize("options", [{}, ASYNC])
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_an_end_tag_of_the_model_counts(
    formula: FormulaModel, num_tokens: int, options: dict[str, Any]
) -> None:
    prompt, end = written(formula, 5, num_tokens)
    engine = formula.engine(**tags("<t>", end), **options)
    # At 5 the tag is forced, which the model writes too; at 6 the model is within its tag.
    for budget in (5, 6, 7, 20):
        found = run(formula, engine, prompt, greedy(40, budget))
        assert found == formula.greedy(prompt, 40), budget
    found = run(formula, engine, prompt, greedy(40, 4))
    assert found == closed(formula, prompt, 4, ids(end), 40)


@pytest.mark.parametrize("options", [{}, ASYNC])
def test_a_start_tag_of_the_model_counts(formula: FormulaModel, options: dict[str, Any]) -> None:
    prompt, start = written(formula, 0, 2)
    engine = formula.engine(**tags(start, "</t>"), **options)
    for budget in (0, 1, 7):
        found = run(formula, engine, prompt, greedy(40, budget))
        assert found == closed(formula, prompt, 2 + budget, END, 40)


def test_a_stream_has_the_same_tokens(formula: FormulaModel) -> None:
    engine = formula.engine(**TAGS)
    params = greedy(20, 5, output_kind=RequestOutputKind.DELTA)
    engine.add_request("a", TokensPrompt(prompt_token_ids=OPEN), params)
    found: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            found += output.outputs[0].token_ids
    assert found == closed(formula, OPEN, 5, END, 20)


@pytest.mark.parametrize("budget", [0, 6])
@pytest.mark.parametrize("options", [{}, ASYNC])
def test_a_grammar_holds_the_answer(
    formula: FormulaModel, budget: int, options: dict[str, Any]
) -> None:
    held: dict[str, Any] = {"structured_outputs": {"regex": "[a-e]{5}x"}}
    engine = formula.engine(**TAGS, **options)
    begun = formula.greedy(OPEN, budget) + END
    answer = run(formula, engine, OPEN + begun, greedy(30, **held))
    found = run(formula, engine, OPEN, greedy(30, budget, **held))
    assert found == begun + answer
    assert text_of(answer[:-1]).endswith("x")
    # Without reasoning the grammar holds all of the text, as without a budget.
    plain = ids("Why?")
    expected = run(formula, engine, plain, greedy(30, **held))
    assert run(formula, engine, plain, greedy(30, budget, **held)) == expected


def test_a_grammar_holds_what_follows_the_models_own_tag(formula: FormulaModel) -> None:
    prompt, end = written(formula, 5, 1)
    engine = formula.engine(**tags("<t>", end), **ASYNC)
    held: dict[str, Any] = {"structured_outputs": {"regex": "[a-e]{5}x"}}
    begun = formula.greedy(prompt, 6)
    answer = run(formula, engine, prompt + begun, greedy(30, **held))
    assert run(formula, engine, prompt, greedy(30, 20, **held)) == begun + answer


@pytest.mark.parametrize("options", [{}, ASYNC])
def test_a_grammar_needs_no_budget_to_hold_what_follows_reasoning(
    formula: FormulaModel, options: dict[str, Any]
) -> None:
    prompt, end = written(formula, 5, 1)
    engine = formula.engine(**tags("<t>", end), **options)
    held = greedy(30, structured_outputs={"regex": "[a-e]{5}x"})
    begun = formula.greedy(prompt, 6)
    answer = run(formula, engine, prompt + begun, held)
    assert text_of(answer[:-1]).endswith("x")
    assert run(formula, engine, prompt, held) == begun + answer
    # Only an option says that there is reasoning; a template's tags are for budgets.
    whole = text_of(run(formula, formula.engine(**options), prompt, held)[:-1])
    assert re.fullmatch("[a-e]{5}x", whole)


def test_a_model_may_begin_to_reason_before_a_grammar(formula: FormulaModel) -> None:
    plain = ids("Why?")
    (first,) = formula.greedy(plain, 1)
    start, (second,) = text_of([first]), formula.greedy([*plain, first], 1)
    engine = formula.engine(**tags(start, text_of([second])))
    held = greedy(30, structured_outputs={"regex": "[a-e]{5}x"})
    answer = run(formula, engine, [*plain, first, second], held)
    assert run(formula, engine, plain, held) == [first, second, *answer]
    # Nor does a grammar end where it describes the reasoning itself.
    known = greedy(30, structured_outputs={"regex": f"{re.escape(start)}[a-e]{{5}}x"})
    whole = text_of(run(formula, engine, plain, known)[:-1])
    assert re.fullmatch(f"{re.escape(start)}[a-e]{{5}}x", whole)
    # Reasoning that the prompt has closed does not begin again.
    assert re.fullmatch("[a-e]{5}x", text_of(answer[:-1]))


def test_a_budget_without_known_tags_is_refused(formula: FormulaModel) -> None:
    engine = formula.engine()
    with pytest.raises(RequestError, match="no known tags of reasoning: give reasoning_config"):
        run(formula, engine, OPEN, greedy(9, 3))
    assert run(formula, engine, OPEN, greedy(9)) == formula.greedy(OPEN, 9)


def test_tags_are_those_of_the_template() -> None:
    assert reasoning_format_of("{{ messages }}") is None
    for name, known in REASONING_FORMATS.items():
        found = reasoning_format_of(f"{{{{ x.split('{known.end}') }}}}")
        assert found is not None
        assert (found.start, found.end, found.begins) == (known.start, known.end, False), name


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ({}, "reasoning_config has no keys; it must have reasoning_start_str and reasoning_end_"),
        ({"reasoning_end_str": "x"}, "reasoning_config has 'reasoning_end_str'; it must have"),
        (
            {"reasoning_start_str": "x", "reasoning_end_str": ""},
            r"reasoning_config\.reasoning_end_str is ''",
        ),
        ("</think>", "a mapping with names for keys"),
    ],
)
def test_invalid_tags_are_refused(formula: FormulaModel, given: Any, refusal: str) -> None:
    with pytest.raises(ConfigError, match=refusal):
        formula.engine(reasoning_config=given)
    known = ReasoningFormat(start="<t>", end="</t>")
    assert formula.engine(reasoning_config=known).input_processor.args.reasoning_config == known


# The tags of the tiny model are two of its words.
START_WORD, END_WORD = 50, 70
TINY = tags(f" w{START_WORD}", f" w{END_WORD}")
BUDGETS = [0, 1, 5, 9]


@pytest.fixture(scope="module", params=["native", "torch"])
def tiny(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    yield from tiny_model(tmp_path_factory.mktemp("thinking"), request.param)


def prompts(model: Model) -> list[TokensPrompt]:
    return [
        TokensPrompt(prompt_token_ids=[*map(int, prompt["prompt_token_ids"]), START_WORD])
        for prompt in model.prompts[:24]
    ]


def params_of(number: int, budget: int | None) -> SamplingParams:
    """Greedy and sampled requests of one sequence and several."""
    random: dict[str, Any] = {"temperature": 0.9, "top_k": 30, "seed": 7 + number}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        random | {"n": 3},
        random | {"logprobs": 2, "presence_penalty": 0.3},
        random | {"n": 2, "best_of": 3},
    ]
    kind = kinds[number % len(kinds)]
    return SamplingParams(
        max_tokens=16, ignore_eos=True, thinking_token_budget=budget, detokenize=False, **kind
    )


def answers(llm: LLM, model: Model) -> list[list[list[int]]]:
    given = prompts(model)
    params = [params_of(number, BUDGETS[number % 3]) for number in range(len(given))]
    outputs = llm.generate(given, params, use_tqdm=False)
    return [[list(sequence.token_ids) for sequence in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def ample(tiny: Model) -> LLM:
    """With memory for all; a test leaves it with no request in it."""
    return tiny.load(AMPLE | TINY)


@pytest.fixture(scope="module")
def expected(ample: LLM, tiny: Model) -> list[list[list[int]]]:
    return answers(ample, tiny)


def one_by_one(
    llm: LLM, given: Sequence[TokensPrompt], said: Sequence[list[int]], numbers: Sequence[int]
) -> list[list[int]]:
    """The tokens of requests without budgets that resume after those already generated."""
    engine = llm.llm_engine
    for number, prompt, tokens in zip(numbers, given, said, strict=True):
        engine.add_request(str(number), prompt, params_of(number, None), output_token_ids=tokens)
    last: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        last |= {output.request_id: output for output in engine.step()}
    return [list(last[str(number)].outputs[0].token_ids) for number in numbers]


def test_sampled_texts_are_closed_alike(ample: LLM, tiny: Model) -> None:
    numbers = [number for number in range(24) if number % 4 in {0, 2}]  # one sequence each
    given = [prompts(tiny)[number] for number in numbers]
    plain = one_by_one(ample, given, [[]] * len(numbers), numbers)

    def with_budget(budget: int) -> list[list[int]]:
        params = [params_of(number, budget) for number in numbers]
        outputs = ample.generate(given, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    for budget in BUDGETS:
        ends = [
            tokens.index(END_WORD) if END_WORD in tokens[:budget] else budget for tokens in plain
        ]
        begun = [[*tokens[:end], END_WORD] for tokens, end in zip(plain, ends, strict=True)]
        assert with_budget(budget) == one_by_one(ample, given, begun, numbers), budget
    assert with_budget(16) == plain


def test_memory_changes_no_token(tiny: Model, expected: list[list[list[int]]]) -> None:
    closed = [END_WORD in tokens[:6] for said in expected for tokens in said]
    assert all(closed)
    for name in ("recompute", "swap", "all at once"):
        llm = tiny.load(MEMORIES[name] | TINY)
        assert answers(llm, tiny) == expected, name
        assert name == "all at once" or llm.llm_engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("kind", [Guesser, Noise, None])
def test_drafts_change_no_token(
    tiny: Model, expected: list[list[list[int]]], kind: type[Guesser] | None
) -> None:
    llm = tiny.load(AMPLE | TINY | {"speculative_config": NGRAM})
    known = {
        tuple(map(int, prompt["prompt_token_ids"])): said
        for prompt, said in zip(prompts(tiny), expected, strict=True)
    }
    drafting(llm, None if kind is None else kind(known, 3))
    assert answers(llm, tiny) == expected
    assert llm.llm_engine.stats.num_accepted_tokens > 0
