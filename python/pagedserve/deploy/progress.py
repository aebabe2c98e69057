"""Progress of a request, and the requests that resume it on another replica.

A request for several completions resumes as one request for each unfinished completion, since their
tokens differ.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TypeAlias

from pagedserve.deploy.replica import ReplicaRequest
from pagedserve.engine.client import merge_streams
from pagedserve.outputs import RequestOutput
from pagedserve.pooling_params import PoolingParams
from pagedserve.sampling_params import RequestOutputKind, SamplingParams

Params: TypeAlias = SamplingParams | PoolingParams | None


class Progress:
    """Completions of one request, as far as generated.

    Attributes:
        requests: Requests for another replica: the request after its output so far; or one per
            unfinished completion, by its index.
        unfinished: Indices of the completions without a last output.
        has_several: Whether it is for several completions.
        is_known: Whether all output is known, so that the request can be resumed.
    """

    def __init__(self, request: ReplicaRequest) -> None:
        """Start without output."""
        params = request.params
        self.requests = {0: request}
        self.unfinished = set(range(params.n if isinstance(params, SamplingParams) else 1))
        self.is_known = True
        self.has_several = self._is_delta = False
        if not isinstance(params, SamplingParams) or _comes_whole(params):
            return
        self._is_delta = params.output_kind is RequestOutputKind.DELTA
        self.has_several = params.n > 1
        self.is_known = self._is_delta or (params.n == 1 and params.prompt_logprobs is None)
        if self.has_several:
            self.requests = {index: _text(request, params, index) for index in range(params.n)}

    def add(self, output: RequestOutput) -> None:
        """Add an output."""
        self.unfinished -= {part.index for part in output.outputs if part.finished()}
        if output.finished or not self.is_known:
            return
        for completion in output.outputs:
            request = self.requests[completion.index]
            before = request.output_token_ids if self._is_delta else ()
            token_ids = (*before, *completion.token_ids)
            self.requests[completion.index] = replace(
                request, params=_continued(request.params), output_token_ids=token_ids
            )
            if completion.finished():
                del self.requests[completion.index]


def _comes_whole(params: SamplingParams) -> bool:
    """Whether there are no outputs before the end."""
    is_wanted = params.output_kind is not RequestOutputKind.FINAL_ONLY
    return not is_wanted or params.use_beam_search or params.chooses_best


def _continued(params: Params) -> Params:
    """Parameters after the first delta, which had the log-probabilities of the prompt."""
    if isinstance(params, SamplingParams) and params.prompt_logprobs is not None:
        params = params.clone()
        params.prompt_logprobs = None
    return params


def _text(request: ReplicaRequest, params: SamplingParams, index: int) -> ReplicaRequest:
    """A request for one of several completions."""
    params = params.clone()
    params.n, params.best_of = 1, None
    request_id = f"{request.request_id}-{index}"
    draws = request.draws._replace(choice=index)
    return replace(request, params=params, request_id=request_id, draws=draws)


async def merged(
    request_id: str,
    parts: Mapping[str, int],
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[RequestOutput, None]:
    """Merge the outputs of one request per completion into those of one request.

    Args:
        request_id: Id of that request.
        parts: Index of the completion of each request, by its id.
        streams: Outputs of each.
    """
    num_left = len(streams)
    async with aclosing(merge_streams(streams)) as outputs:
        async for output in outputs:
            num_left -= output.finished
            for completion in output.outputs:
                completion.index = parts[output.request_id]
            output.request_id, output.finished = request_id, num_left == 0
            yield output
