"""Log-probabilities as returned by the sampler, and as returned to callers."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from pagedserve.outputs import Logprob


class TopLogprobs(NamedTuple):
    """Most likely tokens of a position, most likely first: int32 and float32, [k] each."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    @classmethod
    def of(
        cls, token_ids: NDArray[np.int32], logprobs: NDArray[np.float32], num_top: int
    ) -> "TopLogprobs":
        """Copy the first ``num_top``: a view would keep the arrays of the whole step alive."""
        return cls(token_ids[:num_top].copy(), logprobs[:num_top].copy())


class TokenLogprob(NamedTuple):
    """Log-probability of one token after the tokens before it.

    Attributes:
        logprob: Natural logarithm of its probability.
        rank: Rank in the vocabulary; 1 is the most likely.
        top: Most likely tokens of its position.
    """

    logprob: float
    rank: int
    top: TopLogprobs

    @classmethod
    def of(
        cls,
        logprob: np.float32,
        rank: np.int32,
        top_token_ids: NDArray[np.int32],
        top_logprobs: NDArray[np.float32],
        num_top: int,
    ) -> "TokenLogprob":
        """Keep the first ``num_top`` most likely tokens of a position."""
        top = TopLogprobs.of(top_token_ids, top_logprobs, num_top)
        return cls(float(logprob), int(rank), top)


class LogprobsView(Sequence[dict[int, Logprob] | None]):
    """Entries for callers; each is created when it is read, which most never are."""

    __slots__ = ("_entries", "_token_ids", "_token_text")

    def __init__(
        self,
        token_ids: Sequence[int],
        entries: Sequence[TokenLogprob | None],
        token_text: Callable[[int], str] | None,
    ) -> None:
        """Create a view of ``entries``.

        Args:
            token_ids: A token for each entry; may be longer.
            entries: Log-probability of each token; None if unknown.
            token_text: Returns the text of a token alone; None without detokenization.
        """
        self._token_ids = token_ids
        self._entries = entries
        self._token_text = token_text

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob] | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[int, Logprob] | None]: ...
    def __getitem__(
        self, index: int | slice
    ) -> dict[int, Logprob] | list[dict[int, Logprob] | None] | None:
        """The entry of a token: the token itself, then the most likely ones."""
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        entry = self._entries[index]
        if entry is None:
            return None
        token = self._token_ids[range(len(self))[index]]
        shown = {token: self._logprob(token, entry.logprob, entry.rank)}
        ranked = enumerate(zip(entry.top.token_ids.tolist(), entry.top.logprobs, strict=True), 1)
        for rank, (likely, value) in ranked:
            if likely != token:
                shown[likely] = self._logprob(likely, value, rank)
        return shown

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as for a list

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[type[list[Any]], tuple[list[dict[int, Logprob] | None]]]:
        """Pickle, or deep copy, as a list, without the tokenizer."""
        return list, (list(self),)

    def _logprob(self, token: int, value: float, rank: int) -> Logprob:
        text = None if self._token_text is None else self._token_text(token)
        return Logprob(float(value), rank, text)
