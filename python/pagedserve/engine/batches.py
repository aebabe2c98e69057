"""``Batches``: runs the requests of one ``LLM`` call to completion."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, TypeAlias

from pagedserve.engine.llm_engine import LLMEngine
from pagedserve.engine.request import Request
from pagedserve.engine.request_metrics import RequestCounts
from pagedserve.engine.stats import StatsLine
from pagedserve.errors import ConcurrentCallError, extra_needed
from pagedserve.models.load.progress import are_bars_shown, progress_shown
from pagedserve.outputs import RequestOutput
from pagedserve.pooling_params import PoolingParams
from pagedserve.vllm_names import AbsentPoolingArguments

# Whether a progress bar is shown, or a callable that creates it.
UseTqdm: TypeAlias = bool | Callable[..., Any]


class PoolingOptions(AbsentPoolingArguments, total=False):
    """Options of the methods of ``LLM`` that pool; see ``LLM.encode``."""

    pooling_params: PoolingParams | Sequence[PoolingParams] | None
    truncate_prompt_tokens: int | None
    use_tqdm: UseTqdm


# Seconds between two updates of the engine's statistics.
_STATS_INTERVAL: Final = 2.0


class Batches:
    """Runs requests in an engine that has no others.

    Attributes:
        counts: Metrics of the requests, updated when a batch ends.
    """

    def __init__(self, engine: LLMEngine, counts: RequestCounts) -> None:
        """Store the engine and its request metrics."""
        self._engine = engine
        self.counts = counts
        # Requests of the current batch, or of one whose abort was interrupted.
        self._request_ids: list[str] = []

    def run(self, requests: list[Request], *, use_tqdm: UseTqdm) -> list[RequestOutput]:
        """Run requests to completion; after an exception all of them are aborted.

        Args:
            requests: Requests of the batch.
            use_tqdm: Whether a progress bar is shown, or a callable that creates it.

        Returns:
            Outputs in the order of the requests.

        Raises:
            ConcurrentCallError: The engine has requests of other callers, or another caller took
                the outputs.
        """
        if self._request_ids:
            self._engine.abort_request(self._request_ids)
        if num_others := self._engine.get_num_unfinished_requests():
            raise ConcurrentCallError(
                f"llm_engine has {num_others} unfinished requests of add_request, whose outputs "
                "would be lost: call llm_engine.step until they have ended, or abort_request"
            )
        self._request_ids = [request.request_id for request in requests]
        try:
            outputs = self._run(requests, use_tqdm=use_tqdm)
        except BaseException:
            self._engine.abort_request(self._request_ids)
            raise
        self._request_ids = []
        for request, output in zip(requests, outputs, strict=True):
            self._count(request, output)
        return outputs

    def _count(self, request: Request, output: RequestOutput) -> None:
        if output.pooled is not None:
            self.counts.prompt_pooled(output, "stop")
            return
        self.counts.first_token_came(output)
        num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
        self.counts.prompt_finished(request.params, output, num_tokens)

    def _run(self, requests: list[Request], *, use_tqdm: UseTqdm) -> list[RequestOutput]:
        engine = self._engine
        for request in requests:
            engine.add(request)
        finished: dict[str, RequestOutput | None] = dict.fromkeys(self._request_ids)
        num_left, line = len(requests), StatsLine()
        with _progress(len(requests), use_tqdm=use_tqdm) as progress:
            while num_left:
                if not engine.has_unfinished_requests():
                    raise ConcurrentCallError(
                        f"the outputs of {num_left} requests went to another caller of "
                        "llm_engine.step or llm_engine.abort_request: leave llm_engine alone "
                        "while LLM is called"
                    )
                outputs = [out for out in engine.step() if out.request_id in finished]
                finished |= {output.request_id: output for output in outputs}
                num_left -= len(outputs)
                if outputs:
                    progress.update(len(outputs))
                if use_tqdm and line.age() > _STATS_INTERVAL:
                    progress.set_postfix_str(engine.stats_line(line))
        return [output for output in finished.values() if output is not None]


def _progress(num_requests: int, *, use_tqdm: UseTqdm) -> Any:  # tqdm has no types
    if callable(use_tqdm):
        return use_tqdm(total=num_requests, desc="prompts", dynamic_ncols=True)
    with progress_shown(is_shown=use_tqdm):
        if not are_bars_shown():
            return _HiddenBar()
        with extra_needed("a progress bar", "cpu"):
            from pagedserve.models.load.bars import Bar
        return Bar(total=num_requests, desc="prompts")


class _HiddenBar(AbstractContextManager["_HiddenBar"]):
    """Methods of a bar that is not shown."""

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def update(self, num_done: int) -> None:
        """Do nothing."""

    def set_postfix_str(self, text: str) -> None:
        """Do nothing."""
