"""Compiler of grammars, imported with the first of them.

A new grammar is first prepared and compiled by a separate process, which it may crash.  This
process then compiles what that one returns, without holding the interpreter lock.  Only this
module, `pagedserve.sampling.grammar` and those of that process use llguidance.

Costs: a grammar is compiled in about a millisecond, twice; the first of a tokenizer waits a second
for the vocabulary and the process.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pagedserve.errors import RequestError, extra_needed
from pagedserve.sampling.compile_process import CompileProcess
from pagedserve.sampling.grammar import Grammar, GrammarState
from pagedserve.sampling.schemas import GrammarError
from pagedserve.sampling.sources import PARSER_LIMITS, GrammarKey
from pagedserve.sampling_params.structured_outputs import StructuredOutputsParams
from pagedserve.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# Cached grammars, and their bytes in all: requests of one client mostly share a schema.
_MAX_KEPT: Final = 64
_MAX_KEPT_BYTES: Final = 8 << 20
# Maximum length of an error message, which may repeat much of a grammar.
_MAX_REASON_CHARS: Final = 600


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
    _has_read: bool = False
    # Reason why the tokenizer has no vocabulary that grammars can read.
    _unreadable: GrammarError | None = None
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
                found = self._known(key) or self._compile(key)
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

    def _compile(self, key: GrammarKey) -> Grammar | GrammarError:
        """Compile a grammar, and cache it or its error."""
        found: Grammar | GrammarError
        if not self._has_read:
            self.process.start()  # in parallel with what follows
            self._unreadable = self._read_vocabulary()
            self._has_read = True
        if self._unreadable is not None:
            return self._unreadable
        try:
            found = self._tried(key)
        except GrammarError as fault:
            found = GrammarError(str(fault), fault.place)  # without what tracebacks refer to
        with self._lock:
            self._kept[key] = found
            while len(self._kept) > 1 and self._is_overfull():
                self._kept.popitem(last=False)
        return found

    def _is_overfull(self) -> bool:
        grammars = [found for found in self._kept.values() if isinstance(found, Grammar)]
        num_bytes = sum(grammar.num_bytes for grammar in grammars)
        num_bytes += sum(len(key.definition) for key in self._kept)
        return len(self._kept) > _MAX_KEPT or num_bytes > _MAX_KEPT_BYTES

    def _tried(self, key: GrammarKey) -> Grammar:
        """Compile a grammar that the other process survived.

        Raises:
            GrammarError: It is invalid, with the position.
        """
        from llguidance import LLMatcher, LLParserLimits

        source, num_bytes = self.process.source(key, self._vocabulary)
        limits = LLParserLimits(**PARSER_LIMITS)
        matcher = LLMatcher(self._vocabulary, source, log_level=0, limits=limits)
        start = GrammarState(matcher, self.eos_token_ids, -(-self.vocab_size // 32))
        grammar = Grammar(start, num_bytes)
        if start.fault is not None:
            raise GrammarError(start.fault)
        return grammar

    def _read_vocabulary(self) -> GrammarError | None:
        """Read the tokenizer, without added tokens that the model lacks; return what is wrong."""
        from llguidance import LLTokenizer

        found: Any = getattr(self.tokenizer, "backend_tokenizer", None)
        name = type(self.tokenizer).__name__
        fault = f"the tokenizer, {name}, has no vocabulary that grammars can read"
        if found is None:
            return GrammarError(f"{fault}: accepted are those with a tokenizer.json")
        backend = type(found)(found.model)
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            setattr(backend, part, getattr(found, part))
        added = sorted(found.get_added_tokens_decoder().items())
        backend.add_tokens([token for token_id, token in added if token_id < self.vocab_size])
        eos_token_ids = list(self.eos_token_ids) or self.tokenizer.eos_token_id
        try:
            self._vocabulary = LLTokenizer(
                backend.to_str(), n_vocab=self.vocab_size, eos_token=eos_token_ids
            )
        except ValueError as error:
            return GrammarError(f"{fault}: {error}")
        return None


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
