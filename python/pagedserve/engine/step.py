"""A step between its decisions and its end: what is known of it when something breaks."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pagedserve._core import SchedulerOutputs
from pagedserve.engine.prompts import ScoredRow
from pagedserve.engine.requests import LivingSequence
from pagedserve.executor.worker import LaunchedStep
from pagedserve.output.judge import JudgedStep
from pagedserve.output.processor import NewPromptLogprobs

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class OpenStep:
    """What is known so far of a step that runs; S is the number of its samples.

    Attributes:
        scheduled: The scheduler's decisions, at most one.
        parent_rows: int32 ``[S]``, the row of each sample.
        seqs: Handle of the sequence of each sample.
        living: Those sequences, as they were when the step was launched.
        scored: Rows of prompts whose log-probabilities somebody wants.
        launched: The step on its way, once it is; None also where there is nothing to run.
        is_ahead: Whether the scheduler went on before the tokens were known.
        judged: What they led to, once the model has run.
        prompts: What was found out about prompts.
        handles: What the scheduler said when it took the tokens, at most one: of each output its
            sequence, or nothing where it went ahead.
    """

    scheduled: list[SchedulerOutputs] = field(default_factory=list)
    parent_rows: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    seqs: list[int] = field(default_factory=list)
    living: list[LivingSequence] = field(default_factory=list)
    scored: list[ScoredRow] = field(default_factory=list)
    launched: LaunchedStep | None = None
    is_ahead: bool = False
    judged: JudgedStep | None = None
    prompts: list[NewPromptLogprobs] = field(default_factory=list)
    handles: list[tuple[NDArray[np.int64], object] | None] = field(default_factory=list)


def call_into(results: list[T], call: Callable[[], T]) -> None:
    """Call and keep the result in one: no interrupt can come between the two.

    Python looks for signals after each call that its own code makes; here the only such call is
    ``extend``, which returns when the result is in the list.  ``call`` must be a ``partial`` of
    something not written in Python.
    """
    results.extend(map(operator.call, (call,)))
