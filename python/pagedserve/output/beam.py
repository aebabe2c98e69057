"""Beam search of one request: which beams continue, which have ended, when it is over.

The search is that of transformers' ``generate(num_beams=W, do_sample=False)``, version 5.23: equal
log-probabilities give equal sequences and scores.  With W beams and n tokens of a beam after the
step, including its last one:

1. Candidates are the K = W * max(2, 1 + number of ending tokens) best continuations of all beams
   together, by the sum of their log-probabilities: enough to find W that continue, since each beam
   has at most one candidate per ending token.  The first step has one beam only.
2. The best W candidates that do not end are the next beams, at any rank among the K.
3. A candidate that ends becomes a hypothesis only if it is among the first W of the K.  Another is
   discarded: it neither continues nor counts.
4. A hypothesis' score is its sum / n ** length_penalty.  n counts new tokens, including the ending
   token.  The best W are kept; of equal scores the older.
5. At ``max_tokens`` every candidate ends, so the best W of that step become hypotheses and are
   ranked with the others.  Beams that could continue are never part of the result.
6. The search is over when no candidate continues, or when there are W hypotheses and
   ``early_stopping`` is
   - True: at once;
   - False: if the best beam, scored at its present length, is not above the worst hypothesis: a
     heuristic if the penalty is positive, since a longer sequence may score higher;
   - "never": if it is not above it even at the most favorable length: ``max_tokens`` if the
     penalty is positive, else its present length.
7. Sums are rounded to float32 after each token, as there.  Scores are divided in float64.

It differs in one point.  There, fixed shapes are padded with beams and hypotheses of about -1e9,
which can be returned if a vocabulary, bans or stop strings leave fewer than W continuations.  Here
a candidate of -inf or nan does not exist: a search may have fewer than W beams, and one with no
candidate left is over with the hypotheses it has, perhaps none.

Everything is immutable: a step returns a new search and may be computed any number of times.

Costs: a sort of [B * M] numbers and copies of at most K token lists per step.  ``finish_of`` is
called from the best candidate on, no further than needed: W times if none ends.  With stop strings
each of these copies its text.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedserve.output.detokenizer import TextStream
from pagedserve.output.logprobs import TokenLogprob, TopLogprobs
from pagedserve.output.stop import Finish, StopMatch, StopRule, find_stop, is_by_token
from pagedserve.sampling_params import EarlyStopping

_LENGTH = Finish("length")


class BeamRow(NamedTuple):
    """Log-probabilities of the token after one beam.

    Attributes:
        token_ids: [M] int32, the most likely tokens, most likely first.
        logprobs: [M] float32, their log-softmax values; -inf where a token is banned.
        top: Most likely tokens to return; None if not requested.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    top: TopLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Beam:
    """A sequence of new tokens.

    Attributes:
        token_ids: All new tokens, including the ending token, once there is one.
        cumulative_logprob: Sum of their log-probabilities, a float32 value.
        logprobs: One per token; None if not requested, and before the first token.
        text: Detokenized text; None if it is not needed.
        text_before: Text without the last token, likewise.
    """

    token_ids: tuple[int, ...] = ()
    cumulative_logprob: float = 0.0
    logprobs: tuple[TokenLogprob, ...] | None = None
    text: TextStream | None = None
    text_before: TextStream | None = None

    def extended(self, row: BeamRow, column: int, cumulative_logprob: float) -> "Beam":
        """Extend this beam by the token in ``column`` of ``row``, with its sum."""
        logprobs = None
        if row.top is not None:
            token = TokenLogprob(float(row.logprobs[column]), column + 1, row.top)
            logprobs = (*(self.logprobs or ()), token)
        token_ids = (*self.token_ids, int(row.token_ids[column]))
        text = None if self.text is None else self.text.advanced(token_ids[-1:])
        return Beam(token_ids, cumulative_logprob, logprobs, text, self.text)

    def finish_by(self, rule: StopRule) -> Finish | None:
        """Why this beam ends with its last token, or None."""
        finish = rule.check(self.token_ids[-1], len(self.token_ids))
        match = self.stop_match(rule, finish)
        return finish if match is None else Finish("stop", match.string)

    def stop_match(self, rule: StopRule, finish: Finish | None) -> StopMatch | None:
        """Stop string that the last token completes, if the token itself does not ``finish``."""
        if self.text is None or self.text_before is None or is_by_token(finish):
            return None
        return find_stop(rule, self.text_before, self.text, len(self.token_ids))


class Hypothesis(NamedTuple):
    """A beam that has ended, with its score and finish reason."""

    beam: Beam
    score: float
    finish: Finish


class BeamResult(NamedTuple):
    """Result of a step of the search.

    Attributes:
        search: The next state; without beams if the search is over.
        parents: Row that each beam of ``search.beams`` continues, not decreasing.
        is_done: Whether the search is over.
    """

    search: "BeamSearch"
    parents: list[int]
    is_done: bool


class _Candidate(NamedTuple):
    beam: Beam
    parent: int


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """State of one request's search between two steps; created by ``start``.

    Attributes:
        width: W, the number of beams.
        length_penalty: Above 0 favors longer sequences, below 0 shorter ones; ``max_tokens`` to
            this power must be a positive float.
        early_stopping: When W hypotheses suffice, see the module's point 6.
        max_tokens: Maximum new tokens, at least 1.
        num_candidates: K, the number of candidates to pass per beam: fewer only if the vocabulary
            is smaller.  More are harmless.
        beams: Beams that continue, ordered by the row of their parent; of one parent the best
            first.
        hypotheses: At most W that have ended, best score first.
    """

    width: int
    length_penalty: float
    early_stopping: EarlyStopping
    max_tokens: int
    num_candidates: int
    beams: tuple[Beam, ...] = (Beam(),)
    hypotheses: tuple[Hypothesis, ...] = ()

    @classmethod
    def start(
        cls,
        width: int,
        *,
        length_penalty: float,
        early_stopping: EarlyStopping,
        max_tokens: int,
        num_ending_tokens: int,
        text: TextStream | None = None,
    ) -> "BeamSearch":
        """Create a search of one beam without tokens, to be followed by a step of one row.

        Args:
            width: See the class.
            length_penalty: See the class.
            early_stopping: See the class.
            max_tokens: See the class.
            num_ending_tokens: Number of tokens that end a sequence: end-of-sequence and stop
                tokens, 0 if they are ignored.
            text: Empty text stream, if ``finish_of`` needs text.
        """
        num_candidates = width * max(2, 1 + num_ending_tokens)
        beams = (Beam(text=text),)
        return cls(width, length_penalty, early_stopping, max_tokens, num_candidates, beams)

    @property
    def is_over(self) -> bool:
        """Whether nothing continues, or what continues is considered no better than what ended."""
        if not self.beams:
            return True
        if len(self.hypotheses) < self.width:
            return False
        if self.early_stopping is True:
            return True
        looks_ahead = self.early_stopping == "never" and self.length_penalty > 0
        best = max(self.beams, key=lambda beam: beam.cumulative_logprob)
        num_tokens = self.max_tokens if looks_ahead else len(best.token_ids)
        return self._score(best, num_tokens) <= self.hypotheses[-1].score

    def step(
        self, rows: Sequence[BeamRow], finish_of: Callable[[Beam], Finish | None]
    ) -> BeamResult:
        """Continue each beam by one token; returns a new search.

        Args:
            rows: One per beam, in their order, all of the same length M.
            finish_of: Returns why a beam ends with its last token, or None.  It need not check
                ``max_tokens``.

        Raises:
            ValueError: The numbers of rows and beams differ, rows differ in length, or the search
                is over.
        """
        going, ended = self._divide(self._ranked(rows), finish_of)
        hypotheses = sorted([*self.hypotheses, *ended], key=_score_of, reverse=True)
        going.sort(key=lambda candidate: candidate.parent)
        beams = tuple(candidate.beam for candidate in going)
        search = replace(self, beams=beams, hypotheses=tuple(hypotheses[: self.width]))
        if search.is_over:
            return BeamResult(replace(search, beams=()), [], is_done=True)
        return BeamResult(search, [candidate.parent for candidate in going], is_done=False)

    def best(self, n: int, unfinished: Finish | None = None) -> list[Hypothesis]:
        """The best hypotheses, at most ``n``, best score first.

        Args:
            n: At most ``width``.  Fewer are returned if the search ran out of candidates.
            unfinished: Finish reason of beams that continue, if a search is cut short: they then
                count with their present score.  None omits them.
        """
        answer = list(self.hypotheses)
        if unfinished is not None:
            answer += (self._hypothesis(beam, unfinished) for beam in self.beams)
        return sorted(answer, key=_score_of, reverse=True)[:n]

    def _ranked(self, rows: Sequence[BeamRow]) -> Iterator[_Candidate]:
        """Candidates of a step, best first; of equals the first row's, in its order."""
        pairs = list(zip(self.beams, rows, strict=True))
        before = np.array([[beam.cumulative_logprob] for beam in self.beams], dtype=np.float32)
        sums = before + np.stack([row.logprobs for row in rows])
        order = np.argsort(-sums, axis=None, kind="stable")  # nan comes last, after -inf
        for index in order[: self.num_candidates].tolist():
            parent, column = divmod(index, sums.shape[1])
            cumulative_logprob = float(sums[parent, column])
            if not cumulative_logprob > -math.inf:
                return
            beam, row = pairs[parent]
            yield _Candidate(beam.extended(row, column, cumulative_logprob), parent)

    def _divide(
        self, ranked: Iterator[_Candidate], finish_of: Callable[[Beam], Finish | None]
    ) -> tuple[list[_Candidate], list[Hypothesis]]:
        """Candidates that continue, at most W, and those of the first W that end."""
        going: list[_Candidate] = []
        ended: list[Hypothesis] = []
        for rank, candidate in enumerate(ranked):
            is_last = len(candidate.beam.token_ids) >= self.max_tokens
            if rank >= self.width and (is_last or len(going) == self.width):
                break
            finish = finish_of(candidate.beam) or (_LENGTH if is_last else None)
            if finish is None:
                going.append(candidate)
            elif rank < self.width:
                ended.append(self._hypothesis(candidate.beam, finish))
        return going, ended

    def _hypothesis(self, beam: Beam, finish: Finish) -> Hypothesis:
        return Hypothesis(beam, self._score(beam, len(beam.token_ids)), finish)

    def _score(self, beam: Beam, num_tokens: int) -> float:
        """Score of ``beam`` if its sum were that of ``num_tokens`` tokens; 0 for no tokens."""
        return beam.cumulative_logprob / math.pow(max(1, num_tokens), self.length_penalty)


def _score_of(hypothesis: Hypothesis) -> float:
    return hypothesis.score
