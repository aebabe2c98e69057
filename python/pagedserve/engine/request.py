"""Requests, their sequences, and the table of all requests of an engine.

Owns the state of a request outside the scheduler: parameters, text, log-probabilities, times.
Token ids of prompts, block tables and queues belong to the core.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

import pagedserve.checks as checks
from pagedserve.drafts.proposer import DraftedText
from pagedserve.engine.row_sampler import RowSampler
from pagedserve.errors import RequestError
from pagedserve.executor.protocol import Adapter
from pagedserve.inputs.branches import ParsedBranch
from pagedserve.inputs.encoder_prompts import EncoderInput
from pagedserve.inputs.prompt_images import PromptImages
from pagedserve.lora.request import LoRARequest
from pagedserve.output.beam import Beam, BeamSearch
from pagedserve.output.detokenizer import Detokenizer, TextStream
from pagedserve.output.logprobs import TokenLogprob
from pagedserve.output.stop import Finish, StopMatch, StopRule
from pagedserve.outputs import RequestMetrics
from pagedserve.sampling.rows import RowSampling
from pagedserve.sampling_params import RequestOutputKind, SamplingParams


def checked_id(given: object) -> str:
    """An id of a request.

    Raises:
        RequestError: The value is no string.
    """
    if not isinstance(given, str):
        checks.refuse("request_id", given, "a string")
    return given


def request_ids(given: object) -> list[str]:
    """Ids of requests to abort: one, or several.

    Raises:
        RequestError: The value is neither a string nor an iterable of strings.
    """
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, Iterable):
        checks.refuse("request_id", given, "a string or a list of strings")
    return list(map(checked_id, names))


@dataclass(slots=True, eq=False)
class Sequence:
    """One completion of a request, so far.

    Attributes:
        request: Request of the sequence.
        index: Index within the request; 0 for beams, whose order changes.
        text: Incremental detokenizer; None if only the final text is needed.  Text that was sent as
            a delta is dropped.
        logprobs: Entry per new token, None for tokens of another engine; None if not requested.
        constant_row: Sampler input of every token, if it is always the same.
        beam: State in the beam search.
        handle: Handle in the scheduler.
        token_ids: New tokens.
        cumulative_logprob: Sum of ``logprobs``.
        finish: Finish reason, once it has ended.
        stop_match: Stop string that ended it.
        num_sent_tokens: Tokens sent in deltas.
        num_sent_chars: Characters at the start of ``text`` sent in deltas.
        is_end_sent: Whether a delta has reported its end.
        drafted: Acceptance statistics of its draft tokens, once it had any.
        label_logprobs: Log-probabilities of the labels of its branch, or of its first new token,
            once these have been read.
    """

    request: "Request"
    index: int
    text: TextStream | None
    logprobs: list[TokenLogprob | None] | None
    constant_row: RowSampling | None
    beam: Beam | None = None
    handle: int = -1
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish: Finish | None = None
    stop_match: StopMatch | None = None
    num_sent_tokens: int = 0
    num_sent_chars: int = 0
    is_end_sent: bool = False
    drafted: DraftedText | None = None
    label_logprobs: list[float] | None = None

    def row(self, *, num_unknown: int = 0, drafts: SequenceOf[int] = ()) -> RowSampling:
        """Build the sampler input for its next token.

        Args:
            num_unknown: Further tokens that so far only the device knows.
            drafts: Draft tokens after the known ones; the row is for the token after them.
        """
        token_ids = [*self.token_ids, *drafts] if drafts else self.token_ids
        return self.request.row_sampler.row(token_ids, self.index, num_unknown=num_unknown)


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """A request from its check to its last output.

    Attributes:
        request_id: Request id.
        prompt: Text of the prompt, or None if it was given as token ids.
        prompt_token_ids: Token ids of the prompt, private to the engine.
        params: Sampling parameters.
        rule: Stop conditions of its sequences.
        row_sampler: Builds the sampler inputs.
        detokenizer: Creates its text; None without detokenization.
        output_kind: Which outputs its caller gets.
        metrics: Timestamps and counters.
        salt: Salt of its prefix in the prefix cache.
        priority: Priority; the lowest is served first, with ``scheduling_policy="priority"``.
        search: The beam search, if it is one.
        prompt_logprobs: Entry per prompt token but the first, so far; None if not requested.
        lora_request: Requested adapter.
        adapter: Reference that keeps its weights in host memory until the request ends.
        images: Images of its prompt; None if it has none.
        encoder: Encoder input; None if the model has no encoder.
        branches: Branches of its prompt, one for each sequence.
        pooled: Vector of a pooling model, float32 ``[F]``.
        prediction: Tokens of its prediction; empty without one, or without draft tokens.
        sequences: Sequences in the order of their indices; for beam search, the unfinished beams.
        is_plain: Whether a step adds only a token: one sequence, and text and log-probabilities are
            not needed before the end.
        group: Handle of its sequence group.
        finish: Finish reason of sequences that have none yet.
        is_finished: Whether it has ended.
        num_cached_tokens: Prompt tokens found in the prefix cache; None before the first token.
        start_seconds: Scheduler seconds of the engine when the request arrived.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    rule: StopRule
    row_sampler: RowSampler
    detokenizer: Detokenizer | None
    output_kind: RequestOutputKind
    metrics: RequestMetrics
    salt: int
    priority: int
    search: BeamSearch | None
    prompt_logprobs: list[TokenLogprob] | None
    lora_request: LoRARequest | None = None
    adapter: Adapter | None = None
    images: PromptImages | None = None
    encoder: EncoderInput | None = None
    branches: tuple[ParsedBranch, ...] = ()
    pooled: NDArray[np.float32] | None = None
    prediction: SequenceOf[int] = ()
    sequences: list[Sequence] = field(default_factory=list)
    is_plain: bool = False
    group: int = -1
    finish: Finish | None = None
    is_finished: bool = False
    num_cached_tokens: int | None = None
    start_seconds: float = 0.0
    _shown_prompt: list[int] | None = None

    def __post_init__(self) -> None:
        first = self.search.beams[0] if self.search is not None else None
        num_seqs = len(self.branches) or 1
        self.sequences = [self.new_sequence(index, beam=first) for index in range(num_seqs)]
        self.is_plain = (
            self.search is None
            and not self.branches
            and self.params.max_num_running_seqs == 1
            and self.rule.strings is None
            and not self.params.keeps_logprobs
        )

    @property
    def max_num_running_seqs(self) -> int:
        """Maximum number of its live sequences."""
        return len(self.branches) or self.params.max_num_running_seqs

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of its prompt and of all branches."""
        num_tokens = sum(len(branch.token_ids) for branch in self.branches)
        return len(self.prompt_token_ids) + num_tokens

    @property
    def is_streamed(self) -> bool:
        """Whether its caller gets outputs before the last."""
        return self.output_kind is not RequestOutputKind.FINAL_ONLY

    @property
    def shown_prompt(self) -> list[int]:
        """Copy of the prompt's tokens for its outputs, which the caller may modify."""
        if self._shown_prompt is None:
            self._shown_prompt = self.prompt_token_ids.copy()
        return self._shown_prompt

    def fail(self, error: Exception) -> None:
        """End it with an error as the finish reason, without text."""
        self.detokenizer = None
        self.finish = text_failure(error)
        for sequence in self.sequences:
            sequence.finish, sequence.text = self.finish, None

    def new_sequence(self, index: int, beam: Beam | None = None) -> Sequence:
        """Create a sequence: without tokens, or with those of a beam."""
        row = self.row_sampler.constant
        if self.branches:
            labels = self.branches[index].label_token_ids
            row = RowSampling(temperature=0, label_token_ids=tuple(labels))
        if beam is not None:
            return Sequence(self, 0, None, None, row, beam, token_ids=list(beam.token_ids))
        watches_text = self.is_streamed or self.rule.strings is not None
        stream = self.detokenizer.stream() if self.detokenizer and watches_text else None
        return Sequence(self, index, stream, [] if self.params.keeps_logprobs else None, row)


def text_failure(error: Exception) -> Finish:
    """Finish reason of a request whose tokens cannot be detokenized."""
    return Finish("error", f"no text can be made of its tokens: {type(error).__name__}: {error}")


def start_search(
    params: SamplingParams, rule: StopRule, detokenizer: Detokenizer | None
) -> BeamSearch:
    """Create the beam search of a request, before its first step."""
    return BeamSearch.start(
        width=params.max_num_running_seqs,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_tokens=rule.max_tokens,
        num_ending_tokens=len(rule.endings),
        text=detokenizer.stream() if detokenizer is not None and rule.strings else None,
    )


class RequestTable:
    """All unfinished requests, by request id and by the scheduler's handles.

    Attributes:
        has_encoders: Whether the prompts have encoder inputs: all of them, or none.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, Request] = {}
        self._by_group: dict[int, Request] = {}
        self._by_seq: dict[int, Sequence] = {}
        self._scored: set[str] = set()
        self._with_images: set[str] = set()
        self.has_encoders = False

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_id.values())

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    @property
    def has_scored(self) -> bool:
        """Whether any request needs log-probabilities of its prompt."""
        return bool(self._scored)

    @property
    def has_images(self) -> bool:
        """Whether any request's prompt has images."""
        return bool(self._with_images)

    def check_new(self, request_id: object) -> None:
        """Refuse an invalid request id.

        Raises:
            RequestError: It is not a string, or another request has it.
        """
        if not isinstance(request_id, str) or request_id in self._by_id:
            raise RequestError(
                f"request_id is {request_id!r}; it must be a string that no other unfinished "
                "request has"
            )

    def add(self, request: Request, group: int, handles: list[int]) -> None:
        """Add a request whose sequences have these handles; its id is new."""
        request.group = group
        self._by_id[request.request_id] = request
        self._by_group[group] = request
        if request.prompt_logprobs is not None:
            self._scored.add(request.request_id)
        if request.images is not None:
            self._with_images.add(request.request_id)
        self.has_encoders = request.encoder is not None
        self.replace_sequences(request, request.sequences, handles)

    def replace_sequences(
        self, request: Request, sequences: list[Sequence], handles: list[int]
    ) -> None:
        """Replace the sequences of a request, which continue under these handles or have ended."""
        for sequence in request.sequences:
            self._by_seq.pop(sequence.handle, None)
        for sequence, handle in zip(sequences, handles, strict=True):
            sequence.handle = handle
            if sequence.finish is None:
                self._by_seq[handle] = sequence
        request.sequences = sequences

    def drop_sequence(self, sequence: Sequence) -> None:
        """Remove the handle of a sequence that has ended."""
        self._by_seq.pop(sequence.handle, None)

    def discard(self, request: Request) -> None:
        """Remove a request, and release its adapter."""
        request.adapter = None
        for sequence in request.sequences:
            self._by_seq.pop(sequence.handle, None)
        self._by_group.pop(request.group, None)
        self._scored.discard(request.request_id)
        self._with_images.discard(request.request_id)
        self._by_id.pop(request.request_id, None)

    def by_id(self, request_id: str) -> Request | None:
        """The request of that id, if it is in the table."""
        return self._by_id.get(request_id)

    def by_group(self, group: int) -> Request | None:
        """The request of that sequence group, if it is in the table."""
        return self._by_group.get(group)

    def by_handles(self, handles: list[int]) -> list[Sequence]:
        """The sequences of these handles, all of which are in the table."""
        by_seq = self._by_seq
        return [by_seq[handle] for handle in handles]
