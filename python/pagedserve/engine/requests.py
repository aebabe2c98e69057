"""The requests of an engine, by each of their names, and the random numbers of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from pagedserve.output.processor import OutputState
from pagedserve.sampling.batch import RowSampling
from pagedserve.sampling_params import SamplingParams

# Below this a temperature only makes logits overflow; the likeliest token has all the mass.
_GREEDY_BELOW: Final = 1e-5
_DRAWN_AT_ONCE: Final = 64


class UniformStream:
    """The random numbers of one request: number i belongs to its i-th new token.

    They depend on the key alone, not on what else runs, on preemptions, or on steps that failed
    and were done again.
    """

    __slots__ = ("_block", "_generator", "_start")

    def __init__(self, *key: int) -> None:
        """Start the stream that ``key``, non-negative integers, names."""
        self._generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
        self._start = 0
        self._block: list[float] = []

    def at(self, index: int) -> float:
        """Number ``index``, a float64 in [0, 1); never one before a block already passed."""
        while index - self._start >= len(self._block):
            start = self._start + len(self._block)
            self._block = self._generator.random(_DRAWN_AT_ONCE).tolist()
            self._start = start
        return self._block[index - self._start]


class RowSource:
    """What the sampler is told about each new token of one request."""

    __slots__ = ("_banned", "_min_tokens", "_params", "_row", "_uniforms")

    def __init__(
        self, params: SamplingParams, *, banned_at_first: tuple[int, ...], key: Sequence[int]
    ) -> None:
        """Prepare the rows of a request.

        Args:
            params: Its sampling parameters.
            banned_at_first: Tokens not to be sampled before ``params.min_tokens`` new ones.
            key: Names its random numbers.
        """
        self._params = params
        self._min_tokens = params.min_tokens
        self._banned = banned_at_first
        # What a greedy request says about every token past min_tokens.
        self._row = self._make(0.0, ())
        self._uniforms = None if self._row.is_greedy else UniformStream(*key)

    def row(self, index: int) -> RowSampling:
        """The row for new token ``index``, counted from 0."""
        if self._uniforms is None and index >= self._min_tokens:
            return self._row
        uniform = 0.0 if self._uniforms is None else self._uniforms.at(index)
        return self._make(uniform, self._banned if index < self._min_tokens else ())

    def _make(self, uniform: float, banned: tuple[int, ...]) -> RowSampling:
        params = self._params
        return RowSampling(
            temperature=params.temperature if params.temperature >= _GREEDY_BELOW else 0.0,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            uniform=uniform,
            banned_token_ids=banned,
        )


@dataclass(frozen=True, slots=True)
class Request:
    """A request the scheduler knows.

    Attributes:
        group: Handle of its sequence group.
        seq: Handle of its sequence.
        output: What its caller is told.
        rows: What the sampler is told.
    """

    group: int
    seq: int
    output: OutputState
    rows: RowSource


class RequestTable:
    """All requests, found by the caller's id and by the scheduler's handles.

    Invariant: what has an entry by sequence has one by id, also if an interrupt comes in the
    middle of a method; so ``discard`` can always be called again.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, Request] = {}
        self._by_seq: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    def add(self, request: Request) -> None:
        """Take up a request; its id is new."""
        self._by_id[request.output.request_id] = request
        self._by_seq[request.seq] = request

    def discard(self, request: Request) -> None:
        """Forget a request; one already forgotten may be named again."""
        self._by_seq.pop(request.seq, None)
        self._by_id.pop(request.output.request_id, None)

    def by_id(self, request_id: str) -> Request | None:
        """The request of that id, if it is still here."""
        return self._by_id.get(request_id)

    def by_group(self, group: int) -> Request | None:
        """The request of that sequence group, if it is still here; looks at all of them."""
        return next((one for one in self._by_id.values() if one.group == group), None)

    def by_seqs(self, seqs: Sequence[int]) -> list[Request]:
        """The requests of those sequences, all of which are here."""
        by_seq = self._by_seq
        return [by_seq[seq] for seq in seqs]
