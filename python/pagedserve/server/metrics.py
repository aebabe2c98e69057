"""``/metrics``: vLLM's classic and newest names side by side, and a few of our own.

Counts of requests are taken when they happen; gauges and the engine's sums are read when somebody
scrapes, so they are right also while no step runs.

Costs: a look into a list of bounds a token, some 0.3 us.
"""

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
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
from pagedserve.engine.stats import EngineSnapshot
from pagedserve.outputs import RequestOutput
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


@dataclass(slots=True)
class Histogram:
    """Counts by size; the last count is of what is above all bounds."""

    name: str
    text: str
    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        """Begin with nothing."""
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float | None) -> None:
        """Count a value; None is no value."""
        if value is not None:
            self.counts[bisect_left(self.bounds, value)] += 1
            self.total += value

    def family(self, names: list[str], labels: list[str]) -> Metric:
        """The metric as it is exposed."""
        family = HistogramMetricFamily(self.name, self.text, labels=names)
        buckets, sum_so_far = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            sum_so_far += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), sum_so_far))
        family.add_metric(labels, buckets, self.total)
        return family


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
        self._label_names = ["model_name", "engine"]
        self._labels = [model_name, "0"]
        self._admission = admission

        def histogram(name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", text, bounds)

        self._first_token = histogram(
            "time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN
        )
        self._between = histogram(
            "inter_token_latency_seconds", "Between the tokens of a sequence.", _BETWEEN_TOKENS
        )
        self._per_token = histogram(
            "request_time_per_output_token_seconds",
            "First to last token, a token after the first.",
            _BETWEEN_TOKENS,
        )
        self._whole = histogram("e2e_request_latency_seconds", "Arrival to end.", _WHOLE)
        self._queue = histogram("request_queue_time_seconds", "Arrival to first step.", _WHOLE)
        self._inference = histogram("request_inference_time_seconds", "First step to end.", _WHOLE)
        self._prefill = histogram(
            "request_prefill_time_seconds", "First step to first token.", _WHOLE
        )
        self._decode = histogram("request_decode_time_seconds", "First token to end.", _WHOLE)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._generated = histogram(
            "request_generation_tokens", "New tokens of a request.", _TOKENS
        )
        self._most_generated = histogram(
            "request_max_num_generation_tokens", "New tokens of its longest output.", _TOKENS
        )
        self._max_tokens = histogram("request_params_max_tokens", "max_tokens.", _TOKENS)
        self._n = histogram("request_params_n", "n.", _SEVERAL)
        self._best_of = histogram("request_params_best_of", "best_of.", _SEVERAL)
        self._preemptions = histogram(
            "request_num_preemptions", "How often a request gave its place away.", _PREEMPTIONS
        )
        self._histograms = [value for value in vars(self).values() if isinstance(value, Histogram)]
        self._finished = dict.fromkeys(_FINISH_REASONS, 0)
        self._registry = CollectorRegistry()
        for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
            self._registry.register(collector)
        self._registry.register(self)

    def first_token_came(self, seconds: float) -> None:
        """Count the first output of a prompt, so long after the request came."""
        self._first_token.observe(seconds)

    def tokens_came(self, seconds: float, num_tokens: int) -> None:
        """Count tokens of a sequence that came so long after those before."""
        self._between.observe(seconds / max(1, num_tokens))

    def prompt_finished(
        self, params: SamplingParams, output: RequestOutput, num_generated: int
    ) -> None:
        """Count a prompt that has been answered.

        Args:
            params: Its parameters.
            output: Its last output.
            num_generated: New tokens of all its outputs.
        """
        metrics, end = output.metrics, output.metrics.finished_time or time.time()
        for completion in output.outputs:
            self._finished[completion.finish_reason or "abort"] += 1
        self._whole.observe(end - metrics.arrival_time)
        self._queue.observe(metrics.time_in_queue)
        if metrics.first_scheduled_time is not None:
            self._inference.observe(end - metrics.first_scheduled_time)
            if metrics.first_token_time is not None:
                self._prefill.observe(metrics.first_token_time - metrics.first_scheduled_time)
                self._decode.observe(end - metrics.first_token_time)
                if num_generated > 1 and params.max_num_running_seqs == 1:
                    seconds = (metrics.last_token_time or end) - metrics.first_token_time
                    self._per_token.observe(seconds / (num_generated - 1))
        self._prompt.observe(len(output.prompt_token_ids))
        self._generated.observe(num_generated)
        self._most_generated.observe(num_generated / max(1, len(output.outputs)))
        self._max_tokens.observe(params.max_tokens)
        self._n.observe(params.n)
        self._best_of.observe(params.max_num_running_seqs)
        self._preemptions.observe(metrics.num_preemptions)

    def prompts_left(self, number: int) -> None:
        """Count prompts whose client has left."""
        self._finished["abort"] += number

    def exposition(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """All metrics but those of the process."""
        for histogram in self._histograms:
            yield histogram.family(self._label_names, self._labels)
        # The classic name of the time between tokens.
        classic = Histogram(
            "vllm:time_per_output_token_seconds", self._between.text, self._between.bounds
        )
        classic.counts, classic.total = self._between.counts, self._between.total
        yield classic.family(self._label_names, self._labels)
        finished = CounterMetricFamily(
            "vllm:request_success",
            "Outputs that ended, by reason.",
            labels=[*self._label_names, "finished_reason"],
        )
        for reason, count in self._finished.items():
            finished.add_metric([*self._labels, reason], count)
        yield finished
        refused = CounterMetricFamily(
            "vllm:admission_rejections",
            "Requests that were refused.",
            labels=[*self._label_names, "reason"],
        )
        refused.add_metric([*self._labels, "max_num_queued_reqs"], self._admission.num_refused)
        yield refused
        if self._client.is_running:
            yield from self._of_engine(self._client.snapshot())

    def _of_engine(self, engine: EngineSnapshot) -> Iterator[Metric]:
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
            gauge = GaugeMetricFamily(name, text, labels=self._label_names)
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(name, text, labels=self._label_names)
            counter.add_metric(self._labels, value)
            yield counter
