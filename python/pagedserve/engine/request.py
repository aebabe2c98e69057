"""A request, its sequences, and the table of all requests of an engine: one type each.

Owns what the engine knows of a request beside the scheduler: parameters, text, log-probabilities,
times.  Token ids of prompts, block tables and queues are the core's.
"""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagedserve.drafts.proposer import DraftedText
from pagedserve.engine.row_sampler import RowSampler
from pagedserve.errors import RequestError
from pagedserve.executor.protocol import Adapter
from pagedserve.lora.request import LoRARequest
from pagedserve.models.encoder_prompts import EncoderInput
from pagedserve.models.prompt_images import PromptImages
from pagedserve.output.beam import Beam, BeamSearch
from pagedserve.output.detokenizer import Detokenizer, TextStream
from pagedserve.output.logprobs import TokenLogprob
from pagedserve.output.stop import Finish, StopRule
from pagedserve.output.stop_strings import StopMatch
from pagedserve.outputs import RequestMetrics
from pagedserve.sampling.rows import RowSampling
from pagedserve.sampling_params import RequestOutputKind, SamplingParams


@dataclass(slots=True, eq=False)
class Sequence:
    """One continuation of a request, so far.

    Attributes:
        request: Whose it is.
        index: Its place among those of its request; 0 for beams, whose places change.
        text: Its text as it comes; None where only the last text is wanted.  Text that was sent
            as a delta is forgotten.
        logprobs: Of each new token, None for those that another engine made; None where nobody
            asked.
        constant_row: What the sampler is told about every token, where that is always the same.
        beam: What a beam search knows of it.
        handle: The scheduler's.
        token_ids: New tokens.
        cumulative_logprob: Sum of ``logprobs``.
        finish: Why it ended, once it has.
        stop_match: The stop string that ended it.
        num_sent_tokens: Tokens that deltas have brought.
        num_sent_chars: Characters at the beginning of ``text`` that deltas have brought.
        is_end_sent: Whether a delta has told of its end.
        drafted: What is known of guesses at its tokens, once there was one.
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

    def row(self, *, num_unknown: int = 0, drafts: SequenceOf[int] = ()) -> RowSampling:
        """What the sampler is told about its next token.

        Args:
            num_unknown: Tokens of it that only the device knows so far, behind those known here.
            drafts: Guesses behind those known here; what is asked for is the token after them.
        """
        token_ids = [*self.token_ids, *drafts] if drafts else self.token_ids
        return self.request.row_sampler.row(token_ids, self.index, num_unknown=num_unknown)


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """A request from its check to its last output.

    Attributes:
        request_id: The caller's name for it.
        prompt: Its text, or None where token ids were given.
        prompt_token_ids: The prompt's tokens, which nobody outside the engine can change.
        params: How to continue it.
        rule: When its sequences end.
        row_sampler: Makes what the sampler is told.
        detokenizer: Makes its text; None for no text.
        output_kind: Which outputs its caller gets.
        metrics: When what happened.
        salt: Under which its prefix may be shared.
        priority: Smaller goes first, where the scheduler's policy asks for it.
        search: The beam search, if it is one.
        prompt_logprobs: Of the prompt's tokens but the first, so far; None where nobody asked.
        lora_request: The adapter that was asked for.
        adapter: Keeps its weights in host memory until the request ends.
        images: Of its prompt; None where it has none.
        encoder: What the encoder reads; None where the model has none.
        pooled: What a model that pools made of the prompt, float32 ``[F]``.
        sequences: Its continuations in the order of their indices; of a beam search those that
            go on.
        is_plain: Whether a token is all that a step brings it: one sequence, and nobody looks at
            text or log-probabilities before the end.
        group: Handle of its sequence group.
        finish: Why it ended, for sequences that did not end by themselves.
        is_finished: Whether it has ended.
        num_cached_tokens: Prompt tokens that the prefix cache had; None before the first token.
        start_seconds: What the engine's scheduler had taken when the request came.
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
    pooled: NDArray[np.float32] | None = None
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
        self.sequences = [self.new_sequence(0, beam=first)]
        self.is_plain = (
            self.search is None
            and self.params.max_num_running_seqs == 1
            and self.rule.strings is None
            and not self.params.keeps_logprobs
        )

    @property
    def is_streamed(self) -> bool:
        """Whether its caller wants outputs before the last."""
        return self.output_kind is not RequestOutputKind.FINAL_ONLY

    @property
    def shown_prompt(self) -> list[int]:
        """The prompt's tokens for its outputs: their caller may do with them as he likes."""
        if self._shown_prompt is None:
            self._shown_prompt = self.prompt_token_ids.copy()
        return self._shown_prompt

    def fail(self, error: Exception) -> None:
        """Give up its text, which cannot be made, and say so as the reason of its end."""
        self.detokenizer = None
        self.finish = text_failure(error)
        for sequence in self.sequences:
            sequence.finish, sequence.text = self.finish, None

    def new_sequence(self, index: int, beam: Beam | None = None) -> Sequence:
        """A continuation: without tokens, or with those of a beam."""
        row = self.row_sampler.constant
        if beam is not None:
            return Sequence(self, 0, None, None, row, beam, token_ids=list(beam.token_ids))
        watches_text = self.is_streamed or self.rule.strings is not None
        stream = self.detokenizer.stream() if self.detokenizer and watches_text else None
        return Sequence(self, index, stream, [] if self.params.keeps_logprobs else None, row)


def text_failure(error: Exception) -> Finish:
    """The end of a request whose tokens the tokenizer makes no text of."""
    return Finish("error", f"no text can be made of its tokens: {type(error).__name__}: {error}")


def start_search(
    params: SamplingParams, rule: StopRule, detokenizer: Detokenizer | None
) -> BeamSearch:
    """The beam search of a request, before its first step."""
    return BeamSearch.start(
        width=params.max_num_running_seqs,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_tokens=rule.max_tokens,
        num_ending_tokens=len(rule.endings),
        text=detokenizer.stream() if detokenizer is not None and rule.strings else None,
    )


class RequestTable:
    """All requests that have not ended, by the caller's id and by the scheduler's handles.

    Attributes:
        has_encoders: Whether an encoder reads prompts of theirs: of all, or of none.
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
        """Whether some request wants log-probabilities of its prompt."""
        return bool(self._scored)

    @property
    def has_images(self) -> bool:
        """Whether some request's prompt has images."""
        return bool(self._with_images)

    def check_new(self, request_id: object) -> None:
        """Refuse an id that a request cannot have.

        Raises:
            RequestError: It is no string, or another request has it.
        """
        if not isinstance(request_id, str) or request_id in self._by_id:
            raise RequestError(
                f"request_id is {request_id!r}; it must be a string that no other unfinished "
                "request has"
            )

    def add(self, request: Request, group: int, handle: int) -> None:
        """Take up a request whose only sequence has this handle; its id is new."""
        request.group = group
        self._by_id[request.request_id] = request
        self._by_group[group] = request
        if request.prompt_logprobs is not None:
            self._scored.add(request.request_id)
        if request.images is not None:
            self._with_images.add(request.request_id)
        self.has_encoders = request.encoder is not None
        self.replace_sequences(request, request.sequences, [handle])

    def replace_sequences(
        self, request: Request, sequences: list[Sequence], handles: list[int]
    ) -> None:
        """Give a request sequences, which go on under these handles or have ended."""
        for sequence in request.sequences:
            self._by_seq.pop(sequence.handle, None)
        for sequence, handle in zip(sequences, handles, strict=True):
            sequence.handle = handle
            if sequence.finish is None:
                self._by_seq[handle] = sequence
        request.sequences = sequences

    def drop_sequence(self, sequence: Sequence) -> None:
        """Forget the handle of a sequence that has ended."""
        self._by_seq.pop(sequence.handle, None)

    def discard(self, request: Request) -> None:
        """Forget a request, and let its adapter go."""
        request.adapter = None
        for sequence in request.sequences:
            self._by_seq.pop(sequence.handle, None)
        self._by_group.pop(request.group, None)
        self._scored.discard(request.request_id)
        self._with_images.discard(request.request_id)
        self._by_id.pop(request.request_id, None)

    def by_id(self, request_id: str) -> Request | None:
        """The request of that id, if it is still here."""
        return self._by_id.get(request_id)

    def by_group(self, group: int) -> Request | None:
        """The request of that sequence group, if it is still here."""
        return self._by_group.get(group)

    def by_handles(self, handles: list[int]) -> list[Sequence]:
        """Those sequences, all of which are here."""
        by_seq = self._by_seq
        return [by_seq[handle] for handle in handles]
