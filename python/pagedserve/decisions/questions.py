"""Questions of a decision: their types, their options, and the labels that stand for options.

A label is the text of the single token that a model answers with: a letter for an option of a
choice, yes or no, or the digit of a level.
"""

import json
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NotRequired, TypeAlias, TypedDict, get_args

import pagedserve.checks as checks
from pagedserve.errors import RequestError

QuestionType: TypeAlias = Literal["choice", "noul", "score"]
QUESTION_TYPES: Final[tuple[QuestionType, ...]] = get_args(QuestionType)

# Questions of a decision.
MAX_QUESTIONS: Final = 64


class Question(TypedDict):
    """A question about a state.

    Attributes:
        type: "choice" is one of several options, "noul" is yes or no, "score" is a level of an
            ordered scale.
        instructions: The question: a text, or a JSON value that is shown as text.
        criteria: For a choice, a mapping of the options' names to descriptions or None.  For yes or
            no, None or a mapping that describes "true", "false" or both.  For a score, a list of
            the levels' names, from the lowest.
    """

    type: QuestionType
    instructions: NotRequired[Any]
    criteria: NotRequired[Any]


@dataclass(frozen=True, slots=True)
class Option:
    """A possible answer.

    Attributes:
        name: Name in the answer.
        description: What it means; None if only the name says it.
    """

    name: str
    description: str | None = None


@dataclass(frozen=True, slots=True)
class ParsedQuestion:
    """A question after its form was checked.

    Attributes:
        question_id: Name of the question.
        type: Type of the question.
        instructions: The question; may be empty.
        options: Possible answers, at least one.
        labels: Label of each option.
    """

    question_id: str
    type: QuestionType
    instructions: str
    options: tuple[Option, ...]
    labels: tuple[str, ...]

    @property
    def text(self) -> str:
        """The question as the model reads it, after the state."""
        kind = _KINDS[self.type]
        shown = (
            kind.show(label, option)
            for label, option in zip(self.labels, self.options, strict=True)
        )
        lines = [self.instructions, *shown]
        return "\n".join(line for line in lines if line)


def parse_questions(questions: object) -> list[ParsedQuestion]:
    """Parse the questions of a decision.

    Args:
        questions: Mapping of ids to questions, each as ``Question``.

    Raises:
        RequestError: No question or too many, or one of another form; the message names it and
            lists what is accepted.
    """
    if not isinstance(questions, Mapping) or not questions:
        raise _refusal("questions must be a mapping of ids to questions, at least one")
    if len(questions) > MAX_QUESTIONS:
        raise _refusal(f"questions has {len(questions)} questions; at most {MAX_QUESTIONS}")
    return [_parsed(question_id, question) for question_id, question in questions.items()]


def _parsed(question_id: object, question: object) -> ParsedQuestion:
    question_id = checks.text("an id of questions", question_id)
    name = f"question {question_id!r}"
    if not isinstance(question, Mapping):
        raise _refusal(f"{name} is {question!r:.80}; it must be an object with a type")
    if unknown := question.keys() - Question.__annotations__.keys():
        raise _refusal(f"{name} has {sorted(map(str, unknown))}; accepted are {_FIELDS}")
    if (given := question.get("type")) not in QUESTION_TYPES:
        raise _refusal(
            f"the type of {name} is {given!r:.80}; accepted are {', '.join(QUESTION_TYPES)}"
        )
    kind = _KINDS[given]
    options = kind.options(name, question.get("criteria"))
    if len(options) > len(kind.labels):
        raise _refusal(f"{name} has {len(options)} options; at most {len(kind.labels)}")
    if len({option.name for option in options}) < len(options):
        raise _refusal(f"{name} has two options of one name")
    instructions = question.get("instructions")
    return ParsedQuestion(
        question_id,
        question["type"],
        "" if instructions is None else _shown(name, instructions),
        tuple(options),
        kind.labels[: len(options)],
    )


def _refusal(text: str) -> RequestError:
    return RequestError(text, param="questions")


def _choice_options(name: str, criteria: object) -> list[Option]:
    if not isinstance(criteria, Mapping) or not criteria:
        raise _refusal(
            f"criteria of {name} is {criteria!r:.80}; that of a choice must map at least one "
            "option to its description or null"
        )
    return [Option(str(option), _description(name, text)) for option, text in criteria.items()]


def _noul_options(name: str, criteria: object) -> list[Option]:
    given = {} if criteria is None else criteria
    if not isinstance(given, Mapping) or given.keys() - {"true", "false"}:
        raise _refusal(
            f"criteria of {name} is {criteria!r:.80}; that of a noul must be null or an object "
            "with true and false"
        )
    return [
        Option("yes", _description(name, given.get("true"))),
        Option("no", _description(name, given.get("false"))),
    ]


def _score_options(name: str, criteria: object) -> list[Option]:
    is_list = isinstance(criteria, Sequence) and not isinstance(criteria, str)
    levels = list(criteria) if isinstance(criteria, Sequence) and is_list else []
    if len(levels) < _MIN_LEVELS:
        raise _refusal(
            f"criteria of {name} is {criteria!r:.80}; that of a score must be a list of at least "
            "two levels, from the lowest"
        )
    return [Option(_shown(name, level)) for level in levels]


def _description(name: str, given: object) -> str | None:
    return None if given is None else _shown(name, given)


def _shown(name: str, given: object) -> str:
    """A text, or another value as JSON, as the model reads it."""
    if isinstance(given, str):
        return given
    try:
        return json.dumps(given, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _refusal(f"{name} has {given!r:.80}, which is no JSON value: {error}") from error


def _show_named(label: str, option: Option) -> str:
    text = f"{label}) {option.name}"
    return f"{text}: {option.description}" if option.description else text


def _show_label(label: str, option: Option) -> str:
    return f"{label}: {option.description}" if option.description else ""


@dataclass(frozen=True, slots=True)
class _Kind:
    """A type of questions.

    Attributes:
        labels: Labels of the options, in their order.
        options: Parses the criteria of a question, whose name is the first argument.
        show: Line of an option, for the model.
    """

    labels: tuple[str, ...]
    options: Callable[[str, object], list[Option]]
    show: Callable[[str, Option], str]


_KINDS: Final[Mapping[QuestionType, _Kind]] = {
    "choice": _Kind(tuple(string.ascii_uppercase), _choice_options, _show_named),
    "noul": _Kind(("yes", "no"), _noul_options, _show_label),
    "score": _Kind(tuple(string.digits), _score_options, _show_named),
}
_MIN_LEVELS: Final = 2
_FIELDS: Final = ", ".join(Question.__annotations__)
