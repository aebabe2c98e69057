"""``/metrics``: vLLM's classic and newest names side by side, and a few of our own.

Counts of requests are taken when they happen; gauges and the engine's sums are read when somebody
scrapes, so they are right also while no step runs.

Costs: a look into a list of bounds a token, some 0.3 us.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import (
    GC_COLLECTOR,
    PLATFORM_COLLECTOR,
    PROCESS_COLLECTOR,
    CollectorRegistry,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from pagedserve.engine.client import EngineClient
from pagedserve.engine.stats import EngineSnapshot, Histogram
from pagedserve.outputs import RequestMetrics, RequestOutput, seconds_between
from pagedserve.sampling_params import SamplingParams
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


def _family(name: str, text: str, histogram: Histogram, labels: dict[str, str]) -> Metric:
    """A histogram as it is exposed."""
    family = HistogramMetricFamily(name, text, labels=list(labels))
    buckets, sum_so_far = [], 0
    for bound, count in zip((*histogram.bounds, None), histogram.counts, strict=True):
        sum_so_far += count
        buckets.append(("+Inf" if bound is None else str(float(bound)), sum_so_far))
    family.add_metric(list(labels.values()), buckets, histogram.total)
    return family


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
    """What is measured of requests, and what the engine says when somebody scrapes."""

    def __init__(self, client: EngineClient, model_name: str, admission: Admission) -> None:
        """Begin to count.

        Args:
            client: Says how the engine is.
            model_name: The label of everything.
            admission: Knows who was refused.
        """
        self._client = client
        self._admission = admission
        self._labels = {"model_name": model_name, "engine": "0"}
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._finished = dict.fromkeys(_FINISH_REASONS, 0)
        self._registry = CollectorRegistry()
        for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
            self._registry.register(collector)
        self._registry.register(self)

    def first_token_came(self, seconds: float) -> None:
        """Count the first output of a prompt, so long after the request came."""
        self._histograms["time_to_first_token_seconds"].observe(seconds)

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
            "request_prompt_tokens": len(output.prompt_token_ids),
            "request_generation_tokens": num_generated,
            "request_max_num_generation_tokens": num_generated / max(1, len(output.outputs)),
            "request_params_max_tokens": params.max_tokens,
            "request_params_n": params.n,
            "request_params_best_of": params.max_num_running_seqs,
            "request_num_preemptions": output.metrics.num_preemptions,
            **_times(output.metrics),
        }
        if num_generated > 1 and params.max_num_running_seqs == 1:
            seconds = seconds_between(
                output.metrics.first_token_time, output.metrics.last_token_time
            )
            if seconds is not None:
                counted["request_time_per_output_token_seconds"] = seconds / (num_generated - 1)
        for name, value in counted.items():
            if value is not None:
                self._histograms[name].observe(value)

    def prompts_ended(self, reason: str, number: int) -> None:
        """Count prompts that ended without an answer."""
        self._finished[reason] += number

    def exposition(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """All metrics but those of the process."""
        for name, histogram in self._histograms.items():
            text = _HISTOGRAMS[name][0]
            for shown in filter(None, (name, _CLASSIC_NAMES.get(name))):
                yield _family(f"vllm:{shown}", text, histogram, self._labels)
        finished = CounterMetricFamily(
            "vllm:request_success",
            "Outputs that ended, by reason.",
            labels=[*self._labels, "finished_reason"],
        )
        for reason, count in self._finished.items():
            finished.add_metric([*self._labels.values(), reason], count)
        yield finished
        refused = CounterMetricFamily(
            "vllm:admission_rejections",
            "Requests that were refused.",
            labels=[*self._labels, "reason"],
        )
        values = [*self._labels.values(), "max_num_queued_reqs"]
        refused.add_metric(values, self._admission.num_refused)
        yield refused
        if self._client.is_running:
            yield from self._of_engine(self._client.snapshot())

    def _of_engine(self, engine: EngineSnapshot) -> Iterator[Metric]:
        yield _family(
            "vllm:iteration_tokens_total",
            "Tokens of a step.",
            engine.stats.step_tokens,
            self._labels,
        )
        looked_up = engine.num_looked_up_tokens
        hit_rate = engine.num_cached_tokens / looked_up if looked_up else -1.0
        gauges: dict[str, tuple[str, float]] = {
            "vllm:num_requests_running": ("Requests that run.", engine.num_running),
            "vllm:num_requests_waiting": ("Requests that wait.", engine.num_waiting),
            "vllm:num_requests_swapped": ("Requests in host memory.", engine.num_swapped),
            "vllm:gpu_cache_usage_perc": ("Share of KV blocks in use.", engine.gpu_cache_usage),
            "vllm:kv_cache_usage_perc": ("Share of KV blocks in use.", engine.gpu_cache_usage),
            "vllm:cpu_cache_usage_perc": ("Share of host blocks in use.", engine.cpu_cache_usage),
            "vllm:gpu_prefix_cache_hit_rate": ("Share of tokens found.", hit_rate),
            "pagedserve:seconds_since_step": (
                "How long requests have waited without the end of a step.",
                engine.seconds_without_progress,
            ),
        }
        counters: dict[str, tuple[str, float]] = {
            "vllm:num_preemptions": ("Preemptions.", engine.num_preemptions),
            "vllm:prompt_tokens": ("Prompt tokens taken up.", engine.stats.num_prompt_tokens),
            "vllm:generation_tokens": ("New tokens.", engine.stats.num_generation_tokens),
            "vllm:prefix_cache_queries": ("Tokens looked up in the prefix cache.", looked_up),
            "vllm:prefix_cache_hits": ("Tokens that it had.", engine.num_cached_tokens),
            "vllm:prompt_tokens_cached": ("Tokens that it had.", engine.num_cached_tokens),
            "pagedserve:recomputed_tokens": (
                "Tokens that were computed and given up.",
                engine.num_recomputed_tokens,
            ),
            "pagedserve:steps": ("Steps of the engine.", engine.stats.num_steps),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=list(self._labels))
            gauge.add_metric(list(self._labels.values()), value)
            yield gauge
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(name, text, labels=list(self._labels))
            counter.add_metric(list(self._labels.values()), value)
            yield counter


def _times(metrics: RequestMetrics) -> dict[str, float | None]:
    """How long the parts of a request's life were; None for what did not happen."""
    first, end = metrics.first_scheduled_time, metrics.finished_time
    return {
        "e2e_request_latency_seconds": seconds_between(metrics.arrival_time, end),
        "request_queue_time_seconds": metrics.time_in_queue,
        "request_inference_time_seconds": seconds_between(first, end),
        "request_prefill_time_seconds": seconds_between(first, metrics.first_token_time),
        "request_decode_time_seconds": seconds_between(metrics.first_token_time, end),
    }
