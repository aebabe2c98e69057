"""Which tokens a grammar lets come: JSON schemas, regular expressions, Lark grammars.

The grammars are those of llguidance, which this module alone knows.  What may come next is a
function of the tokens so far, so a state belongs to a list of tokens, not to a step or a row: after
a step that failed the same tokens have the same state, and forks and beams begin at their
parent's.

Costs: a microsecond a token to go on and as much to ask whether one may come; 3 to 100 for the mask
of all, which those of other rows share the threads with; a grammar is compiled in about a
millisecond, the first of a tokenizer waits half a second for the vocabulary.
"""

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from pagedserve.errors import RequestError, extra_needed
from pagedserve.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions
    from transformers import PreTrainedTokenizerBase

# Masks that one thread finds as fast as several, which must wake up first.
_FEW: Final = 16
# Compiled grammars that are kept: requests of one client mostly have one schema.
_MAX_KEPT: Final = 64
# Of what a refusal says; more would repeat much of a grammar.
_MAX_REASON_CHARS: Final = 600
# Keys of a JSON schema whose values are schemas, lists of them, or mappings to them.
_SCHEMA_KEYS: Final = ("items", "additionalProperties", "not", "if", "then", "else", "contains")
_LIST_KEYS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
# Years but 0; days that each of them has, and 29 February with the years that have it.
_YEAR: Final = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_FOURTH: Final = "(0[48]|[2468][048]|[13579][26])"
_REAL_DATE: Final = (
    f"^({_YEAR}-((0[13-9]|1[0-2])-[0-9]{{2}}|02-([01][0-9]|2[0-8]))"
    f"|([0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)"
)
_MAPPING_KEYS: Final = ("properties", "patternProperties", "$defs", "definitions")


class GrammarState:
    """Where a text is in its grammar.

    One token is asked about in a microsecond, all of them in tens: so a sampler asks first whether
    the token that it would take may come, and for the mask only where it may not.

    Attributes:
        fault: Why the text cannot go on, where `compute_masks` found that it cannot.
    """

    __slots__ = ("_admitted", "_eos_token_ids", "_matcher", "fault", "num_words")

    def __init__(self, matcher: "LLMatcher", eos_token_ids: Sequence[int], num_words: int) -> None:
        self._matcher = matcher
        # Behind it the matcher is already: mostly it is what comes, and nothing is left to do.
        self._admitted: int | None = None
        self._eos_token_ids = eos_token_ids
        self.num_words = num_words
        self.fault: str | None = None

    def admits(self, token_id: int) -> bool:
        """Whether a token may come next."""
        if token_id in self._eos_token_ids:
            return bool(self.matcher.is_accepting())
        if self.matcher.try_consume_tokens([token_id]) == 0:
            return False
        self._admitted = token_id
        return True

    @property
    def matcher(self) -> "LLMatcher":
        """That of llguidance, at this place; it is shared with nobody."""
        if self._admitted is not None:
            self._admitted = None
            self._matcher.rollback(1)
        return self._matcher

    def copy(self) -> "GrammarState":
        """The same place, for another text."""
        return GrammarState(self.matcher.deep_copy(), self._eos_token_ids, self.num_words)

    def go_on(self, token_ids: Sequence[int]) -> "GrammarState":
        """Go on to behind more tokens; this."""
        if [self._admitted] == [*token_ids]:
            self._admitted = None
        else:
            self.matcher.consume_tokens([*token_ids])
        return self


class GrammarStates:
    """Where the sequences of a request are in its grammar."""

    def __init__(self, start: GrammarState, num_kept: int) -> None:
        """Begin a request.

        Args:
            start: Where a text begins; shared with nobody.
            num_kept: Of so many lists of tokens, those asked for last, the states are kept.
        """
        self._start = start
        self._num_kept = num_kept
        self._by_tokens: OrderedDict[tuple[int, ...], GrammarState] = OrderedDict()

    def forced(self, token_ids: Sequence[int]) -> list[int]:
        """The tokens most likely to stand for what must follow ``token_ids``, if anything must."""
        forced: list[int] = self.at(token_ids).matcher.compute_ff_tokens()
        return forced

    def num_possible(self, token_ids: Sequence[int], drafts: Sequence[int]) -> int:
        """How many of ``drafts`` may follow ``token_ids``, up to the first that may not."""
        return int(self.at(token_ids).matcher.validate_tokens(list(drafts)))

    def at(self, token_ids: Sequence[int]) -> GrammarState:
        """The state behind ``token_ids``, all the new tokens of a sequence.

        It is there until ``num_kept`` others were asked for.
        """
        tokens = tuple(token_ids)
        if not tokens:
            return self._start
        known = self._by_tokens
        state = known.get(tokens)  # each look at the tokens costs as much as their number
        if state is None:
            state = known[tokens] = self._reach(tokens)
        else:
            known.move_to_end(tokens)
        return state

    def _reach(self, tokens: tuple[int, ...]) -> GrammarState:
        """The state behind tokens that is not known, and one less that is kept where all are."""
        known = self._by_tokens
        oldest = known.popitem(last=False) if len(known) == self._num_kept else None
        if oldest is not None and oldest[0] == tokens[:-1]:
            return oldest[1].go_on(tokens[-1:])  # a copy would cost twice that
        before = known.get(tokens[:-1])
        if before is not None:
            return before.copy().go_on(tokens[-1:])
        return self._start.copy().go_on(tokens)


def compute_masks(states: Sequence[GrammarState]) -> NDArray[np.int32]:
    """What may come next in each of several states, over the threads that are there.

    Where nothing can be said the state has a `fault`.

    Args:
        states: At least one; equal ones are asked once.

    Returns:
        int32 ``[N, ceil(V / 32)]``: token ``t`` may come if bit ``t % 32`` of entry ``t // 32``
        is 1.
    """
    places = {state: place for place, state in enumerate(dict.fromkeys(states))}
    masks = np.empty((len(places), states[0].num_words), np.int32)
    if len(places) < _FEW:
        for state, mask in zip(places, masks, strict=True):
            state.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    else:
        wanted = [(state.matcher, place) for state, place in places.items()]
        row_bytes = masks.nbytes // len(places)
        _executor().unsafe_compute_mask_ptr(wanted, masks.ctypes.data, row_bytes, len(places))
    for state, mask in zip(places, masks, strict=True):
        if state.matcher.is_error():
            reason = state.matcher.get_error().partition("\n")[0]
            mask[:], state.fault = 0, f"the grammar cannot go on: {reason}"
    return masks if len(places) == len(states) else masks[[places[state] for state in states]]


class Grammar:
    """A compiled grammar of one vocabulary."""

    def __init__(self, start: GrammarState) -> None:
        """Take where its texts begin; nothing goes on from it but copies."""
        self._start = start

    def states(self, num_kept: int) -> "GrammarStates":
        """Those of a request, which share nothing with those of another thread's."""
        return GrammarStates(self._start.copy(), num_kept)


@cache
def _executor() -> "LLExecutor":
    from llguidance import LLExecutor

    return LLExecutor(num_threads=len(os.sched_getaffinity(0)))


@dataclass(slots=True)
class GrammarCompiler:
    """Compiles grammars for one tokenizer; may be called by several threads.

    Attributes:
        tokenizer: Of the model.
        vocab_size: Of its logits, V.
        eos_token_ids: Tokens that end a text: allowed where a document may end.
    """

    tokenizer: "PreTrainedTokenizerBase"
    vocab_size: int
    eos_token_ids: Sequence[int]
    _vocabulary: "LLTokenizer | None" = None
    _kept: OrderedDict[str, Grammar] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """The grammar of what a text must be.

        Raises:
            RequestError: What is wrong with it, and where; or a tokenizer that grammars cannot
                read.
            ImportError: llguidance is missing.
        """
        with extra_needed("structured_outputs", "grammar"):
            from llguidance import LLMatcher, LLParserLimits
        try:
            source = _source(params, params.definition)
        except ValueError as error:
            raise _refusal(params, str(error)) from error
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._read_vocabulary(params)
            grammar = self._kept.pop(source, None)
        if grammar is None:  # others need not wait for this one
            limits = LLParserLimits(verbose_errors=False)
            matcher = LLMatcher(self._vocabulary, source, log_level=0, limits=limits)
            if matcher.is_error():
                raise self._explained(params, source)
            start = GrammarState(matcher, self.eos_token_ids, -(-self.vocab_size // 32))
            compute_masks([start])
            if start.fault is not None:
                raise _refusal(params, start.fault)
            grammar = Grammar(start)
        with self._lock:
            self._kept[source] = grammar
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return grammar

    def _read_vocabulary(self, params: StructuredOutputsParams) -> "LLTokenizer":
        from llguidance.hf import from_tokenizer

        try:
            return from_tokenizer(
                self.tokenizer,  # type: ignore[arg-type]  # it says what it does not take
                n_vocab=self.vocab_size,
                eos_token=list(self.eos_token_ids) or None,
            )
        except ValueError as error:
            name = type(self.tokenizer).__name__
            fault = f"the tokenizer, {name}, has no vocabulary that grammars can read: {error}"
            raise _refusal(params, fault) from error

    def _explained(self, params: StructuredOutputsParams, source: str) -> RequestError:
        """Why a grammar cannot be compiled, and the place of a schema that is wrong."""
        fault, where = self._fault(source), ""
        if params.kind == "json":
            schema = json.loads(params.definition)
            shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
            place, fault = self._place(params, schema, shared, fault)
            where = f" at {place}"
        return _refusal(params, fault, where)

    def _fault(self, source: str) -> str:
        from llguidance import LLMatcher

        return str(LLMatcher.validate_grammar(source, self._vocabulary))

    def _place(
        self,
        params: StructuredOutputsParams,
        schema: dict[str, Any],
        shared: dict[str, Any],
        fault: str,
        place: str = "#",
    ) -> tuple[str, str]:
        """The innermost schema that is wrong by itself, as a JSON pointer, and what is wrong.

        Each is tried with ``shared``, the definitions that it may refer to.
        """
        for pointer, part in _parts(schema):
            if found := self._fault(_source(params, json.dumps({**shared, **part}))):
                return self._place(params, part, shared, found, f"{place}/{pointer}")
        return place, fault


def _refusal(params: StructuredOutputsParams, fault: str, where: str = "") -> RequestError:
    reason = " ".join(fault.split())[:_MAX_REASON_CHARS]
    return RequestError(f"{params.named} cannot be used{where}: {reason}", param=params.given_as)


def _source(params: StructuredOutputsParams, definition: str) -> str:
    """What llguidance compiles; ``definition`` is the parameters' own or a part of it."""
    from llguidance import LLMatcher

    if params.kind == "regex":
        return str(LLMatcher.grammar_from_regex(definition))
    if params.kind == "lark":
        return str(LLMatcher.grammar_from_lark(definition))
    if params.disable_additional_properties:
        definition = json.dumps(_closed(json.loads(definition)))
    if '"format"' in definition:
        definition = json.dumps(_with_real_dates(json.loads(definition)))
    options: JsonCompileOptions = {"whitespace_flexible": not params.disable_any_whitespace}
    return str(LLMatcher.grammar_from_json_schema(definition, defaults=options))


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema whose objects have the properties that it names and no others; changes it."""
    for _, part in _parts(schema):
        _closed(part)
    if "properties" in schema:
        schema.setdefault("additionalProperties", False)
    return schema


def _with_real_dates(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema whose dates are of years 1 to 9999, 29 February in leap years alone; changes it.

    llguidance knows how many days a month has at most.
    """
    for _, part in _parts(schema):
        _with_real_dates(part)
    if schema.get("format") in ("date", "date-time"):
        schema["allOf"] = [*schema.get("allOf", ()), {"pattern": _REAL_DATE}]
    return schema


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas within a schema but True and False, each with its JSON pointer from there."""
    found: list[tuple[str, Any]] = [(key, schema.get(key)) for key in _SCHEMA_KEYS]
    for key in _LIST_KEYS:
        if isinstance(parts := schema.get(key), list):
            found += [(f"{key}/{index}", part) for index, part in enumerate(parts)]
    for key in _MAPPING_KEYS:
        if isinstance(parts := schema.get(key), dict):
            found += [(f"{key}/{name}", part) for name, part in parts.items()]
    yield from ((pointer, part) for pointer, part in found if isinstance(part, dict))
