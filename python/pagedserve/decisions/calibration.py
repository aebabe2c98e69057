"""Calibration of decisions: a temperature for each type of questions.

The log-probabilities of the labels are divided by the temperature of their type, before their
softmax (Guo et al. 2017, "On calibration of modern neural networks", section 4).  The most probable
option stays the same; only how sure the answer is changes.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import pagedserve.checks as checks
from pagedserve.decisions.questions import QUESTION_TYPES, QuestionType
from pagedserve.errors import ConfigError, RequestError, reason

# Temperatures are fitted within these.
_LOWEST: Final = 0.05
_HIGHEST: Final = 20.0
# Halvings of the interval of a temperature's logarithm, which leave a billionth of it.
_NUM_HALVINGS: Final = 60
_GOLDEN: Final = (math.sqrt(5) - 1) / 2


class LabelledRead(NamedTuple):
    """A read of a question whose answer is known.

    Attributes:
        type: Type of the question.
        logprobs: Log-probability of each label.
        answer: Index of the right one.
    """

    type: QuestionType
    logprobs: Sequence[float]
    answer: int


_TEMPERATURE: Final = checks.real("above 0", low=0, open_low=True)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Temperature of each type of questions; 1 changes nothing.

    Attributes:
        temperatures: Temperature by type, above 0.
    """

    temperatures: Mapping[QuestionType, float] = field(
        default_factory=lambda: dict.fromkeys(QUESTION_TYPES, 1.0)
    )

    def __post_init__(self) -> None:
        """Check the temperatures; a type without one has 1.

        Raises:
            RequestError: One is not above 0, or of no type of questions.
        """
        given = checks.mapping("temperatures", self.temperatures)
        for kind in given:
            checks.choice(QUESTION_TYPES)("the type of a temperature", kind)
        found = {
            kind: _TEMPERATURE(f"the temperature of {kind}", given.get(kind, 1.0))
            for kind in QUESTION_TYPES
        }
        object.__setattr__(self, "temperatures", found)

    @classmethod
    def fitted(cls, reads: Iterable[LabelledRead]) -> Self:
        """Fit the temperatures to answers that are known: the least mean log loss of each type.

        A type without reads keeps the temperature 1.
        """
        by_type: dict[QuestionType, list[LabelledRead]] = {kind: [] for kind in QUESTION_TYPES}
        for read in reads:
            by_type[read.type].append(read)
        return cls({kind: _fitted(own) if own else 1.0 for kind, own in by_type.items()})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read the file that ``save`` writes.

        Raises:
            ConfigError: It cannot be read, or has no temperature above 0 for each type.
        """
        try:
            content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"the calibration {path} cannot be read: {reason(error)}") from error
        given = content.get("temperatures") if isinstance(content, dict) else None
        if not isinstance(given, dict) or given.keys() != set(QUESTION_TYPES):
            raise ConfigError(
                f"the calibration {path} must have temperatures of {', '.join(QUESTION_TYPES)}"
            )
        try:
            return cls(given)
        except RequestError as error:
            raise ConfigError(f"the calibration {path}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write it to a file.

        Raises:
            ConfigError: The file cannot be written.
        """
        content = {"temperatures": dict(self.temperatures)}
        try:
            Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error}") from error

    def log_loss(self, reads: Sequence[LabelledRead]) -> float:
        """Mean negative log-probability of the right answers, in nats."""
        losses = (_loss(read, self.temperatures[read.type]) for read in reads)
        return math.fsum(losses) / len(reads)


def _fitted(reads: Sequence[LabelledRead]) -> float:
    """The temperature with the least loss, by golden section: the loss is convex in 1 / T."""
    low, high = math.log(_LOWEST), math.log(_HIGHEST)

    def loss(logarithm: float) -> float:
        return math.fsum(_loss(read, math.exp(logarithm)) for read in reads)

    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = loss(left), loss(right)
    for _ in range(_NUM_HALVINGS):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = loss(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = loss(right)
    return math.exp((low + high) / 2)


def _loss(read: LabelledRead, temperature: float) -> float:
    largest = max(read.logprobs)
    weights = (math.exp((logprob - largest) / temperature) for logprob in read.logprobs)
    return math.log(math.fsum(weights)) - (read.logprobs[read.answer] - largest) / temperature
