"""Questions as they are given: their text, their labels, and what is refused."""

from typing import Any

import pytest

from pagedserve import RequestError
from pagedserve.decisions.questions import MAX_QUESTIONS, parse_questions


def test_a_choice_has_a_letter_for_each_option() -> None:
    criteria = {"refund": "money back", "other": None, 3: 4}
    (question,) = parse_questions(
        {"route": {"type": "choice", "instructions": "Where to?", "criteria": criteria}}
    )
    assert question.labels == ("A", "B", "C")
    assert [option.name for option in question.options] == ["refund", "other", "3"]
    assert question.text.splitlines() == [
        "Where to?",
        "A) refund: money back",
        "B) other",
        "C) 3: 4",
    ]


def test_values_are_read_as_json() -> None:
    criteria = {"x": ["a", None], "y": True, "z": "ä"}
    choice: Any = {"type": "choice", "instructions": {"vip": True, "note": None}}
    score: Any = {"type": "score", "criteria": [None, True, 1.0]}
    asked = parse_questions({"q": {**choice, "criteria": criteria}, "s": score})
    assert asked[0].text.splitlines() == [
        '{"vip": true, "note": null}',
        'A) x: ["a", null]',
        "B) y: true",
        "C) z: ä",
    ]
    assert [option.name for option in asked[1].options] == ["null", "true", "1.0"]
    with pytest.raises(RequestError, match=r"'q' has .*, which is no JSON value"):
        parse_questions({"q": {**choice, "criteria": {"x": {1, 2}}}})


def test_a_noul_is_yes_or_no() -> None:
    questions = parse_questions(
        {
            "plain": {"type": "noul", "instructions": "Is it late?"},
            "described": {"type": "noul", "criteria": {"true": "after nine"}},
        }
    )
    assert [question.labels for question in questions] == [("yes", "no")] * 2
    assert [question.text.splitlines() for question in questions] == [
        ["Is it late?"],
        ["yes: after nine"],
    ]


def test_a_score_has_a_digit_for_each_level() -> None:
    (question,) = parse_questions({"mood": {"type": "score", "criteria": ["bad", "good"]}})
    assert question.labels == ("0", "1")
    assert question.text.splitlines() == ["0) bad", "1) good"]


@pytest.mark.parametrize(
    ("questions", "message"),
    [
        ({}, "must be a mapping of ids to questions, at least one"),
        ([{"type": "noul"}], "must be a mapping"),
        ({"": {"type": "noul"}}, "an id of questions is ''; it must be a non-empty string"),
        ({"\ud800": {"type": "noul"}}, r"an id of questions is '\\ud800'; it must be .* Unicode"),
        ({"q": "noul"}, "question 'q' is 'noul'; it must be an object"),
        (
            {"q": {"type": "essay"}},
            "type of question 'q' is 'essay'; accepted are choice, noul, sc",
        ),
        ({"q": {"type": ["noul"]}}, "type of question 'q' is"),
        (
            {"q": {"type": "noul", "weight": 1}},
            r"has \['weight'\]; accepted are type, instructions",
        ),
        ({"q": {"type": "choice"}}, "criteria of question 'q' is None; that of a choice must map"),
        ({"q": {"type": "choice", "criteria": {}}}, "at least one option"),
        ({"q": {"type": "noul", "criteria": {"yes": "x"}}}, "an object with true and false"),
        ({"q": {"type": "score", "criteria": ["one"]}}, "a list of at least two levels"),
        ({"q": {"type": "score", "criteria": "ab"}}, "a list of at least two levels"),
        ({"q": {"type": "score", "criteria": ["a", "a"]}}, "two options of one name"),
        ({"q": {"type": "score", "criteria": [*range(11)]}}, "has 11 options; at most 10"),
        ({"q": {"type": "choice", "criteria": dict.fromkeys(range(27))}}, "27 options; at most 26"),
        ({str(i): {"type": "noul"} for i in range(MAX_QUESTIONS + 1)}, "65 questions; at most 64"),
    ],
)
def test_other_forms_are_refused_by_name(questions: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        parse_questions(questions)
    assert raised.value.param == "questions"
