"""What has come of a request, and what is to be asked of another replica behind it.

A request for several texts goes on as a request for each of those that have not ended: they differ
in their tokens, and so have nothing in common any more but the prompt.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

from pagedserve.deploy.replica import ReplicaRequest
from pagedserve.outputs import RequestOutput
from pagedserve.sampling_params import RequestOutputKind, SamplingParams


class Progress:
    """The texts of one request, as far as they have come.

    Attributes:
        requests: What another replica is to be asked for: the request, behind what has come of it;
            or one for each of several texts, by its index, without those that have ended.
        has_several: Whether it is for several texts.
        is_known: Whether all that is so; otherwise what has come cannot be gone on behind.
    """

    def __init__(self, request: ReplicaRequest) -> None:
        """Nothing has come."""
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
        """Take in what has come."""
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
    """Whether nothing comes before the end: the answer is not known, or not wanted, before."""
    is_wanted = params.output_kind is not RequestOutputKind.FINAL_ONLY
    return not is_wanted or params.use_beam_search or params.chooses_best


def _text(request: ReplicaRequest, params: SamplingParams, index: int) -> ReplicaRequest:
    """A request for one text of several."""
    params = params.clone()
    params.n, params.best_of = 1, None
    request_id = f"{request.request_id}-{index}"
    return replace(request, params=params, request_id=request_id, choice=index)


async def merged(
    request_id: str, texts: Mapping[int, AsyncGenerator[RequestOutput, None]]
) -> AsyncGenerator[RequestOutput, None]:
    """The outputs of requests for one text each, by its index, as those of one for all."""
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
