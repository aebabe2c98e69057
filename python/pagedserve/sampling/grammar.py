"""Which tokens a grammar lets come: JSON schemas, regular expressions, Lark grammars.

The grammars are those of llguidance, which this module alone knows.  What may come next is a
function of the tokens so far, so a state belongs to a list of tokens, not to a step or a row: after
a step that failed the same tokens have the same state, and forks and beams begin at their
parent's.

Costs: a few microseconds a token to go on, some 5 to 100 for its mask, which those of other rows
share the threads with; a grammar is compiled in
about a millisecond, the first of a tokenizer waits half a second for the vocabulary.
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

# Masks that one thread finds as fast as several.
_FEW: Final = 4
# Compiled grammars that are kept: requests of one client mostly have one schema.
_MAX_KEPT: Final = 64
# Of what a refusal says; more would repeat much of a grammar.
_MAX_REASON_CHARS: Final = 600
# Keys of a JSON schema whose values are schemas, lists of them, or mappings to them.
_SCHEMA_KEYS: Final = ("items", "additionalProperties", "not", "if", "then", "else", "contains")
_LIST_KEYS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPPING_KEYS: Final = ("properties", "patternProperties", "$defs", "definitions")


@dataclass(frozen=True, slots=True)
class Allowed:
    """What may follow some tokens.

    Attributes:
        mask: int32 ``[ceil(V / 32)]``, bit ``t % 32`` of entry ``t // 32`` is token ``t``.
        fault: Why nothing can be said, where nothing can.
    """

    mask: NDArray[np.int32]
    fault: str | None = None


class Grammar:
    """A compiled grammar of one vocabulary."""

    def __init__(self, matcher: "LLMatcher", num_words: int) -> None:
        self._matcher = matcher
        self._num_words = num_words

    def states(self, num_kept: int = 2) -> "GrammarStates":
        """Those of a request, which share nothing with those of another thread's.

        Args:
            num_kept: Of so many lists of tokens, those asked for last, the states are kept.
        """
        return GrammarStates(self._matcher.deep_copy(), self._num_words, num_kept)


class GrammarStates:
    """Where the sequences of a request are in its grammar.

    Attributes:
        num_words: Entries of a mask.
        found: What may follow some of their tokens, as ``compute_masks`` found out last.
    """

    def __init__(self, start: "LLMatcher", num_words: int, num_kept: int) -> None:
        self._start = start
        self.num_words = num_words
        self._num_kept = num_kept
        self._by_tokens: OrderedDict[tuple[int, ...], LLMatcher] = OrderedDict()
        self.found: dict[tuple[int, ...], Allowed] = {}

    def allowed(self, token_ids: Sequence[int]) -> Allowed:
        """What may follow ``token_ids``, all the new tokens of a sequence."""
        tokens = tuple(token_ids)
        if tokens not in self.found:
            compute_masks([(self, tokens)])
        return self.found[tokens]

    def forced(self, token_ids: Sequence[int]) -> list[int]:
        """The tokens most likely to stand for what must follow ``token_ids``, if anything must."""
        forced: list[int] = self.at(tuple(token_ids)).compute_ff_tokens()
        return forced

    def num_possible(self, token_ids: Sequence[int], drafts: Sequence[int]) -> int:
        """How many of ``drafts`` may follow ``token_ids``, up to the first that may not."""
        return int(self.at(tuple(token_ids)).validate_tokens(list(drafts)))

    def at(self, tokens: tuple[int, ...]) -> "LLMatcher":
        """The state behind ``tokens``."""
        known = self._by_tokens
        if not tokens:
            return self._start
        if tokens in known:
            known.move_to_end(tokens)
            return known[tokens]
        matcher = known.get(tokens[:-1])
        if matcher is not None:
            matcher = matcher.deep_copy()
            matcher.consume_token(tokens[-1])
        else:
            matcher = self._start.deep_copy()
            matcher.consume_tokens(list(tokens))
        known[tokens] = matcher
        if len(known) > self._num_kept:
            known.popitem(last=False)
        return matcher


def compute_masks(rows: Sequence[tuple[GrammarStates, Sequence[int]]]) -> None:
    """Find out what may follow each of several lists of tokens, over the threads that are there.

    ``allowed`` of these states then says so at once, until the next call with one of them.
    """
    if not rows:
        return
    for states, _ in rows:
        states.found.clear()
    # Sequences of a request with the same tokens are in one state.
    keys = dict.fromkeys((states, tuple(token_ids)) for states, token_ids in rows)
    matchers = [states.at(tokens) for states, tokens in keys]
    masks = np.empty((len(keys), rows[0][0].num_words), np.int32)
    if len(matchers) < _FEW:
        for matcher, mask in zip(matchers, masks, strict=True):
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    else:
        places = [(matcher, place) for place, matcher in enumerate(matchers)]
        row_bytes = masks.nbytes // len(keys)
        _executor().unsafe_compute_mask_ptr(places, masks.ctypes.data, row_bytes, len(keys))
    for (states, tokens), matcher, mask in zip(keys, matchers, masks, strict=True):
        fault = None
        if matcher.is_error():
            reason = matcher.get_error().partition("\n")[0]
            mask[:], fault = 0, f"the grammar cannot go on: {reason}"
        states.found[tokens] = Allowed(mask, fault)


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
            grammar = Grammar(matcher, -(-self.vocab_size // 32))
            if (fault := grammar.states().allowed(()).fault) is not None:
                raise _refusal(params, fault)
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
    options: JsonCompileOptions = {"whitespace_flexible": not params.disable_any_whitespace}
    return str(LLMatcher.grammar_from_json_schema(definition, defaults=options))


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema whose objects have the properties that it names and no others; changes it."""
    for _, part in _parts(schema):
        _closed(part)
    if "properties" in schema:
        schema.setdefault("additionalProperties", False)
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
