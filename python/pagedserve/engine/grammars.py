"""Grammars of requests: compiled, and checked against other parameters."""

from functools import partial

from pagedserve.engine.lanes import Lanes
from pagedserve.errors import RequestError
from pagedserve.sampling.grammar import Grammar, GrammarCompiler
from pagedserve.sampling_params import SamplingParams


def grammar_of(params: SamplingParams, grammars: GrammarCompiler) -> Grammar | None:
    """Compile the grammar of a request; None without structured outputs.

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
    return grammar


class GrammarLanes:
    """Compiles grammars without blocking an event loop or requests without grammars."""

    def __init__(self) -> None:
        """Prepare; threads start with their first grammar."""
        self._lanes = Lanes("pagedserve-grammar")

    async def wait(self, params: object, grammars: GrammarCompiler, group: object) -> None:
        """Compile the grammar of a request, if it is new.

        Args:
            params: Sampling parameters of the request.
            grammars: Compiler.
            group: The request; requests take turns with their grammars.

        Raises:
            RequestError: The grammar is invalid.
        """
        must_be = params.structured_outputs if isinstance(params, SamplingParams) else None
        if must_be is None or grammars.knows(must_be):
            return
        compiled = partial(grammars.compile, must_be)
        await self._lanes.run(compiled, cost=len(must_be.definition), group=group)

    def shutdown(self) -> None:
        """Cancel waiting compilations; a running one completes."""
        self._lanes.shutdown()
