"""Labelled examples of decisions: a file with a JSON object per line.

An object has the fields of a decision, ``state``, ``questions`` and ``instructions``, and
``answers``: for each question that is labelled the name of the option, true or false, or the level.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pagedserve.decisions.answers import Decision
from pagedserve.decisions.calibration import LabelledRead
from pagedserve.decisions.questions import ParsedQuestion, Question, parse_questions
from pagedserve.errors import RequestError, reason

_FIELDS: Final = frozenset(("state", "questions", "answers", "instructions"))


@dataclass(frozen=True, slots=True)
class Example:
    """A decision whose answers are known.

    Attributes:
        state: What the questions are about.
        questions: The questions that are labelled.
        instructions: System message; None for none.
        labels: Index of the right option of each question, by the id of the question.
    """

    state: Any
    questions: Mapping[str, Question]
    instructions: str | None
    labels: Mapping[str, int]

    def reads(self, decision: Decision) -> list[LabelledRead]:
        """Reads of the questions, from the decision of a model without calibration."""
        return [
            LabelledRead(
                answer.type,
                [math.log(max(each, _LEAST)) for each in answer.probabilities.values()],
                self.labels[name],
            )
            for name, answer in decision.answers.items()
        ]


# Smallest probability that has a logarithm.
_LEAST: Final = 5e-324


def read_examples(path: str | Path) -> list[Example]:
    """Read a file of labelled examples.

    Raises:
        RequestError: It cannot be read, has no example, or an example is invalid; the message
            names the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise RequestError(f"the examples {path} cannot be read: {reason(error)}") from error
    examples = [
        _example(line, f"{path}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not examples:
        raise RequestError(f"{path} has no example: it must have a JSON object per line")
    return examples


def _example(line: str, place: str) -> Example:
    try:
        given: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{place} is not JSON: {error}") from error
    if not isinstance(given, dict) or "state" not in given or given.keys() - _FIELDS:
        raise RequestError(f"{place} must be an object with {', '.join(sorted(_FIELDS))}")
    questions: Any = given.get("questions")
    answers = given.get("answers")
    if not isinstance(answers, dict) or not answers:
        raise RequestError(f"{place} has no answers: it must have one for each labelled question")
    try:
        parsed = {each.question_id: each for each in parse_questions(questions)}
    except RequestError as error:
        raise RequestError(f"{place}: {error}") from error
    if unknown := answers.keys() - parsed.keys():
        raise RequestError(
            f"{place} has answers to {', '.join(sorted(unknown))}; its questions are "
            f"{', '.join(parsed)}"
        )
    return Example(
        given["state"],
        {name: questions[name] for name in parsed if name in answers},
        given.get("instructions"),
        {name: _label(parsed[name], answer, place) for name, answer in answers.items()},
    )


def _label(question: ParsedQuestion, answer: object, place: str) -> int:
    """Index of the option that an answer names."""
    accepted: Sequence[object] = [option.name for option in question.options]
    if question.type == "noul":
        accepted = (True, False)
    elif question.type == "score":
        accepted = range(len(question.options))
    for index, option in enumerate(accepted):
        if type(answer) is type(option) and answer == option:
            return index
    raise RequestError(
        f"{place} answers question {question.question_id!r} with {answer!r:.80}; accepted are "
        f"{', '.join(map(repr, accepted))}"
    )
