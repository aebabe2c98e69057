"""``/metrics``: vLLM's classic and newest names side by side, and a few of our own.

Counts of requests are taken when they happen; gauges and the engine's sums are read when somebody
scrapes, so they are right also while no step runs.

Costs: a look into a list of bounds a token, some 0.3 us.
"""

from collections.abc import Iterable
from typing import Final

from prometheus_client import (
    GC_COLLECTOR,
    PLATFORM_COLLECTOR,
    PROCESS_COLLECTOR,
    CollectorRegistry,
    generate_latest,
)
from prometheus_client.core import Metric

from pagedserve.engine.client import EngineClient
from pagedserve.engine.stats import Histogram
from pagedserve.outputs import FinishReason, RequestMetrics, RequestOutput, seconds_between
from pagedserve.sampling_params import SamplingParams
from pagedserve.server.engine_metrics import EngineMetrics
from pagedserve.server.exposition import counter, histogram
from pagedserve.server.http_metrics import HttpMetrics
from pagedserve.server.limits import Admission

# Bounds as vLLM has them: each holds those of its classic and of its newest version.
_FIRST_TOKEN: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 80, 160, 640, 2560),
)
_BETWEEN_TOKENS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1),
    *(2.5, 5, 7.5, 10, 20, 40, 80),
)
_WHOLE: Final = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
# 1, 2, 5, 10, 20, ... up to 500,000.
_TOKENS: Final = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_SEVERAL: Final = (1, 2, 5, 10, 20)
_PREEMPTIONS: Final = (1, 2, 3, 4, 5, 10, 20)
_FINISH_REASONS: Final = ("stop", "length", "abort", "error", "ignored", "repetition")
# Where the tokens of a prompt may come from.
_SOURCES: Final = ("local_compute", "local_cache_hit", "external_kv_transfer")


# Histograms of requests: what each counts, and its bounds.
_HISTOGRAMS: Final[dict[str, tuple[str, tuple[float, ...]]]] = {
    "time_to_first_token_seconds": ("Arrival to first token.", _FIRST_TOKEN),
    "inter_token_latency_seconds": ("Between the tokens of a sequence.", _BETWEEN_TOKENS),
    "request_time_per_output_token_seconds": (
        "First to last token, a token after the first.",
        _BETWEEN_TOKENS,
    ),
    "e2e_request_latency_seconds": ("Arrival to end.", _WHOLE),
    "request_queue_time_seconds": ("Arrival to first step.", _WHOLE),
    "request_inference_time_seconds": ("First step to end.", _WHOLE),
    "request_prefill_time_seconds": ("First step to first token.", _WHOLE),
    "request_decode_time_seconds": ("First token to end.", _WHOLE),
    "request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS),
    "request_prefill_kv_computed_tokens": (
        "Prompt tokens of a request that the prefix cache did not have.",
        _TOKENS,
    ),
    "request_generation_tokens": ("New tokens of a request.", _TOKENS),
    "request_max_num_generation_tokens": ("New tokens of an output.", _TOKENS),
    "request_params_max_tokens": ("max_tokens.", _TOKENS),
    "request_params_n": ("n.", _SEVERAL),
    "request_params_best_of": ("best_of.", _SEVERAL),
    "request_num_preemptions": ("How often a request gave its place away.", _PREEMPTIONS),
}
# Names that one histogram has besides its own.
_CLASSIC_NAMES: Final = {"inter_token_latency_seconds": "time_per_output_token_seconds"}


class Metrics:
    """What is measured of requests, and what the engine says when somebody scrapes.

    Attributes:
        http: What is measured of requests over HTTP.
    """

    def __init__(self, client: EngineClient, model_name: str, admission: Admission) -> None:
        """Begin to count.

        Args:
            client: Says how the engine is.
            model_name: The label of everything.
            admission: Knows who was refused.
        """
        self.http = HttpMetrics()
        self._admission = admission
        self._labels = {"model_name": model_name, "engine": "0"}
        self._engine = EngineMetrics(client, self._labels)
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._finished = dict.fromkeys(_FINISH_REASONS, 0)
        self._prompt_tokens = dict.fromkeys(_SOURCES, 0)
        self._registry = CollectorRegistry()
        for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
            self._registry.register(collector)
        self._registry.register(self)

    def first_token_came(self, output: RequestOutput) -> None:
        """Count the first output of a prompt."""
        seconds = output.metrics.time_to_first_token
        if seconds is None:
            return
        self._histograms["time_to_first_token_seconds"].observe(seconds)
        self._count_prompt_tokens(output)

    def _count_prompt_tokens(self, output: RequestOutput) -> None:
        num_cached = output.num_cached_tokens or 0
        self._prompt_tokens["local_cache_hit"] += num_cached
        self._prompt_tokens["local_compute"] += len(output.prompt_token_ids) - num_cached

    def tokens_came(self, seconds: float, num_tokens: int) -> None:
        """Count tokens of a sequence that came so long after those before."""
        self._histograms["inter_token_latency_seconds"].observe(seconds / max(1, num_tokens))

    def prompt_finished(
        self, params: SamplingParams, output: RequestOutput, num_generated: int
    ) -> None:
        """Count a prompt that has been answered.

        Args:
            params: Its parameters.
            output: Its last output.
            num_generated: New tokens of all its outputs.
        """
        for completion in output.outputs:
            self._finished[completion.finish_reason or "abort"] += 1
        counted: dict[str, float | None] = {
            "request_generation_tokens": num_generated,
            "request_max_num_generation_tokens": num_generated / max(1, len(output.outputs)),
            "request_params_max_tokens": params.max_tokens,
            "request_params_n": params.n,
            "request_params_best_of": params.max_num_running_seqs,
            **_of_any(output),
        }
        if params.max_num_running_seqs == 1:
            seconds = output.metrics.time_per_output_token(num_generated)
            counted["request_time_per_output_token_seconds"] = seconds
        self._observe(counted)

    def prompt_pooled(self, output: RequestOutput, reason: FinishReason) -> None:
        """Count a prompt that was pooled, or ended without that.

        Args:
            output: Its only output.
            reason: Why it ended.
        """
        self._finished[reason] += 1
        self._count_prompt_tokens(output)
        self._observe(_of_any(output))

    def prompts_ended(self, reason: str, number: int) -> None:
        """Count prompts that ended without an answer."""
        self._finished[reason] += number

    def exposition(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """All metrics but those of the process."""
        for name, counted in self._histograms.items():
            text = _HISTOGRAMS[name][0]
            for shown in filter(None, (name, _CLASSIC_NAMES.get(name))):
                yield histogram(f"vllm:{shown}", text, (self._labels, counted))
        yield self._by("request_success", "Outputs that ended.", "finished_reason", self._finished)
        yield self._by(
            "prompt_tokens_by_source", "Tokens of prompts.", "source", self._prompt_tokens
        )
        refused = self._admission.num_refused
        yield self._by("admission_rejections", "Requests that were refused.", "reason", refused)
        yield from self.http.collect()
        yield from self._engine.collect()

    def _observe(self, counted: dict[str, float | None]) -> None:
        for name, value in counted.items():
            if value is not None:
                self._histograms[name].observe(value)

    def _by(self, name: str, text: str, label: str, counts: dict[str, int]) -> Metric:
        """A counter whose parts have a label."""
        samples = (({**self._labels, label: part}, count) for part, count in counts.items())
        return counter(f"vllm:{name}", text, *samples)


def _of_any(output: RequestOutput) -> dict[str, float | None]:
    """What is counted of every request that ended, by its last output."""
    num_prompt_tokens = len(output.prompt_token_ids)
    return {
        "request_prompt_tokens": num_prompt_tokens,
        "request_prefill_kv_computed_tokens": num_prompt_tokens - (output.num_cached_tokens or 0),
        "request_num_preemptions": output.metrics.num_preemptions,
        **_times(output.metrics),
    }


def _times(metrics: RequestMetrics) -> dict[str, float | None]:
    """How long the parts of a request's life were; None for what did not happen."""
    whole = seconds_between(metrics.arrival_time, metrics.finished_time)
    return {
        "e2e_request_latency_seconds": whole,
        "request_queue_time_seconds": metrics.time_in_queue,
        "request_inference_time_seconds": metrics.inference_time,
        "request_prefill_time_seconds": metrics.prefill_time,
        "request_decode_time_seconds": metrics.decode_time,
    }
