"""Grammars that restrict tokens: JSON schemas, regular expressions, Lark grammars.

The allowed next tokens are a function of the tokens so far, so a state belongs to a list of tokens,
not to a step or a row: after a failed step the same tokens have the same state, and forks and beams
start with their parent's.

A new grammar is first prepared and compiled by a separate process, which it may crash.  This
process then compiles what that one returns, without holding the interpreter lock.  Only this
module and those of that process use llguidance.

Costs: a microsecond per token to advance and as much to check one; 3 to 100 for the mask of all
tokens, computed in parallel for several rows; a grammar is compiled in about a millisecond, twice;
the first of a tokenizer waits a second for the vocabulary and the process.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from pagedserve.errors import GRAMMAR_FAULT, RequestError, extra_needed
from pagedserve.sampling.compile_process import CompileProcess
from pagedserve.sampling.schemas import GrammarError
from pagedserve.sampling.sources import PARSER_LIMITS, GrammarKey
from pagedserve.sampling_params.structured_outputs import StructuredOutputsParams
from pagedserve.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

# Number of masks that one thread computes as fast as several, which must wake up first.
_FEW: Final = 16
# Number of cached grammars: requests of one client mostly share a schema.
_MAX_KEPT: Final = 64
# Maximum length of an error message, which may repeat much of a grammar.
_MAX_REASON_CHARS: Final = 600


class GrammarState:
    """State of a text in its grammar.

    Checking one token takes a microsecond, all of them tens: so the sampler first checks the token
    that it would take, and computes the mask only if that is not allowed.

    Attributes:
        fault: Reason why the text cannot continue, if `compute_masks` found that it cannot.
    """

    __slots__ = ("_admitted", "_eos_token_ids", "_forced", "_matcher", "fault", "num_words")

    def __init__(self, matcher: "LLMatcher", eos_token_ids: Sequence[int], num_words: int) -> None:
        self._matcher = matcher
        # The matcher has already consumed this token, which is mostly the one that is sampled.
        self._admitted: int | None = None
        # Tokens of the text that must follow an earlier state, and the index of the next one.
        self._forced: tuple[list[int], int] = ([], 0)
        self._eos_token_ids = eos_token_ids
        self.num_words = num_words
        self.fault: str | None = None

    def admits(self, token_id: int) -> bool:
        """Whether a token is allowed next."""
        if token_id in self._eos_token_ids:
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

    def copy(self) -> "GrammarState":
        """Copy the state, for another text."""
        copied = GrammarState(self.matcher.deep_copy(), self._eos_token_ids, self.num_words)
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

    def forced(self, token_ids: Sequence[int]) -> list[int]:
        """Tokens that encode the text that must follow ``token_ids``, if any must."""
        return self.at(token_ids).forced()

    def num_possible(self, token_ids: Sequence[int], drafts: Sequence[int]) -> int:
        """How many of ``drafts`` may follow ``token_ids``, up to the first that may not."""
        return int(self.at(token_ids).matcher.validate_tokens(list(drafts)))

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
    """A compiled grammar of one vocabulary."""

    def __init__(self, start: GrammarState) -> None:
        """Store the initial state, which may have a fault; only copies of it advance."""
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


@dataclass(slots=True)
class GrammarCompiler:
    """Compiles grammars for one tokenizer; thread-safe.

    Attributes:
        tokenizer: Tokenizer of the model.
        vocab_size: Size V of its logits.
        eos_token_ids: Tokens that end a text: allowed where a document may end.
        process: Compiles each new grammar before this process does.
    """

    tokenizer: Tokenizer
    vocab_size: int
    eos_token_ids: Sequence[int]
    process: CompileProcess = field(default_factory=CompileProcess)
    _vocabulary: "LLTokenizer" = field(init=False)
    _has_vocabulary: bool = False
    # Errors of grammars are cached too: sending one again costs nothing.
    _kept: OrderedDict[GrammarKey, Grammar | GrammarError] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    # Held while a new grammar is compiled; cached ones do not wait.
    _compiling: threading.Lock = field(default_factory=threading.Lock)

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Compile a grammar.

        Raises:
            RequestError: The grammar is invalid, with the position; or grammars cannot read the
                tokenizer.
            ImportError: llguidance is missing.
        """
        with extra_needed("structured_outputs", "grammar"):
            import llguidance  # noqa: F401
        key = _key(params)
        found = self._known(key)
        if found is None:
            with self._compiling:
                found = self._known(key) or self._compile(params, key)
        if isinstance(found, GrammarError):
            where = f" at {found.place}" if found.place else ""
            raise _refusal(params, str(found), where)
        return found

    def end(self) -> None:
        """End the process; new grammars are refused from now on."""
        self.process.end()

    def knows(self, params: StructuredOutputsParams) -> bool:
        """Whether a grammar is cached."""
        return self._known(_key(params)) is not None

    def _known(self, key: GrammarKey) -> Grammar | GrammarError | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _compile(self, params: StructuredOutputsParams, key: GrammarKey) -> Grammar | GrammarError:
        """Compile a grammar, and cache it or its error."""
        found: Grammar | GrammarError
        if not self._has_vocabulary:
            self.process.start()  # in parallel with what follows
            self._vocabulary = self._read_vocabulary(params)
            self._has_vocabulary = True
        try:
            found = self._tried(key)
        except GrammarError as fault:
            found = GrammarError(str(fault), fault.place)  # without what tracebacks refer to
        with self._lock:
            self._kept[key] = found
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return found

    def _tried(self, key: GrammarKey) -> Grammar:
        """Compile a grammar that the other process survived.

        Raises:
            GrammarError: It is invalid, with the position.
        """
        from llguidance import LLMatcher, LLParserLimits

        source = self.process.source(key, self._vocabulary)
        limits = LLParserLimits(**PARSER_LIMITS)
        matcher = LLMatcher(self._vocabulary, source, log_level=0, limits=limits)
        start = GrammarState(matcher, self.eos_token_ids, -(-self.vocab_size // 32))
        grammar = Grammar(start)
        if start.fault is not None:
            raise GrammarError(start.fault)
        return grammar

    def _read_vocabulary(self, params: StructuredOutputsParams) -> "LLTokenizer":
        from llguidance import LLTokenizer

        backend: Any = copy(getattr(self.tokenizer, "backend_tokenizer", None))
        name = type(self.tokenizer).__name__
        fault = f"the tokenizer, {name}, has no vocabulary that grammars can read"
        if backend is None:
            raise _refusal(params, f"{fault}: accepted are those with a tokenizer.json")
        backend.no_padding()
        backend.no_truncation()
        eos_token_ids = list(self.eos_token_ids) or self.tokenizer.eos_token_id
        try:
            return LLTokenizer(backend.to_str(), n_vocab=self.vocab_size, eos_token=eos_token_ids)
        except ValueError as error:
            raise _refusal(params, f"{fault}: {error}") from error


def _key(params: StructuredOutputsParams) -> GrammarKey:
    return GrammarKey(
        params.kind,
        params.definition,
        params.disable_any_whitespace,
        params.disable_additional_properties,
    )


def _refusal(params: StructuredOutputsParams, fault: str, where: str = "") -> RequestError:
    reason = " ".join(fault.split())[:_MAX_REASON_CHARS]
    return RequestError(f"{params.named} cannot be used{where}: {reason}", param=params.given_as)
