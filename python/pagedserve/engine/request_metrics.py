"""Metrics of requests, counted as outputs arrive, under vLLM's old and new names.

Costs: one search in a list of bounds per output, some 0.3 us.
"""

from collections.abc import Iterator
from typing import Final

from pagedserve.engine.metric_families import Family, Labels, counter, histogram
from pagedserve.engine.stats import Histogram
from pagedserve.outputs import FinishReason, RequestMetrics, RequestOutput, seconds_between
from pagedserve.sampling_params import SamplingParams

# Bucket bounds of vLLM: the union of its old and new versions.
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
# Sources of prompt tokens.
_SOURCES: Final = ("local_compute", "local_cache_hit", "external_kv_transfer")


# Histograms of requests: description and bucket bounds.
_HISTOGRAMS: Final[dict[str, tuple[str, tuple[float, ...]]]] = {
    "time_to_first_token_seconds": ("Arrival to first token.", _FIRST_TOKEN),
    "inter_token_latency_seconds": ("Between tokens of a sequence.", _BETWEEN_TOKENS),
    "request_time_per_output_token_seconds": (
        "Mean time per output token after the first.",
        _BETWEEN_TOKENS,
    ),
    "e2e_request_latency_seconds": ("Arrival to end.", _WHOLE),
    "request_queue_time_seconds": ("Arrival to first step.", _WHOLE),
    "request_inference_time_seconds": ("First step to end.", _WHOLE),
    "request_prefill_time_seconds": ("First step to first token.", _WHOLE),
    "request_decode_time_seconds": ("First token to end.", _WHOLE),
    "request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS),
    "request_prefill_kv_computed_tokens": (
        "Prompt tokens of a request that were not cached.",
        _TOKENS,
    ),
    "request_generation_tokens": ("New tokens of a request.", _TOKENS),
    "request_max_num_generation_tokens": ("New tokens of an output.", _TOKENS),
    "request_params_max_tokens": ("max_tokens.", _TOKENS),
    "request_params_n": ("n.", _SEVERAL),
    "request_params_best_of": ("best_of.", _SEVERAL),
    "request_num_preemptions": ("Preemptions of a request.", _PREEMPTIONS),
}
# Alternative names of histograms.
_CLASSIC_NAMES: Final = {"inter_token_latency_seconds": "time_per_output_token_seconds"}


class RequestCounts:
    """Counters and histograms of requests."""

    def __init__(self, labels: Labels) -> None:
        """Start to count; all metrics have the labels."""
        self._labels = labels
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._finished = dict.fromkeys(_FINISH_REASONS, 0)
        self._prompt_tokens = dict.fromkeys(_SOURCES, 0)

    def first_token_came(self, output: RequestOutput) -> None:
        """Count the first output of a prompt; without streaming it has all tokens."""
        seconds = output.metrics.time_to_first_token
        if seconds is None:
            return
        self._histograms["time_to_first_token_seconds"].observe(seconds)
        self._count_prompt_tokens(output)
        lengths = [len(completion.token_ids) for completion in output.outputs]
        between = output.metrics.time_per_output_token(max(lengths, default=0))
        if between is not None:
            self._count_gaps(between, sum(max(0, length - 1) for length in lengths))

    def _count_prompt_tokens(self, output: RequestOutput) -> None:
        num_cached = output.num_cached_tokens or 0
        self._prompt_tokens["local_cache_hit"] += num_cached
        self._prompt_tokens["local_compute"] += len(output.prompt_token_ids) - num_cached

    def tokens_came(self, seconds: float, output: RequestOutput) -> None:
        """Count tokens of a later output, which came this many seconds after those before."""
        lengths = [len(completion.token_ids) for completion in output.outputs]
        self._count_gaps(seconds / max(lengths), sum(lengths))

    def _count_gaps(self, seconds: float, num_tokens: int) -> None:
        """Count inter-token latencies of ``num_tokens`` tokens, with their mean in seconds."""
        self._histograms["inter_token_latency_seconds"].observe(seconds, num_tokens)

    def prompt_finished(
        self, params: SamplingParams, output: RequestOutput, num_generated: int
    ) -> None:
        """Count a finished prompt.

        Args:
            params: Sampling parameters.
            output: Last output.
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
        """Count a pooling request that finished or failed.

        Args:
            output: Its only output.
            reason: Finish reason.
        """
        self._finished[reason] += 1
        self._count_prompt_tokens(output)
        self._observe(_of_any(output))

    def prompts_ended(self, reason: str, number: int) -> None:
        """Count prompts that ended without a completion."""
        self._finished[reason] += number

    def families(self) -> Iterator[Family]:
        """Metrics of the counted requests."""
        for name, counted in self._histograms.items():
            text = _HISTOGRAMS[name][0]
            for shown in filter(None, (name, _CLASSIC_NAMES.get(name))):
                yield histogram(f"vllm:{shown}", text, (self._labels, counted))
        yield self.by("request_success", "Finished outputs.", "finished_reason", self._finished)
        yield self.by("prompt_tokens_by_source", "Prompt tokens.", "source", self._prompt_tokens)

    def by(self, name: str, text: str, label: str, counts: dict[str, int]) -> Family:
        """Create a counter with one sample for each value of a label."""
        samples = (({**self._labels, label: part}, count) for part, count in counts.items())
        return counter(f"vllm:{name}", text, *samples)

    def _observe(self, counted: dict[str, float | None]) -> None:
        for name, value in counted.items():
            if value is not None:
                self._histograms[name].observe(value)


def _of_any(output: RequestOutput) -> dict[str, float | None]:
    """Values of the histograms for a finished request, from its last output."""
    num_prompt_tokens = len(output.prompt_token_ids)
    return {
        "request_prompt_tokens": num_prompt_tokens,
        "request_prefill_kv_computed_tokens": num_prompt_tokens - (output.num_cached_tokens or 0),
        "request_num_preemptions": output.metrics.num_preemptions,
        **_times(output.metrics),
    }


def _times(metrics: RequestMetrics) -> dict[str, float | None]:
    """Durations of the phases of a request; None if a phase did not happen."""
    whole = seconds_between(metrics.arrival_time, metrics.finished_time)
    return {
        "e2e_request_latency_seconds": whole,
        "request_queue_time_seconds": metrics.time_in_queue,
        "request_inference_time_seconds": metrics.inference_time,
        "request_prefill_time_seconds": metrics.prefill_time,
        "request_decode_time_seconds": metrics.decode_time,
    }
