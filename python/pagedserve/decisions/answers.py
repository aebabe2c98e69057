"""Answers of decisions, from the log-probabilities of the labels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from pagedserve.decisions.calibration import Calibration
from pagedserve.decisions.questions import ParsedQuestion
from pagedserve.decisions.reads import LabelRead, probabilities_of


@dataclass(frozen=True, slots=True)
class ChoiceAnswer:
    """Answer to a choice.

    Attributes:
        type: Type of the question.
        choice: Name of the most probable option; of equals, the first.
        probabilities: Probability of each option, by name; the sum is 1.
        confidence: Probability of the chosen label in the whole vocabulary.
    """

    type: Literal["choice"] = field(default="choice", init=False)
    choice: str
    probabilities: dict[str, float]
    confidence: float


@dataclass(frozen=True, slots=True)
class NoulAnswer:
    """Answer to a question of yes or no.

    Attributes:
        type: Type of the question.
        noul: Probability of yes.
        probabilities: Probabilities of "yes" and "no"; the sum is 1.
        confidence: Probability of the more probable label in the whole vocabulary.
    """

    type: Literal["noul"] = field(default="noul", init=False)
    noul: float
    probabilities: dict[str, float]
    confidence: float


@dataclass(frozen=True, slots=True)
class ScoreAnswer:
    """Answer to a question with a scale.

    Attributes:
        type: Type of the question.
        score: Expected level; levels are counted from 0.
        legend: Name of each level, by its number as text.
        probabilities: Probability of each level, by its number as text; the sum is 1.
        confidence: Probability of the most probable label in the whole vocabulary.
    """

    type: Literal["score"] = field(default="score", init=False)
    score: float
    legend: dict[str, str]
    probabilities: dict[str, float]
    confidence: float


Answer: TypeAlias = ChoiceAnswer | NoulAnswer | ScoreAnswer


@dataclass(frozen=True, slots=True)
class Diagnostics:
    """How well the labels of a question caught the model's reply.

    Attributes:
        label_mass: Probability of all labels together in the whole vocabulary.
        argmax_is_label: Whether the most likely token is a label.
    """

    label_mass: float
    argmax_is_label: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """Answers to the questions about a state.

    Attributes:
        answers: Answer to each question, by its id.
        diagnostics: Diagnostics of each question, by its id.
        num_prompt_tokens: Tokens of the prompts of all questions, the state counted in each.
    """

    answers: dict[str, Answer]
    diagnostics: dict[str, Diagnostics]
    num_prompt_tokens: int


def make_decision(
    questions: Sequence[ParsedQuestion],
    reads: Sequence[LabelRead],
    num_prompt_tokens: int,
    calibration: Calibration | None,
) -> Decision:
    """Make the answers to the questions of a decision.

    Args:
        questions: The questions.
        reads: Read of each.
        num_prompt_tokens: As in ``Decision``.
        calibration: Temperature of each type of questions; None is 1 for all.
    """
    temperatures = (calibration or Calibration()).temperatures
    answers, diagnostics = {}, {}
    for question, read in zip(questions, reads, strict=True):
        probabilities = probabilities_of(read.logprobs, temperatures[question.type])
        answers[question.question_id] = _answer(question, probabilities, read.label_mass)
        diagnostics[question.question_id] = Diagnostics(read.label_mass, read.argmax_is_label)
    return Decision(answers, diagnostics, num_prompt_tokens)


def _answer(question: ParsedQuestion, probabilities: list[float], label_mass: float) -> Answer:
    """Make the answer to a question.

    Args:
        question: The question.
        probabilities: Probability of each option among all options.
        label_mass: Probability of all labels in the whole vocabulary.
    """
    best = probabilities.index(max(probabilities))
    confidence = probabilities[best] * label_mass
    names = [option.name for option in question.options]
    by_name = dict(zip(names, probabilities, strict=True))
    if question.type == "choice":
        return ChoiceAnswer(names[best], by_name, confidence)
    if question.type == "noul":
        return NoulAnswer(probabilities[0], by_name, confidence)
    return ScoreAnswer(
        math.fsum(level * probability for level, probability in enumerate(probabilities)),
        dict(zip(question.labels, names, strict=True)),
        dict(zip(question.labels, probabilities, strict=True)),
        confidence,
    )
