"""Grammars that restrict tokens: JSON schemas, regular expressions, Lark grammars.

The allowed next tokens are a function of the tokens so far, so a state belongs to a list of tokens,
not to a step or a row: after a failed step the same tokens have the same state, and forks and beams
start with their parent's.

`pagedserve.sampling.grammar_compiler` compiles them.

Costs: a microsecond per token to advance and as much to check one; 3 to 100 for the mask of all
tokens, computed in parallel for several rows.
"""

import os
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from pagedserve.errors import GRAMMAR_FAULT

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

# Number of masks that one thread computes as fast as several, which must wake up first.
_FEW: Final = 16


class GrammarState:
    """State of a text in its grammar.

    Checking one token takes a microsecond, all of them tens: so the sampler first checks the token
    that it would take, and computes the mask only if that is not allowed.

    Attributes:
        fault: Reason why the text cannot continue, if `compute_masks` found that it cannot.
        num_words: Integers of a mask.
        opening: Token that is allowed although the grammar has no such text; None if none is.
    """

    __slots__ = (
        "_admitted",
        "_forced",
        "_matcher",
        "eos_token_ids",
        "fault",
        "num_words",
        "opening",
    )

    def __init__(
        self,
        matcher: "LLMatcher",
        eos_token_ids: Sequence[int],
        num_words: int,
        opening: int | None = None,
    ) -> None:
        self._matcher = matcher
        self.opening = opening
        # The matcher has already consumed this token, which is mostly the one that is sampled.
        self._admitted: int | None = None
        # Tokens of the text that must follow an earlier state, and the index of the next one.
        self._forced: tuple[list[int], int] = ([], 0)
        self.eos_token_ids = eos_token_ids
        self.num_words = num_words
        self.fault: str | None = None

    def admits(self, token_id: int) -> bool:
        """Whether a token is allowed next."""
        if token_id == self.opening:
            return True
        if token_id in self.eos_token_ids:
            return bool(self.matcher.is_accepting())
        if self.matcher.try_consume_tokens([token_id]) == 0:
            return False
        self._admitted = token_id
        return True

    @property
    def matcher(self) -> "LLMatcher":
        """Matcher of llguidance in this state; not shared."""
        if self._admitted is not None:
            self._admitted = None
            self._matcher.rollback(1)
        return self._matcher

    def copy(self, opening: int | None = None) -> "GrammarState":
        """Copy the state, for another text."""
        matcher = self.matcher.deep_copy()
        copied = GrammarState(matcher, self.eos_token_ids, self.num_words, opening)
        copied._forced = self._forced
        return copied

    @property
    def known_next(self) -> int | None:
        """The token that must come next, if `forced` has found that one must."""
        tokens, index = self._forced
        return tokens[index] if index < len(tokens) else None

    def forced(self) -> list[int]:
        """Tokens that encode the text that must follow, if any must.

        Finding them takes as long as the text, so it is done once for all states of the text.
        """
        if self.known_next is None:
            self._forced = (self.matcher.compute_ff_tokens(), 0)
        tokens, index = self._forced
        return tokens[index:]

    def go_on(self, token_ids: Sequence[int]) -> "GrammarState":
        """Consume tokens; return self."""
        tokens, index = self._forced
        end = index + len(token_ids)
        self._forced = (tokens, end) if tokens[index:end] == [*token_ids] else ([], 0)
        if [self._admitted] == [*token_ids]:
            self._admitted = None
        else:
            self.matcher.consume_tokens([*token_ids])
        return self


class GrammarStates:
    """Grammar states of the sequences of a request."""

    def __init__(self, start: GrammarState, num_kept: int) -> None:
        """Create the states of a request.

        Args:
            start: Initial state; not shared.
            num_kept: Number of most recently used token lists whose states are kept.
        """
        self._start = start
        self._num_kept = num_kept
        self._by_tokens: OrderedDict[tuple[int, ...], GrammarState] = OrderedDict()

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """Tokens that end a text."""
        return self._start.eos_token_ids

    def forced(self, token_ids: Sequence[int]) -> list[int]:
        """Tokens that encode the text that must follow ``token_ids``, if any must."""
        return self.at(token_ids).forced()

    def num_possible(self, token_ids: Sequence[int], drafts: Sequence[int]) -> int:
        """How many of ``drafts`` may follow ``token_ids``, up to the first that may not."""
        return int(self.at(token_ids).matcher.validate_tokens(list(drafts)))

    def opened_by(self, token_id: int) -> GrammarState:
        """The initial state, and a token that may start another text before this one."""
        return self._start.copy(token_id)

    def at(self, token_ids: Sequence[int]) -> GrammarState:
        """The state after ``token_ids``, all the new tokens of a sequence.

        It stays valid until ``num_kept`` others were requested.
        """
        tokens = tuple(token_ids)
        if not tokens:
            return self._start
        known = self._by_tokens
        state = known.get(tokens)  # each lookup costs as much as the number of tokens
        if state is None:
            state = known[tokens] = self._reach(tokens)
        else:
            known.move_to_end(tokens)
        return state

    def _reach(self, tokens: tuple[int, ...]) -> GrammarState:
        """Compute the state after tokens; evict the oldest state if the cache is full."""
        known = self._by_tokens
        oldest = known.popitem(last=False) if len(known) == self._num_kept else None
        if oldest is not None and oldest[0] == tokens[:-1]:
            return oldest[1].go_on(tokens[-1:])  # a copy would cost twice that
        before = known.get(tokens[:-1])
        if before is not None:
            return before.copy().go_on(tokens[-1:])
        return self._start.copy().go_on(tokens)


def compute_masks(states: Sequence[GrammarState]) -> NDArray[np.int32]:
    """Compute masks of allowed next tokens for several states, with all available threads.

    A state that allows no token gets a `fault`.

    Args:
        states: At least one; duplicates are computed once.

    Returns:
        int32 ``[N, ceil(V / 32)]``: token ``t`` is allowed if bit ``t % 32`` of entry ``t // 32``
        is 1.
    """
    places = {state: place for place, state in enumerate(dict.fromkeys(states))}
    masks = np.zeros((len(places), states[0].num_words), np.int32)
    wanted = []
    for state, place in places.items():
        if (token := state.known_next) is None:
            wanted.append((state, place))
        else:
            masks.view(np.uint32)[place, token // 32] = 1 << token % 32
    _fill_masks(wanted, masks)
    for state, place in wanted:
        if state.matcher.is_error():
            reason = state.matcher.get_error().partition("\n")[0]
            masks[place], state.fault = 0, f"{GRAMMAR_FAULT}: {reason}"
        elif _num_allowed(masks[place]) == 1:
            state.forced()  # the next masks of a long text would cost as much as this one
    for state, place in places.items():
        if (token := state.opening) is not None:
            masks.view(np.uint32)[place, token // 32] |= np.uint32(1 << token % 32)
    return masks if len(places) == len(states) else masks[[places[state] for state in states]]


def _fill_masks(wanted: Sequence[tuple[GrammarState, int]], masks: NDArray[np.int32]) -> None:
    """Compute the masks of states, each to its row."""
    if len(wanted) < _FEW:
        for state, place in wanted:
            row = masks[place]
            state.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
    else:
        rows = [(state.matcher, place) for state, place in wanted]
        row_bytes = masks.nbytes // len(masks)
        _executor().unsafe_compute_mask_ptr(rows, masks.ctypes.data, row_bytes, len(masks))


def _num_allowed(mask: NDArray[np.int32]) -> int:
    """Number of tokens of a mask, or 2 if there are several."""
    words = mask[mask != 0].view(np.uint32)
    return min(2, sum(int(word).bit_count() for word in words[:2]))


class Grammar:
    """A compiled grammar of one vocabulary.

    Attributes:
        num_bytes: Its memory when it was compiled; 0 where the C library does not say.
    """

    def __init__(self, start: GrammarState, num_bytes: int) -> None:
        """Store the initial state, which may have a fault; only copies of it advance."""
        self.num_bytes = num_bytes
        self._start = start
        self._first = compute_masks([start])[0]

    def can_begin_with(self, token_ids: Sequence[int]) -> bool:
        """Whether any of the tokens may be the first of a text."""
        tokens = np.asarray(token_ids, np.int64)
        words = self._first.view(np.uint32)[tokens // 32]
        return bool((words >> (tokens % 32).astype(np.uint32) & 1).any())

    def states(self, num_kept: int) -> "GrammarStates":
        """Create the states of a request, sharing nothing with other threads."""
        return GrammarStates(self._start.copy(), num_kept)


@cache
def _executor() -> "LLExecutor":
    from llguidance import LLExecutor

    return LLExecutor(num_threads=len(os.sched_getaffinity(0)))
