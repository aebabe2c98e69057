"""Metrics of an engine from a snapshot; valid also while no step runs."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeAlias

from pagedserve.engine.metric_families import Family, Labels, counter, gauge, histogram
from pagedserve.engine.stats import EngineSnapshot, EngineStats, Histogram, Throughput

_NUM_WAITING: Final = "Number of waiting requests."
_CACHE_USAGE: Final = "Fraction of KV blocks in use."
_LOOKED_UP_TOKENS: Final = "Tokens looked up in the prefix cache."
_CACHED_TOKENS: Final = "Tokens found in the prefix cache."

# Metrics of each replica: description, and value in a snapshot.
_Value: TypeAlias = Callable[[EngineSnapshot], float]
_REPLICA_GAUGES: Final[dict[str, tuple[str, _Value]]] = {
    "requests_running": ("Running requests of a replica.", lambda engine: engine.num_running),
    "requests_waiting": ("Waiting requests of a replica.", lambda engine: engine.num_waiting),
    "kv_cache_usage": (_CACHE_USAGE, lambda engine: engine.gpu_cache_usage),
    "seconds_since_step": (
        "Seconds that requests of a replica have waited without a completed step.",
        lambda engine: engine.seconds_without_progress,
    ),
}
_REPLICA_COUNTERS: Final[dict[str, tuple[str, _Value]]] = {
    "prompt_tokens": (
        "Prompt tokens of requests added to a replica.",
        lambda engine: engine.stats.num_prompt_tokens,
    ),
    "generation_tokens": (
        "Generated tokens of a replica.",
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
    """Gauges and counters of an engine."""

    def __init__(self, labels: Labels) -> None:
        """Start to measure; all metrics have the labels."""
        self._labels = labels
        self._throughput = Throughput()

    def families(self, engine: EngineSnapshot) -> Iterator[Family]:
        """Metrics of an engine."""
        yield from self._gauges(engine)
        yield from self._counters(engine)
        yield from self._threads(engine)
        yield from self._histograms(engine)
        if engine.replicas:
            yield from self._by_replica(engine.replicas)

    def _gauges(self, engine: EngineSnapshot) -> Iterator[Family]:
        looked_up = engine.num_looked_up_tokens
        hit_rate = engine.num_cached_tokens / looked_up if looked_up else -1.0
        prompt_rate, generation_rate = self._throughput.look(engine.stats)
        gauges: dict[str, tuple[str, float]] = {
            "vllm:num_requests_running": ("Running requests.", engine.num_running),
            "vllm:num_requests_waiting": (_NUM_WAITING, engine.num_waiting),
            "vllm:num_requests_swapped": ("Requests in host memory.", engine.num_swapped),
            "vllm:gpu_cache_usage_perc": (_CACHE_USAGE, engine.gpu_cache_usage),
            "vllm:kv_cache_usage_perc": (_CACHE_USAGE, engine.gpu_cache_usage),
            "vllm:cpu_cache_usage_perc": ("Fraction of host blocks used.", engine.cpu_cache_usage),
            "vllm:gpu_prefix_cache_hit_rate": ("Fraction of cached tokens.", hit_rate),
            "vllm:cpu_prefix_cache_hit_rate": ("-1: host memory has no prefix cache.", -1.0),
            "vllm:avg_prompt_throughput_toks_per_s": (
                "Prompt tokens computed per second since the last scrape.",
                prompt_rate,
            ),
            "vllm:avg_generation_throughput_toks_per_s": (
                "Tokens generated per second since the last scrape.",
                generation_rate,
            ),
            "pagedserve:seconds_since_step": (
                "Seconds that requests have waited without a completed step.",
                engine.seconds_without_progress,
            ),
        }
        for name, (text, value) in gauges.items():
            yield gauge(name, text, (self._labels, value))
        yield gauge(
            "vllm:num_requests_waiting_by_reason",
            _NUM_WAITING,
            ({**self._labels, "reason": "capacity"}, engine.num_waiting),
            ({**self._labels, "reason": "deferred"}, 0),  # capacity is the only reason here
        )
        if engine.lora_usage is not None:
            yield gauge(
                "vllm:lora_requests_info",
                "Adapters of unfinished requests; the value is the time.",
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

    def _counters(self, engine: EngineSnapshot) -> Iterator[Family]:
        stats, num_cached = engine.stats, engine.num_cached_tokens
        num_looked_up = engine.num_looked_up_tokens
        counters: dict[str, tuple[str, float]] = {
            "vllm:num_preemptions": ("Preemptions.", engine.num_preemptions),
            "vllm:prompt_tokens": ("Prompt tokens of added requests.", stats.num_prompt_tokens),
            "vllm:generation_tokens": ("New tokens.", stats.num_generation_tokens),
            "vllm:prefix_cache_queries": (_LOOKED_UP_TOKENS, num_looked_up),
            "vllm:prefix_cache_hits": (_CACHED_TOKENS, num_cached),
            "vllm:gpu_prefix_cache_queries": (_LOOKED_UP_TOKENS, num_looked_up),
            "vllm:gpu_prefix_cache_hits": (_CACHED_TOKENS, num_cached),
            "vllm:mm_cache_queries": ("Looked up images.", stats.num_image_queries),
            "vllm:mm_cache_hits": ("Images with cached features.", stats.num_image_hits),
            "vllm:prompt_tokens_cached": (_CACHED_TOKENS, num_cached),
            "pagedserve:recomputed_tokens": (
                "Computed tokens that were dropped and recomputed.",
                engine.num_recomputed_tokens,
            ),
            "pagedserve:steps": ("Steps of the engine.", stats.num_steps),
        }
        for name, (text, value) in counters.items():
            yield counter(name, text, (self._labels, value))
        if engine.has_drafts:
            yield from self._drafts(stats)

    def _drafts(self, stats: EngineStats) -> Iterator[Family]:
        counters: dict[str, tuple[str, float]] = {
            "vllm:spec_decode_num_drafts": ("Rows with draft tokens.", stats.num_drafts),
            "vllm:spec_decode_num_draft_tokens": ("Drafts.", stats.num_draft_tokens),
            "vllm:spec_decode_num_accepted_tokens": (
                "Accepted draft tokens.",
                stats.num_accepted_tokens,
            ),
        }
        for name, (text, value) in counters.items():
            yield counter(name, text, (self._labels, value))
        yield counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by position.",
            *(
                ({**self._labels, "position": str(place)}, number)
                for place, number in enumerate(stats.num_accepted_by_place)
            ),
        )

    def _threads(self, engine: EngineSnapshot) -> Iterator[Family]:
        counters: dict[str, tuple[str, float]] = {
            "pagedserve:thread_calls": (
                "Calls of the kernels on several compute threads.",
                engine.threads.num_calls,
            ),
            "pagedserve:thread_absences": (
                "Compute threads that took no part in a call of the kernels.",
                engine.threads.num_absent,
            ),
            "pagedserve:thread_wait_seconds": (
                "Seconds in which calls of the kernels waited for compute threads.",
                engine.threads.seconds,
            ),
        }
        for name, (text, value) in counters.items():
            yield counter(name, text, (self._labels, value))

    def _histograms(self, engine: EngineSnapshot) -> Iterator[Family]:
        stats = engine.stats
        histograms: dict[str, tuple[str, Histogram]] = {
            "vllm:iteration_tokens_total": ("Tokens per step.", stats.step_tokens),
            "pagedserve:step_seconds": ("A step.", stats.step_seconds),
            "pagedserve:host_step_seconds": (
                "Seconds per step outside the executor.",
                stats.host_step_seconds,
            ),
        }
        for name, (text, counted) in histograms.items():
            yield histogram(name, text, (self._labels, counted))

    def _by_replica(self, replicas: Mapping[str, EngineSnapshot]) -> Iterator[Family]:
        """Metrics per replica, under other names: sums over vLLM's would count twice."""

        def samples(value: _Value) -> Iterator[tuple[Labels, float]]:
            for name, engine in replicas.items():
                yield {**self._labels, "replica": name}, value(engine)

        for name, (text, value) in _REPLICA_GAUGES.items():
            yield gauge(f"pagedserve:replica_{name}", text, *samples(value))
        for name, (text, value) in _REPLICA_COUNTERS.items():
            yield counter(f"pagedserve:replica_{name}", text, *samples(value))
