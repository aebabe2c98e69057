"""Report of a run: a table, or JSON with the names of ``vllm bench serve``."""

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from pagedserve.bench.figures import Distribution, Figures
from pagedserve.bench.files import write_json
from pagedserve.bench.metrics import METRICS
from pagedserve.bench.options import BenchOptions
from pagedserve.bench.outcome import Outcome

_WIDTH = 56
_LABEL_WIDTH = 44
_MEDIAN = 50


def table(figures: Figures, options: BenchOptions, examples: dict[str, str]) -> str:
    """Format the results as lines of text.

    Args:
        figures: Results of the run.
        options: Options of the run.
        examples: A message for each kind of failure.
    """
    lines = [f"{' Serving Benchmark Result ':=^{_WIDTH}}", *_counts(figures, options)]
    for key, distribution in figures.times.items():
        lines += _times(key, distribution)
    if figures.failures:
        lines.append(f"{'Failed Requests':-^{_WIDTH}}")
        for kind, count in figures.failures.items():
            lines += [_line(f"{kind}:", count), f"  {examples[kind]}"]
    return "\n".join([*lines, "=" * _WIDTH])


def _counts(figures: Figures, options: BenchOptions) -> Iterator[str]:
    yield _line("Successful requests:", figures.completed)
    yield _line("Failed requests:", figures.failed)
    if figures.unfinished:
        yield _line("Unfinished requests:", figures.unfinished)
    if options.max_concurrency is not None:
        yield _line("Maximum request concurrency:", options.max_concurrency)
    if (rate := options.finite_rate()) is not None:
        yield _line("Request rate configured (RPS):", rate)
    yield _line("Benchmark duration (s):", figures.duration_s)
    yield _line("Total input tokens:", figures.num_input_tokens)
    yield _line("Total generated tokens:", figures.num_output_tokens)
    if figures.num_counted_by_chunks:
        yield _line("  without usage, chunks were counted (req):", figures.num_counted_by_chunks)
    yield _line("Request throughput (req/s):", figures.per_second(figures.completed))
    if figures.good is not None:
        yield _line("Request goodput (req/s):", figures.per_second(figures.good))
    output = figures.num_output_tokens
    yield _line("Output token throughput (tok/s):", figures.per_second(output))
    yield _line("Peak output token throughput (tok/s):", figures.peak_output_throughput)
    yield _line("Peak concurrent requests:", figures.peak_concurrency)
    total = output + figures.num_input_tokens
    yield _line("Total token throughput (tok/s):", figures.per_second(total))


def _times(key: str, distribution: Distribution) -> Iterator[str]:
    metric = METRICS[key]
    yield f"{metric.title:-^{_WIDTH}}"
    yield _line(f"Mean {metric.label} (ms):", distribution.mean)
    yield _line(f"Median {metric.label} (ms):", distribution.median)
    for percent, value in distribution.percentiles.items():
        if percent != _MEDIAN:
            yield _line(f"P{percent:g} {metric.label} (ms):", value)


def _line(label: str, value: float | None) -> str:
    """A label and its value: an integer count, or a number with two decimals."""
    shown = "-" if value is None else str(value) if isinstance(value, int) else f"{value:.2f}"
    return f"{label:<{_LABEL_WIDTH}} {shown:<10}".rstrip()


def result(
    figures: Figures, options: BenchOptions, *, model: str, is_timed: bool, now: datetime
) -> dict[str, Any]:
    """Convert the results to JSON values.

    Args:
        figures: Results of the run.
        options: Options of the run.
        model: Model, by --model or the server.
        is_timed: Whether requests had different send times.
        now: End of the run.
    """
    rate = options.finite_rate() or ("trace" if is_timed else "inf")
    output, both = figures.num_output_tokens, figures.num_output_tokens + figures.num_input_tokens
    good = None if figures.good is None else figures.per_second(figures.good)
    return {
        "date": f"{now:%Y%m%d-%H%M%S}",
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": options.label,
        "model_id": model,
        "tokenizer_id": options.tokenizer or model,
        "num_prompts": figures.completed + figures.failed + figures.unfinished,
        **dict(options.metadata),
        "request_rate": rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "duration": figures.duration_s,
        "completed": figures.completed,
        "failed": figures.failed,
        "failed_by_kind": dict(figures.failures),
        "unfinished": figures.unfinished,
        "total_input_tokens": figures.num_input_tokens,
        "total_output_tokens": figures.num_output_tokens,
        "counted_by_chunks": figures.num_counted_by_chunks,
        "request_throughput": figures.per_second(figures.completed),
        "request_goodput": good,
        "output_throughput": figures.per_second(output),
        "total_token_throughput": figures.per_second(both),
        "max_output_tokens_per_s": figures.peak_output_throughput,
        "max_concurrent_requests": figures.peak_concurrency,
        **_time_fields(figures),
    }


def _time_fields(figures: Figures) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for key, distribution in figures.times.items():
        found[f"mean_{key}_ms"] = distribution.mean
        found[f"median_{key}_ms"] = distribution.median
        found[f"std_{key}_ms"] = distribution.std
        for percent, value in distribution.percentiles.items():
            found[f"p{percent:g}_{key}_ms"] = value
    return found


def detailed_fields(outcomes: Sequence[Outcome], *, start: float) -> dict[str, list[Any]]:
    """Details of each request that ended, a list per field; times in seconds.

    Args:
        outcomes: Outcomes in the order in which they ended.
        start: Start of the run, relative to which ``start_times`` are.
    """
    answered = [outcome.failure is None for outcome in outcomes]
    return {
        "start_times": [outcome.started - start for outcome in outcomes],
        "queue_times": [outcome.client_queue_time() for outcome in outcomes],
        "input_lens": [outcome.num_input_tokens for outcome in outcomes],
        "output_lens": [
            outcome.output_tokens() if ok else 0
            for outcome, ok in zip(outcomes, answered, strict=True)
        ],
        "ttfts": [
            outcome.ttft() if ok else None for outcome, ok in zip(outcomes, answered, strict=True)
        ],
        "itls": [outcome.itls() for outcome in outcomes],
        "generated_texts": ["".join(outcome.texts or ()) for outcome in outcomes],
        "latencies": [
            outcome.e2el() if ok else None for outcome, ok in zip(outcomes, answered, strict=True)
        ],
        "errors": [
            "" if outcome.failure is None else f"{outcome.failure.kind}: {outcome.failure.message}"
            for outcome in outcomes
        ],
    }


def save(result_fields: dict[str, Any], options: BenchOptions) -> None:
    """Write results to the file of the options.

    Raises:
        ConfigError: The file cannot be written.
    """
    name = options.result_filename or _file_name(result_fields)
    write_json(options.result_dir / name, result_fields, append=options.append_result)


def _file_name(result_fields: dict[str, Any]) -> str:
    limit = result_fields["max_concurrency"]
    concurrency = "" if limit is None else f"-concurrency{limit}"
    model = re.sub(r"[^\w.-]", "_", result_fields["model_id"].rpartition("/")[2])
    rate = result_fields["request_rate"]
    label = result_fields["label"] or result_fields["backend"]
    return f"{label}-{rate}qps{concurrency}-{model}-{result_fields['date']}.json"
