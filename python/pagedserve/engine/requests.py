"""The requests of an engine, by each of their names."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pagedserve.engine.rows import RowSource
from pagedserve.output.beam import Beam
from pagedserve.output.state import OutputState, SequenceState
from pagedserve.sampling.rows import RowSampling


@dataclass(slots=True)
class Request:
    """A request the scheduler knows.

    Attributes:
        group: Handle of its sequence group.
        output: What its caller is told.
        rows: What the sampler is told.
        scheduler_seconds: What the engine's scheduler had taken when the request came.
        seqs: Handles of its living sequences.
    """

    group: int
    output: OutputState
    rows: RowSource
    scheduler_seconds: float
    seqs: list[int] = field(default_factory=list)


class LivingSequence(NamedTuple):
    """A sequence that the scheduler knows."""

    request: Request
    sequence: SequenceState | Beam

    def row(self, *, num_unknown: int) -> RowSampling:
        """What the sampler is told about its next token.

        Args:
            num_unknown: Tokens of it that only the device knows so far, behind those known here.
        """
        index = 0 if isinstance(self.sequence, Beam) else self.sequence.index
        return self.request.rows.row(self.sequence.token_ids, index, num_unknown=num_unknown)


class RequestTable:
    """All requests, found by the caller's id and by the scheduler's handles.

    Invariant: what has an entry by a handle has one by id, also if an interrupt comes in the
    middle of a method; so ``discard`` can always be called again.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, Request] = {}
        self._by_group: dict[int, Request] = {}
        self._by_seq: dict[int, LivingSequence] = {}
        self._scored: set[str] = set()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._by_id.values()))

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    def holds(self, request: Request) -> bool:
        """Whether a request is still here; not another that has its id by now."""
        return self._by_id.get(request.output.request_id) is request

    @property
    def has_scored(self) -> bool:
        """Whether some request wants log-probabilities of its prompt."""
        return bool(self._scored)

    def add(self, request: Request, seq: int) -> None:
        """Take up a request whose only sequence is ``seq``; its id is new."""
        self._by_id[request.output.request_id] = request
        self._by_group[request.group] = request
        if request.output.prompt_logprobs is not None:
            self._scored.add(request.output.request_id)
        search = request.output.search
        first = search.beams[0] if search is not None else request.output.sequences[0]
        self.spread(request, [(seq, first)])

    def spread(self, request: Request, living: Iterable[tuple[int, SequenceState | Beam]]) -> None:
        """Note all living sequences of a request, which may have forked; may be called again."""
        fresh = {seq: LivingSequence(request, sequence) for seq, sequence in living}
        before, request.seqs = request.seqs, [*request.seqs, *fresh]
        self._by_seq |= fresh
        for seq in before:
            if seq not in fresh:
                self._by_seq.pop(seq, None)
        request.seqs = list(fresh)

    def discard(self, request: Request) -> None:
        """Forget a request; one already forgotten may be named again."""
        for seq in request.seqs:
            self._by_seq.pop(seq, None)
        self._by_group.pop(request.group, None)
        self._scored.discard(request.output.request_id)
        self._by_id.pop(request.output.request_id, None)

    def by_id(self, request_id: str) -> Request | None:
        """The request of that id, if it is still here."""
        return self._by_id.get(request_id)

    def by_group(self, group: int) -> Request | None:
        """The request of that sequence group, if it is still here."""
        return self._by_group.get(group)

    def by_seqs(self, seqs: Sequence[int]) -> list[LivingSequence]:
        """Those sequences, all of which are here."""
        by_seq = self._by_seq
        return [by_seq[seq] for seq in seqs]
