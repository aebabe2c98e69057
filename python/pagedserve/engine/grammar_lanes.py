"""Compilation of grammars beside an event loop."""

from functools import partial

from pagedserve.engine.grammars import LazyGrammarCompiler
from pagedserve.engine.lanes import Lanes
from pagedserve.sampling_params import SamplingParams


class GrammarLanes:
    """Compiles grammars without blocking an event loop or requests without grammars."""

    def __init__(self) -> None:
        """Prepare; threads start with their first grammar."""
        self._lanes = Lanes("pagedserve-grammar")

    async def wait(self, params: object, grammars: LazyGrammarCompiler, group: object) -> None:
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
