"""Progress of a request, and the requests that resume it on another replica.

A request for several completions resumes as one request for each unfinished completion, since their
tokens differ.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

from pagedserve.deploy.replica import ReplicaRequest
from pagedserve.outputs import RequestOutput
from pagedserve.sampling_params import RequestOutputKind, SamplingParams


class Progress:
    """Completions of one request, as far as generated.

    Attributes:
        requests: Requests for another replica: the request after its output so far; or one per
            unfinished completion, by its index.
        has_several: Whether it is for several completions.
        is_known: Whether all output is known, so that the request can be resumed.
    """

    def __init__(self, request: ReplicaRequest) -> None:
        """Start without output."""
        params = request.params
        self.requests = {0: request}
        self.is_known = True
        self.has_several = self._is_delta = False
        if not isinstance(params, SamplingParams) or _comes_whole(params):
            return
        self._is_delta = params.output_kind is RequestOutputKind.DELTA
        self.has_several = params.n > 1
        self.is_known = params.prompt_logprobs is None and (params.n == 1 or self._is_delta)
        if self.has_several:
            self.requests = {index: _text(request, params, index) for index in range(params.n)}

    def add(self, output: RequestOutput) -> None:
        """Add an output."""
        if output.finished or not self.is_known:
            return
        for completion in output.outputs:
            request = self.requests[completion.index]
            before = request.output_token_ids if self._is_delta else ()
            token_ids = (*before, *completion.token_ids)
            self.requests[completion.index] = replace(request, output_token_ids=token_ids)
            if completion.finished():
                del self.requests[completion.index]


def _comes_whole(params: SamplingParams) -> bool:
    """Whether there are no outputs before the end."""
    is_wanted = params.output_kind is not RequestOutputKind.FINAL_ONLY
    return not is_wanted or params.use_beam_search or params.chooses_best


def _text(request: ReplicaRequest, params: SamplingParams, index: int) -> ReplicaRequest:
    """A request for one of several completions."""
    params = params.clone()
    params.n, params.best_of = 1, None
    request_id = f"{request.request_id}-{index}"
    return replace(request, params=params, request_id=request_id, choice=index)


async def merged(
    request_id: str, texts: Mapping[int, AsyncGenerator[RequestOutput, None]]
) -> AsyncGenerator[RequestOutput, None]:
    """Merge the outputs of one request per completion, by index, into those of one request."""
    async with AsyncExitStack() as stack:
        for outputs in texts.values():
            await stack.enter_async_context(aclosing(outputs))
        coming = {asyncio.ensure_future(anext(outputs)): index for index, outputs in texts.items()}
        try:
            while coming:
                there, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
                for task in there:
                    index, output = coming.pop(task), task.result()
                    if not output.finished:
                        coming[asyncio.ensure_future(anext(texts[index]))] = index
                    for completion in output.outputs:
                        completion.index = index
                    output.request_id, output.finished = request_id, not coming
                    yield output
        finally:
            for task in coming:
                task.cancel()
            await asyncio.gather(*coming, return_exceptions=True)
