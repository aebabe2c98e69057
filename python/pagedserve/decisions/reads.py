"""Reads of labels: their log-probabilities as the first token of the reply."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsIndex

from pagedserve.errors import RequestError
from pagedserve.inputs import BranchedPrompt
from pagedserve.outputs import CompletionOutput, RequestOutput


@dataclass(frozen=True, slots=True)
class LabelRead:
    """What the model says of the labels of a question.

    Attributes:
        logprobs: Log-probability of each label in the whole vocabulary.
        argmax_is_label: Whether the most likely token is a label.
    """

    logprobs: list[float]
    argmax_is_label: bool

    @property
    def label_mass(self) -> float:
        """Probability of all labels together, in the whole vocabulary."""
        return min(1.0, math.fsum(map(math.exp, self.logprobs)))


def reads_of(output: RequestOutput, prompt: BranchedPrompt) -> list[LabelRead]:
    """Reads of the branches of a prompt.

    Args:
        output: Last output of the request.
        prompt: Its ``BranchedPrompt``.

    Raises:
        RequestError: The engine could not run the request; the message has its reason.
    """
    return [
        _read(completion, branch["label_token_ids"])
        for completion, branch in zip(output.outputs, prompt["branches"], strict=True)
    ]


def _read(completion: CompletionOutput, label_token_ids: Sequence[SupportsIndex]) -> LabelRead:
    if completion.label_logprobs is None:
        raise RequestError(f"the decision was not made: {completion.stop_reason}")
    return LabelRead(completion.label_logprobs, completion.token_ids[0] in label_token_ids)


def probabilities_of(logprobs: Sequence[float], temperature: float = 1.0) -> list[float]:
    """Softmax of the labels' log-probabilities divided by a temperature."""
    largest = max(logprobs)
    weights = [math.exp((logprob - largest) / temperature) for logprob in logprobs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]
