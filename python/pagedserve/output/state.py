"""What is known of a request's outputs between two steps."""

from dataclasses import dataclass, field

from pagedserve.output.beam import BeamSearch
from pagedserve.output.detokenizer import Detokenizer, TextStream
from pagedserve.output.logprobs import TokenLogprob
from pagedserve.output.stop import Finish, StopRule
from pagedserve.output.stop_strings import StopMatch
from pagedserve.outputs import RequestMetrics


@dataclass(slots=True)
class SequenceState:
    """One continuation, so far.

    Attributes:
        index: Its place among those of its request.
        text: Its text as it comes; None where only the last text is wanted.
        token_ids: New tokens.
        logprobs: Of each new token; None where nobody asked.
        finish: Why it ended, once it has.
        match: The stop string that ended it.
    """

    index: int
    text: TextStream | None
    logprobs: list[TokenLogprob] | None
    token_ids: list[int] = field(default_factory=list)
    finish: Finish | None = None
    match: StopMatch | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum over the new tokens, where the log-probabilities are kept."""
        return None if self.logprobs is None else sum(one.logprob for one in self.logprobs)


@dataclass(slots=True)
class OutputState:
    """What the caller of one request is told, so far.

    Attributes:
        request_id: The caller's name for it.
        prompt: Its text, or None where token ids were given.
        prompt_token_ids: The prompt's tokens; the caller gets this list, so nothing else reads it.
        rule: When its sequences end.
        metrics: When what happened.
        num_outputs: Continuations that the caller gets.
        max_num_seqs: Continuations that are made, the best of which the caller gets.
        detokenizer: Makes its text; None for no text.
        is_followed: Whether the caller wants outputs before the last.
        num_logprobs: How many log-probabilities of each new token's position the caller wants
            besides the token's own; None for none at all.
        num_prompt_logprobs: The same for the prompt's tokens.
        sequences: Its continuations, in the order of their indices; beams are in ``search``.
        search: The beam search, if it is one.
        prompt_logprobs: Of the prompt's tokens but the first, so far; None where nobody asked.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    rule: StopRule
    metrics: RequestMetrics
    num_outputs: int
    max_num_seqs: int
    detokenizer: Detokenizer | None
    is_followed: bool
    num_logprobs: int | None
    num_prompt_logprobs: int | None
    sequences: list[SequenceState]
    search: BeamSearch | None
    prompt_logprobs: list[TokenLogprob] | None

    @property
    def keeps_logprobs(self) -> bool:
        """Whether log-probabilities are wanted, to be shown or to choose the best by."""
        return self.num_logprobs is not None or self.max_num_seqs > self.num_outputs

    def new_sequence(self, index: int) -> SequenceState:
        """A continuation without tokens."""
        watches_text = self.is_followed or self.rule.strings is not None
        return SequenceState(
            index=index,
            text=self.detokenizer.stream() if self.detokenizer and watches_text else None,
            logprobs=[] if self.keeps_logprobs else None,
        )
