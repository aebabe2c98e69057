"""Decisions of ``LLM`` against transformers, and the same bits whatever is computed beside them."""

import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pagedserve import (
    LLM,
    Calibration,
    ChoiceAnswer,
    Decision,
    NoulAnswer,
    Question,
    RequestError,
    SamplingParams,
    ScoreAnswer,
)
from pagedserve.decisions.prompts import Asked, DecisionPrompts
from pagedserve.decisions.questions import parse_questions

STATE = {
    "customer": "Ada",
    "messages": ["My parcel has not arrived.", "I want my money back — it's been two weeks."],
    "orders": [{"id": 7, "value": 19.5, "sent": True}, {"id": 8, "value": 3, "sent": False}],
}
QUESTIONS: dict[str, Question] = {
    "route": {
        "type": "choice",
        "instructions": "Which team takes it?",
        "criteria": {"refunds": "money back", "shipping": None, "sales": "new orders"},
    },
    "urgent": {"type": "noul", "instructions": "Is it urgent?"},
    "polite": {"type": "noul", "criteria": {"true": "friendly", "false": "rude"}},
    "mood": {"type": "score", "instructions": {"rate": "mood"}, "criteria": ["low", "mid", "top"]},
}
LABELS = {"route": "ABC", "urgent": ("yes", "no"), "polite": ("yes", "no"), "mood": "012"}
SYSTEM = "You sort letters."
# A step holds less than the state: it is computed in chunks.
FEW_TOKENS = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "enable_chunked_prefill": True}
MEMORIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cached": {"enable_prefix_caching": True},
    "chunked": FEW_TOKENS,
    "cached in chunks": {"enable_prefix_caching": True} | FEW_TOKENS,
}

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", params=["native", "torch"])
def backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def load(stand_in: Path, backend: Any) -> Any:
    def loading(**options: Any) -> LLM:
        return LLM(
            str(stand_in),
            backend=backend,
            dtype="float32",
            num_gpu_blocks=256,
            use_tqdm_on_load=False,
            **options,
        )

    return loading


@pytest.fixture(scope="module")
def llm(load: Any) -> Iterator[LLM]:
    with load() as loaded:
        yield loaded


@pytest.fixture(scope="module")
def alone(llm: LLM) -> dict[str, Any]:
    """The answer to each question where it is the only one."""
    return {
        name: (decision.answers[name], decision.diagnostics[name])
        for name, question in QUESTIONS.items()
        for decision in [llm.decide(STATE, {name: question}, instructions=SYSTEM)]
    }


def decide(llm: LLM, names: list[str]) -> Decision:
    questions = {name: QUESTIONS[name] for name in names}
    return llm.decide(STATE, questions, instructions=SYSTEM)


def check(decision: Decision, alone: dict[str, Any]) -> None:
    for name in decision.answers:
        assert (decision.answers[name], decision.diagnostics[name]) == alone[name]


def test_probabilities_are_those_of_transformers(llm: LLM, stand_in: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(stand_in, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(stand_in)
    decision = decide(llm, list(QUESTIONS))
    asked = Asked(state=STATE, questions=parse_questions(QUESTIONS), instructions=SYSTEM)
    num_tokens = 0
    for question in asked.questions:
        text = tokenizer.apply_chat_template(
            asked.conversation(question), tokenize=False, add_generation_prompt=True
        )
        input_ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        num_tokens += input_ids.shape[1]
        with torch.inference_mode():
            logits = model(input_ids).logits[0, -1]
        ids = [
            tokenizer(label, add_special_tokens=False).input_ids
            for label in LABELS[question.question_id]
        ]
        assert {len(each) for each in ids} == {1}
        own = [each[0] for each in ids]
        answer = decision.answers[question.question_id]
        found = list(answer.probabilities.values())
        assert found == pytest.approx(logits[own].softmax(0).tolist(), abs=1e-5)
        mass = logits.softmax(0)[own].sum().item()
        diagnostics = decision.diagnostics[question.question_id]
        assert diagnostics.label_mass == pytest.approx(mass, rel=1e-4)
        assert diagnostics.argmax_is_label == (int(logits.argmax()) in own)
        assert answer.confidence == pytest.approx(max(found) * mass, rel=1e-4)
    assert decision.num_prompt_tokens == num_tokens


def test_answers_have_the_fields_of_their_types(llm: LLM) -> None:
    answers = decide(llm, list(QUESTIONS)).answers
    route, urgent, mood = answers["route"], answers["urgent"], answers["mood"]
    assert isinstance(route, ChoiceAnswer)
    assert list(route.probabilities) == ["refunds", "shipping", "sales"]
    assert route.choice == max(route.probabilities, key=lambda name: route.probabilities[name])
    assert isinstance(urgent, NoulAnswer)
    assert urgent.noul == urgent.probabilities["yes"]
    assert isinstance(mood, ScoreAnswer)
    assert mood.legend == {"0": "low", "1": "mid", "2": "top"}
    assert mood.score == pytest.approx(mood.probabilities["1"] + 2 * mood.probabilities["2"])
    for answer in answers.values():
        assert math.fsum(answer.probabilities.values()) == pytest.approx(1)
        assert (
            asdict(answer)["type"]
            == QUESTIONS[next(k for k in answers if answers[k] is answer)]["type"]
        )


@pytest.mark.parametrize("memory", MEMORIES)
def test_the_same_bits_in_any_order_company_and_memory(
    load: Any, alone: dict[str, Any], memory: str
) -> None:
    names = list(QUESTIONS)
    with load(**MEMORIES[memory]) as llm:
        for order in (names, names[::-1], names[1:3], names):
            check(decide(llm, order), alone)
        engine = llm.llm_engine
        assert engine.scheduler.num_free_gpu_blocks == engine.memory.num_gpu_blocks
        engine.scheduler.check()
        assert (engine.scheduler.num_cached_tokens > 0) == ("cached" in memory)


def test_the_same_bits_beside_other_requests(load: Any, alone: dict[str, Any]) -> None:
    from pagedserve.decisions.answers import make_decision
    from pagedserve.decisions.reads import reads_of
    from pagedserve.inputs.branches import READ_PARAMS

    with load(**FEW_TOKENS) as llm:
        engine = llm.llm_engine
        asked = Asked(state=STATE, questions=parse_questions(QUESTIONS), instructions=SYSTEM)
        prompt = DecisionPrompts(engine.input_processor.tokenizer).make(asked)
        outputs = []
        for number in range(6):
            params = SamplingParams(temperature=0.7, seed=number, max_tokens=20)
            engine.add_request(f"other {number}", f"{number} and its company", params)
            outputs += engine.step()
            engine.add_request(f"decision {number}", prompt, READ_PARAMS)
        while engine.has_unfinished_requests():
            outputs += engine.step()
        read = [output for output in outputs if output.request_id.startswith("decision")]
        assert len(read) == 6
        for output in read:
            check(make_decision(asked.questions, reads_of(output, prompt), 0, None), alone)


@pytest.mark.parametrize("caches", [False, True])
def test_the_state_is_computed_once_and_all_questions_in_one_step(load: Any, caches: bool) -> None:
    with load(enable_prefix_caching=caches) as llm:
        engine = llm.llm_engine
        decision = decide(llm, list(QUESTIONS))
        assert engine.stats.num_steps == 1
        asked = Asked(state=STATE, questions=parse_questions(QUESTIONS), instructions=SYSTEM)
        prompt = DecisionPrompts(engine.input_processor.tokenizer).make(asked)
        num_shared = len(prompt["prompt_token_ids"]) // 16 * 16
        assert num_shared >= 64
        num_computed = decision.num_prompt_tokens - (len(QUESTIONS) - 1) * num_shared
        assert engine.stats.num_computed_prompt_tokens <= num_computed
        assert engine.stats.num_prompt_tokens < decision.num_prompt_tokens
        decide(llm, list(QUESTIONS)[:1])
        num_cached = engine.scheduler.num_cached_tokens
        assert num_cached >= num_shared if caches else num_cached == 0


def test_a_calibration_changes_how_sure_an_answer_is(llm: LLM, alone: dict[str, Any]) -> None:
    calibration = Calibration({"choice": 2.0, "noul": 1.0, "score": 0.5})
    decision = llm.decide(STATE, QUESTIONS, instructions=SYSTEM, calibration=calibration)
    check(Decision({"urgent": decision.answers["urgent"]}, decision.diagnostics, 0), alone)
    for name, temperature in {"route": 2.0, "mood": 0.5}.items():
        before = alone[name][0].probabilities
        powers = {key: value ** (1 / temperature) for key, value in before.items()}
        total = sum(powers.values())
        expected = {key: value / total for key, value in powers.items()}
        assert decision.answers[name].probabilities == pytest.approx(expected)


def test_what_cannot_be_asked_is_refused_by_name(load: Any, llm: LLM) -> None:
    question: dict[str, Question] = {"q": {"type": "noul"}}
    with pytest.raises(RequestError, match="has enable_thinking: a decision is the first token"):
        llm.decide("x", question, chat_template_kwargs={"enable_thinking": True})
    with pytest.raises(RequestError, match="state is no JSON value"):
        llm.decide({1, 2}, question)
    with pytest.raises(RequestError, match=r"has 5[0-9][0-9] tokens; max_model_len is 512"):
        llm.decide("word " * 500, question)
    for given in ("cal.json", 2.0):
        with pytest.raises(RequestError, match=r"calibration is .*; it must be a Calibration"):
            llm.decide("x", question, calibration=given)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"chat_template_kwargs is .*; it must be a mapping"):
        llm.decide("x", question, chat_template_kwargs=["a"])  # type: ignore[arg-type]
    # The label joins what is before it.
    with pytest.raises(RequestError, match="the label 'yes' of question 'q' is not one token"):
        llm.decide("x", question, chat_template="{{ messages[-1].content }}e")
    with load(max_num_seqs=2) as small:
        many: dict[str, Question] = {str(number): {"type": "noul"} for number in range(3)}
        with pytest.raises(RequestError, match="has 3 branches; max_num_seqs is 2"):
            small.decide("x", many)


class NotedTokenizer:
    """A tokenizer that notes the texts that it encodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.texts: list[str] = []

    def __call__(self, text: str, **options: Any) -> Any:
        self.texts.append(text)
        return self._tokenizer(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def test_a_label_is_encoded_after_the_end_of_its_prompt_alone(llm: LLM) -> None:
    tokenizer: Any = NotedTokenizer(llm.get_tokenizer())
    state = "word " * 90
    asked = Asked(state=state, questions=parse_questions(QUESTIONS))
    prompt = DecisionPrompts(tokenizer).make(asked)
    whole = [text for text in tokenizer.texts if state in text]
    assert len(whole) == len(QUESTIONS)
    for text, question, branch in zip(whole, asked.questions, prompt["branches"], strict=True):
        token_ids = [*prompt["prompt_token_ids"], *branch["prompt_token_ids"]]
        labels = zip(question.labels, branch["label_token_ids"], strict=True)
        for label, token_id in labels:
            encoded = tokenizer(text + label, add_special_tokens=False).input_ids
            assert encoded == [*token_ids, token_id]


def test_prompts_with_branches_are_checked(llm: LLM) -> None:
    branch: Any = {"prompt_token_ids": [5], "label_token_ids": [6, 7]}
    read = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    (output,) = llm.generate({"prompt_token_ids": [3, 4], "branches": [branch]}, read)
    assert len(output.outputs[0].label_logprobs or ()) == 2
    refused: list[tuple[Any, SamplingParams, str]] = [
        ({"branches": []}, read, "branches of the prompt is"),
        ({"branches": [{"prompt_token_ids": [5]}]}, read, "branches of the prompt is"),
        ({"branches": [branch], "prompt": "a"}, read, r"has branches and \['prompt'\]"),
        (
            {"branches": [branch | {"label_token_ids": []}]},
            read,
            "branch 0 of the prompt has no la",
        ),
        ({"branches": [branch | {"label_token_ids": [10**6]}]}, read, "token 0 of the labels of b"),
        (
            {"branches": [branch | {"prompt_token_ids": [-1]}]},
            read,
            "token 0 of branch 0 of the pr",
        ),
        ({"branches": [branch]}, SamplingParams(temperature=0), "must be those of temperature=0"),
    ]
    for prompt, params, message in refused:
        given: Any = {"prompt_token_ids": [3, 4]} | prompt
        with pytest.raises(RequestError, match=message):
            llm.generate(given, params)
