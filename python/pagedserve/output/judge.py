"""What the results of a step mean to each request; only looked at, nothing recorded.

So a step whose update is refused leaves no trace, and one that failed may be judged again.

Costs: about three microseconds a token; a text search more where there are stop strings.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedserve.output.beam import Beam, BeamRow, BeamSearch
from pagedserve.output.detokenizer import TextStream
from pagedserve.output.logprobs import TokenLogprob, TopLogprobs
from pagedserve.output.state import OutputState, SequenceState
from pagedserve.output.stop import Finish, StopRule, is_by_token
from pagedserve.output.stop_strings import StopMatch

if TYPE_CHECKING:
    from pagedserve.sampling.results import SampledRows


class Living(NamedTuple):
    """A sequence that a step sampled."""

    state: OutputState
    sequence: SequenceState | Beam


class JudgedToken(NamedTuple):
    """A new token of a sequence and what it leads to.

    Attributes:
        sequence: What it belongs to.
        num_before: How many new tokens the sequence had before.
        token: The new one.
        finish: Why the sequence ends, or None.
        text: The sequence's text with it, where somebody looks at every text.
        match: The stop string that it completes.
        logprob: How likely it was, where somebody asked.
    """

    sequence: SequenceState
    num_before: int
    token: int
    finish: Finish | None
    text: TextStream | None
    match: StopMatch | None
    logprob: TokenLogprob | None


class RequestStep(NamedTuple):
    """What a step means to one request.

    Attributes:
        state: The request.
        parents: The row of each output, not decreasing: what ``Scheduler.update`` takes.
        outputs: Tokens, or the beams that live on.
        failure: Why the whole request ends here.
        is_done: Whether nothing of it lives on.
        search: The beam search after the step.
    """

    state: OutputState
    parents: list[int]
    outputs: Sequence["JudgedToken | Beam"]
    failure: Finish | None
    is_done: bool
    search: BeamSearch | None

    def living(self, handles: Sequence[int]) -> list[tuple[int, SequenceState | Beam]]:
        """What lives on, under the handles that ``Scheduler.update`` gave the outputs."""
        return [
            (handle, one if isinstance(one, Beam) else one.sequence)
            for handle, one in zip(handles, self.outputs, strict=True)
            if not _ends(one)
        ]


class JudgedStep(NamedTuple):
    """What a step means to all; the arrays are those of ``Scheduler.update``.

    Attributes:
        requests: In the order of their rows.
        parent_rows: [K] int32.
        tokens: [K] int32.
        finish_flags: [K] uint8, 1 where the sequence ends.
    """

    requests: list[RequestStep]
    parent_rows: NDArray[np.int32]
    tokens: NDArray[np.int32]
    finish_flags: NDArray[np.uint8]


def judge(
    rows: Sequence[Living | None], parent_rows: NDArray[np.int32], sampled: "SampledRows"
) -> JudgedStep:
    """Judge a step.

    Args:
        rows: What each sampled row continues, S of them; those of a request lie together.  None
            for what has ended meanwhile.
        parent_rows: [S] number of each in the step.
        sampled: What the sampler made of them.
    """
    judged = _Judge(sampled)
    requests: list[RequestStep] = []
    first = 0
    for _, group in groupby(rows, key=lambda row: row and id(row.state)):
        places = list(group)
        members = [row for row in places if row is not None]
        if members:
            requests.append(judged.request(members, first))
        first += len(places)
    outputs = [output for request in requests for output in request.outputs]
    parents = [parent for request in requests for parent in request.parents]
    return JudgedStep(
        requests,
        parent_rows[parents],
        np.array([_token(one) for one in outputs], dtype=np.int32),
        np.array([_ends(one) for one in outputs], dtype=np.uint8),
    )


def _token(output: JudgedToken | Beam) -> int:
    return output.token_ids[-1] if isinstance(output, Beam) else output.token


def _ends(output: JudgedToken | Beam) -> bool:
    return not isinstance(output, Beam) and output.finish is not None


class _Judge:
    """The arrays of one step as lists, which are quicker to read one by one."""

    def __init__(self, sampled: "SampledRows") -> None:
        self._sampled = sampled
        self._tokens: list[int] = sampled.tokens.tolist()
        self._draw_start: list[int] = sampled.draw_start.tolist()

    def request(self, members: list[Living], first: int) -> RequestStep:
        """The rows from ``first`` on, one for each of ``members``, all of one request."""
        state = members[0].state
        errors = self._sampled.errors
        if errors:
            for row in range(first, first + len(members)):
                if row in errors:
                    return RequestStep(state, [], [], Finish("error", errors[row]), True, None)
        if state.search is not None:
            return self._beams(state, state.search, members, first)
        parents: list[int] = []
        outputs: list[JudgedToken] = []
        for row, (_, sequence) in enumerate(members, first):
            assert isinstance(sequence, SequenceState)  # noqa: S101  # beams went another way
            for place, draw in enumerate(range(self._draw_start[row], self._draw_start[row + 1])):
                drawn = sequence if place == 0 else state.new_sequence(place)
                parents.append(row)
                outputs.append(self._judge_token(state, drawn, row, draw))
        is_done = all(output.finish is not None for output in outputs)
        return RequestStep(state, parents, outputs, None, is_done, None)

    def _judge_token(
        self, state: OutputState, sequence: SequenceState, row: int, draw: int
    ) -> JudgedToken:
        token = self._tokens[draw]
        count = len(sequence.token_ids)
        rule = state.rule
        finish = rule.check(token, count + 1)
        text, match = None, None
        if rule.strings is not None and sequence.text is not None and not is_by_token(finish):
            text = sequence.text.advanced([*sequence.token_ids, token])
            match = _find_stop(rule, sequence.text, text, count + 1)
            if match is not None:
                finish = Finish("stop", match.string)
        logprob = None
        if sequence.logprobs is not None:
            logprob = self._logprob(row, draw, state.num_logprobs or 0)
        return JudgedToken(sequence, count, token, finish, text, match, logprob)

    def _logprob(self, row: int, draw: int, num_top: int) -> TokenLogprob:
        known = self._sampled.logprobs
        assert known is not None  # noqa: S101  # asked for
        token = known.token_logprobs[draw], known.token_ranks[draw]
        return TokenLogprob.of(*token, known.top_token_ids[row], known.top_logprobs[row], num_top)

    def _beams(
        self, state: OutputState, search: BeamSearch, members: list[Living], first: int
    ) -> RequestStep:
        candidates = self._sampled.candidates
        assert candidates is not None  # noqa: S101  # asked for
        beams = tuple(member.sequence for member in members if isinstance(member.sequence, Beam))
        num_top = state.num_logprobs
        own = range(first, first + len(members))
        rows = [BeamRow(candidates.token_ids[row], candidates.logprobs[row]) for row in own]
        if num_top is not None:
            tops = [TopLogprobs(ids[:num_top], values[:num_top]) for ids, values, _ in rows]
            rows = [row._replace(top=top) for row, top in zip(rows, tops, strict=True)]
        # The scheduler's order of the beams; what the search decides does not depend on it.
        step = replace(search, beams=beams).step(rows, partial(finish_of, state.rule))
        parents = [first + parent for parent in step.parents]
        return RequestStep(state, parents, step.search.beams, None, step.is_done, step.search)


def finish_of(rule: StopRule, beam: Beam) -> Finish | None:
    """Why a beam ends with its last token, or None."""
    finish = rule.check(beam.token_ids[-1], len(beam.token_ids))
    match = stop_of(rule, beam, finish)
    return finish if match is None else Finish("stop", match.string)


def stop_of(rule: StopRule, beam: Beam, finish: Finish | None) -> StopMatch | None:
    """The stop string that a beam's last token completes, where the token alone does not end it."""
    if beam.text is None or beam.text_before is None or is_by_token(finish):
        return None
    return _find_stop(rule, beam.text_before, beam.text, len(beam.token_ids))


def _find_stop(
    rule: StopRule, before: TextStream, text: TextStream, num_tokens: int
) -> StopMatch | None:
    """The stop string that a text of ``num_tokens`` came to hold with the last of them."""
    if rule.strings is None or num_tokens <= rule.min_tokens:
        return None
    return rule.strings.find(text.text, len(before.text))
