"""A step between its decisions and its end: what is known of it when something breaks."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pagedserve._core import SchedulerOutputs
from pagedserve.output.judge import JudgedStep
from pagedserve.output.processor import NewPromptLogprobs

T = TypeVar("T")


@dataclass(slots=True)
class OpenStep:
    """What is known so far of a step that runs.

    Attributes:
        scheduled: The scheduler's decisions, at most one.
        judged: What they led to, once the model has run.
        prompts: What was found out about prompts.
        handles: Of the outputs, once the scheduler has taken them, at most one array.
    """

    scheduled: list[SchedulerOutputs] = field(default_factory=list)
    judged: JudgedStep | None = None
    prompts: list[NewPromptLogprobs] = field(default_factory=list)
    handles: list[NDArray[np.int64]] = field(default_factory=list)


def call_into(results: list[T], call: Callable[[], T]) -> None:
    """Call and keep the result in one: no interrupt can come between the two.

    Python looks for signals after each call that its own code makes; here the only such call is
    ``extend``, which returns when the result is in the list.  ``call`` must be a ``partial`` of
    something not written in Python.
    """
    results.extend(map(operator.call, (call,)))
