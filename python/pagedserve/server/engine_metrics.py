"""What the engine says when somebody scrapes; right also while no step runs."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeAlias

from prometheus_client.core import Metric

from pagedserve.engine.client import EngineClient
from pagedserve.engine.stats import EngineSnapshot, EngineStats, Histogram, Throughput
from pagedserve.server.exposition import Labels, counter, gauge, histogram

_NUM_WAITING: Final = "Requests that wait."
_CACHE_USAGE: Final = "Share of KV blocks in use."
_CACHED_TOKENS: Final = "Tokens that the prefix cache had."

# Of each replica: what it is, and where the engine says it.
_Value: TypeAlias = Callable[[EngineSnapshot], float]
_REPLICA_GAUGES: Final[dict[str, tuple[str, _Value]]] = {
    "requests_running": ("Requests that run on a replica.", lambda engine: engine.num_running),
    "requests_waiting": ("Requests that wait on a replica.", lambda engine: engine.num_waiting),
    "kv_cache_usage": (_CACHE_USAGE, lambda engine: engine.gpu_cache_usage),
    "seconds_since_step": (
        "How long requests have waited without the end of a step of a replica.",
        lambda engine: engine.seconds_without_progress,
    ),
}
_REPLICA_COUNTERS: Final[dict[str, tuple[str, _Value]]] = {
    "prompt_tokens": (
        "Prompt tokens that a replica has taken up.",
        lambda engine: engine.stats.num_prompt_tokens,
    ),
    "generation_tokens": (
        "New tokens of a replica.",
        lambda engine: engine.stats.num_generation_tokens,
    ),
    "prefix_cache_queries": (
        "Tokens looked up in a replica's prefix cache.",
        lambda engine: engine.num_looked_up_tokens,
    ),
    "prefix_cache_hits": (_CACHED_TOKENS, lambda engine: engine.num_cached_tokens),
    "preemptions": ("Preemptions of a replica.", lambda engine: engine.num_preemptions),
}


class EngineMetrics:
    """Gauges and sums of an engine."""

    def __init__(self, client: EngineClient, labels: Labels) -> None:
        """Begin to measure.

        Args:
            client: Says how the engine is.
            labels: Of everything.
        """
        self._client = client
        self._labels = labels
        self._throughput = Throughput()

    def collect(self) -> Iterator[Metric]:
        """The metrics; none before the engine is made."""
        if self._client.is_running:
            engine = self._client.snapshot()
            yield from self._gauges(engine)
            yield from self._counters(engine)
            yield from self._histograms(engine)
            if engine.replicas:
                yield from self._by_replica(engine.replicas)

    def _gauges(self, engine: EngineSnapshot) -> Iterator[Metric]:
        looked_up = engine.num_looked_up_tokens
        hit_rate = engine.num_cached_tokens / looked_up if looked_up else -1.0
        prompt_rate, generation_rate = self._throughput.look(engine.stats)
        gauges: dict[str, tuple[str, float]] = {
            "vllm:num_requests_running": ("Requests that run.", engine.num_running),
            "vllm:num_requests_waiting": (_NUM_WAITING, engine.num_waiting),
            "vllm:num_requests_swapped": ("Requests in host memory.", engine.num_swapped),
            "vllm:gpu_cache_usage_perc": (_CACHE_USAGE, engine.gpu_cache_usage),
            "vllm:kv_cache_usage_perc": (_CACHE_USAGE, engine.gpu_cache_usage),
            "vllm:cpu_cache_usage_perc": ("Share of host blocks in use.", engine.cpu_cache_usage),
            "vllm:gpu_prefix_cache_hit_rate": ("Share of tokens found.", hit_rate),
            "vllm:cpu_prefix_cache_hit_rate": ("-1: prompts are not looked up there.", -1.0),
            "vllm:avg_prompt_throughput_toks_per_s": (
                "Prompt tokens computed a second, since the last scrape.",
                prompt_rate,
            ),
            "vllm:avg_generation_throughput_toks_per_s": (
                "New tokens a second, since the last scrape.",
                generation_rate,
            ),
            "pagedserve:seconds_since_step": (
                "How long requests have waited without the end of a step.",
                engine.seconds_without_progress,
            ),
        }
        for name, (text, value) in gauges.items():
            yield gauge(name, text, (self._labels, value))
        yield gauge(
            "vllm:num_requests_waiting_by_reason",
            _NUM_WAITING,
            ({**self._labels, "reason": "capacity"}, engine.num_waiting),
            ({**self._labels, "reason": "deferred"}, 0),  # nothing is put off for another reason
        )
        if engine.lora_usage is not None:
            yield gauge(
                "vllm:lora_requests_info",
                "Adapters of unfinished requests; its value is the time.",
                (
                    {
                        "max_lora": str(engine.lora_usage.max_loras),
                        "running_lora_adapters": ",".join(engine.lora_usage.running),
                        "waiting_lora_adapters": ",".join(engine.lora_usage.waiting),
                    },
                    time.time(),
                ),
            )
        config = {name: str(value) for name, value in engine.cache_config.items()}
        yield gauge("vllm:cache_config_info", "The KV cache.", ({**self._labels, **config}, 1))

    def _counters(self, engine: EngineSnapshot) -> Iterator[Metric]:
        stats, num_cached = engine.stats, engine.num_cached_tokens
        counters: dict[str, tuple[str, float]] = {
            "vllm:num_preemptions": ("Preemptions.", engine.num_preemptions),
            "vllm:prompt_tokens": ("Prompt tokens taken up.", stats.num_prompt_tokens),
            "vllm:generation_tokens": ("New tokens.", stats.num_generation_tokens),
            "vllm:prefix_cache_queries": (
                "Tokens looked up in the prefix cache.",
                engine.num_looked_up_tokens,
            ),
            "vllm:prefix_cache_hits": (_CACHED_TOKENS, num_cached),
            "vllm:prompt_tokens_cached": (_CACHED_TOKENS, num_cached),
            "pagedserve:recomputed_tokens": (
                "Tokens that were computed and given up.",
                engine.num_recomputed_tokens,
            ),
            "pagedserve:steps": ("Steps of the engine.", stats.num_steps),
        }
        for name, (text, value) in counters.items():
            yield counter(name, text, (self._labels, value))
        if engine.has_drafts:
            yield from self._drafts(stats)

    def _drafts(self, stats: EngineStats) -> Iterator[Metric]:
        counters: dict[str, tuple[str, float]] = {
            "vllm:spec_decode_num_drafts": ("Rows of steps that had drafts.", stats.num_drafts),
            "vllm:spec_decode_num_draft_tokens": ("Drafts.", stats.num_draft_tokens),
            "vllm:spec_decode_num_accepted_tokens": (
                "Drafts that were right.",
                stats.num_accepted_tokens,
            ),
        }
        for name, (text, value) in counters.items():
            yield counter(name, text, (self._labels, value))
        yield counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts that were right, by their place behind the token.",
            *(
                ({**self._labels, "position": str(place)}, number)
                for place, number in enumerate(stats.num_accepted_by_place)
            ),
        )

    def _histograms(self, engine: EngineSnapshot) -> Iterator[Metric]:
        stats = engine.stats
        histograms: dict[str, tuple[str, Histogram]] = {
            "vllm:iteration_tokens_total": ("Tokens of a step.", stats.step_tokens),
            "pagedserve:step_seconds": ("A step.", stats.step_seconds),
            "pagedserve:host_step_seconds": (
                "The part of a step outside the executor.",
                stats.host_step_seconds,
            ),
        }
        for name, (text, counted) in histograms.items():
            yield histogram(name, text, (self._labels, counted))

    def _by_replica(self, replicas: Mapping[str, EngineSnapshot]) -> Iterator[Metric]:
        """By names of their own: sums of vLLM's would count everything twice."""

        def samples(value: _Value) -> Iterator[tuple[Labels, float]]:
            for name, engine in replicas.items():
                yield {**self._labels, "replica": name}, value(engine)

        for name, (text, value) in _REPLICA_GAUGES.items():
            yield gauge(f"pagedserve:replica_{name}", text, *samples(value))
        for name, (text, value) in _REPLICA_COUNTERS.items():
            yield counter(f"pagedserve:replica_{name}", text, *samples(value))
