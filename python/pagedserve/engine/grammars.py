"""Grammars of requests: compiled, and checked against other parameters."""

import threading
from typing import TYPE_CHECKING

from pagedserve.errors import RequestError
from pagedserve.executor.protocol import ModelInfo
from pagedserve.sampling.grammar import Grammar, GrammarStates
from pagedserve.sampling_params import SamplingParams
from pagedserve.sampling_params.structured_outputs import StructuredOutputsParams
from pagedserve.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pagedserve.sampling.grammar_compiler import GrammarCompiler


class LazyGrammarCompiler:
    """A grammar compiler that is imported and created for the first grammar; thread-safe."""

    def __init__(self, tokenizer: Tokenizer, model: ModelInfo) -> None:
        """Compile grammars for a tokenizer and a model."""
        self._tokenizer, self._model = tokenizer, model
        self._made: GrammarCompiler | None = None
        self._has_ended = False
        self._lock = threading.Lock()

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Compile a grammar; see `pagedserve.sampling.grammar_compiler.GrammarCompiler`."""
        return self._compiler().compile(params)

    def knows(self, params: StructuredOutputsParams) -> bool:
        """Whether a grammar is cached."""
        return self._made is not None and self._made.knows(params)

    def end(self) -> None:
        """End the compiler; new grammars are refused from now on."""
        with self._lock:
            self._has_ended = True
            if self._made is not None:
                self._made.end()

    def _compiler(self) -> "GrammarCompiler":
        from pagedserve.sampling.grammar_compiler import GrammarCompiler

        with self._lock:
            if self._made is None:
                model = self._model
                self._made = GrammarCompiler(self._tokenizer, model.vocab_size, model.eos_token_ids)
                if self._has_ended:
                    self._made.end()
            return self._made


def grammar_of(
    params: SamplingParams, grammars: LazyGrammarCompiler, *, num_drafts: int
) -> GrammarStates | None:
    """Compile the grammar of a request; None without structured outputs.

    Args:
        params: Sampling parameters.
        grammars: Compiles it.
        num_drafts: Maximum draft tokens per step.

    Raises:
        RequestError: The grammar is invalid, or no token can start a text.
    """
    must_be = params.structured_outputs
    if must_be is None:
        return None
    grammar = grammars.compile(must_be)
    allowed = params.allowed_token_ids
    if allowed is not None and not grammar.can_begin_with(allowed):
        raise RequestError(
            f"allowed_token_ids has none of the tokens that a text of {must_be.named} may begin "
            "with; it must have one",
            param="allowed_token_ids",
        )
    # Those of the newest sequences, and of those after and before a fork.
    num_seqs = params.max_num_running_seqs
    num_states = 1 if num_seqs == 1 and not num_drafts else num_seqs * (2 + num_drafts)
    return grammar.states(num_states)
