"""The options of ``pagedserve bench serve``, by the names that ``vllm bench serve`` gives them.

Parsing them imports only argparse, so that the command line starts quickly.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pagedserve.bench.api import APIS
from pagedserve.bench.arguments import COUNT, COUNT_OR_ZERO, ParsedOptions, adder, switch
from pagedserve.bench.metrics import GOODPUT_METRICS, METRICS
from pagedserve.checks import Check, choice, each, optional, real
from pagedserve.errors import ConfigError

_DATASETS = ("random", "custom", "sharegpt", "trace")
_DEFAULT_METRICS = ("ttft", "tpot", "itl", "e2el")
_SIX_HOURS = 21600.0
# Sampling parameters of requests, which are sent if given.
_SAMPLING = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "repetition_penalty": float,
}
# Options of vLLM without effect here.
_WITHOUT_EFFECT = ("trust-remote-code", "skip-tokenizer-init", "no-oversample")


def _rate(name: str, value: float) -> float:
    """A number above 0, or infinity, which sends all at once."""
    if value == math.inf:
        return value
    return real("above 0, or inf", low=0, open_low=True)(name, value)


_ABOVE_ZERO = real("a number above 0", low=0, open_low=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions(ParsedOptions):
    """The options of a run; those without a default are None if not given."""

    checks: ClassVar[Mapping[str, Check[Any]]] = {
        "port": COUNT,
        "backend": choice(tuple(APIS)),
        "request_timeout": _ABOVE_ZERO,
        "ready_check_timeout_sec": COUNT_OR_ZERO,
        "input_len": optional(COUNT),
        "output_len": optional(COUNT),
        "dataset_name": choice(_DATASETS),
        "num_prompts": COUNT,
        "num_warmups": COUNT_OR_ZERO,
        "seed": COUNT_OR_ZERO,
        "vocab_size": COUNT,
        "random_input_len": COUNT,
        "random_output_len": COUNT,
        "random_range_ratio": real("from 0 to 1", low=0, high=1),
        "random_prefix_len": COUNT_OR_ZERO,
        "custom_output_len": COUNT,
        "sharegpt_output_len": optional(COUNT),
        "trace_time_scale": _ABOVE_ZERO,
        "trace_length_scale": _ABOVE_ZERO,
        "trace_block_size": COUNT,
        "request_rate": optional(_rate),
        "burstiness": _ABOVE_ZERO,
        "max_concurrency": optional(COUNT),
        "metric_percentiles": each(real("from 0 to 100", low=0, high=100), "numbers"),
    }

    base_url: str | None
    host: str
    port: int
    backend: str
    endpoint: str | None
    model: str | None
    served_model_name: str | None
    tokenizer: str | None
    api_key: str | None
    header: Sequence[tuple[str, str]]
    extra_body: Mapping[str, Any]
    request_timeout: float
    request_id_prefix: str | None
    ready_check_timeout_sec: int
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    repetition_penalty: float | None
    dataset_name: str
    dataset_path: Path | None
    num_prompts: int
    num_warmups: int
    seed: int
    vocab_size: int
    ignore_eos: bool | None
    input_len: int | None
    output_len: int | None
    random_input_len: int
    random_output_len: int
    random_range_ratio: float
    random_prefix_len: int
    custom_output_len: int
    sharegpt_output_len: int | None
    trace_time_scale: float
    trace_length_scale: float
    trace_block_size: int
    request_rate: float | None
    burstiness: float
    max_concurrency: int | None
    goodput: Sequence[tuple[str, float]]
    percentile_metrics: Sequence[str] | None
    metric_percentiles: Sequence[float]
    json: bool
    save_result: bool
    save_detailed: bool
    append_result: bool
    label: str | None
    metadata: Sequence[tuple[str, str]]
    result_dir: Path
    result_filename: str | None
    disable_tqdm: bool

    def __post_init__(self) -> None:
        """Check the options; see ``ParsedOptions``."""
        ParsedOptions.__post_init__(self)
        if self.dataset_name != "random":
            self.dataset_file()
        elif self.dataset_path is not None:
            raise ConfigError("--dataset-name random takes no --dataset-path; the others do")

    def dataset_file(self) -> Path:
        """The file of a dataset that is not random.

        Raises:
            ConfigError: None was given.
        """
        if self.dataset_path is None:
            raise ConfigError(f"--dataset-name {self.dataset_name} needs --dataset-path")
        return self.dataset_path

    def finite_rate(self) -> float | None:
        """Requests per second; None if they are sent at once or at the times of a trace."""
        rate = self.request_rate
        return None if rate is None or math.isinf(rate) else rate

    def server_url(self) -> str:
        """The server's address without a path."""
        if self.base_url is not None:
            return self.base_url.rstrip("/")
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def goes_past_eos(self) -> bool:
        """Whether outputs continue past EOS: by default where prompts are random."""
        is_random = self.dataset_name in {"random", "trace"}
        return is_random if self.ignore_eos is None else self.ignore_eos

    def body_fields(self) -> dict[str, Any]:
        """Fields of every request: sampling parameters, and those of --extra-body."""
        given = {name: getattr(self, name) for name in _SAMPLING}
        fields = {name: value for name, value in given.items() if value is not None}
        return {**fields, **self.extra_body}

    def request_headers(self, index: int) -> dict[str, str]:
        """Headers of the request of an index: its id, if a prefix of ids is given."""
        prefix = self.request_id_prefix
        return {} if prefix is None else {"X-Request-Id": f"{prefix}{index}"}

    def metrics(self, *, is_timed: bool) -> Sequence[str]:
        """The times to report, with the client's queue time if requests are timed."""
        if self.percentile_metrics is not None:
            return self.percentile_metrics
        default = ("e2el",) if APIS[self.backend].is_pooling else _DEFAULT_METRICS
        return (*default, "client_queue_time") if is_timed else default


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add all options of a run to a command line."""
    _add_server(parser.add_argument_group("server"))
    _add_requests(parser.add_argument_group("requests"))
    _add_dataset(parser.add_argument_group("dataset"))
    _add_traffic(parser.add_argument_group("traffic"))
    _add_results(parser.add_argument_group("results"))


def _add_server(group: argparse._ArgumentGroup) -> None:
    add = adder(group)
    add("base-url", "URL of the server, instead of --host and --port")
    add("host", "host of the server", default="127.0.0.1")
    add("port", "port of the server", type=int, default=8000)
    add("backend", f"API of the server: {', '.join(APIS)}", default="openai")
    add("endpoint", "path of the endpoint (that of --backend)")
    add("model", "name of the model (the first of /v1/models)")
    add("served-model-name", "name of the model in requests (--model)")
    add("tokenizer", "directory or hub id of the tokenizer that counts the tokens of sharegpt")
    add("api-key", "bearer token of requests (OPENAI_API_KEY)")
    add(
        "ready-check-timeout-sec",
        "time limit for a server that is starting",
        type=int,
        default=0,
        metavar="SECONDS",
    )
    add("tokenizer-mode", "no effect")
    for name in _WITHOUT_EFFECT:
        switch(group, name, "no effect")


def _add_requests(group: argparse._ArgumentGroup) -> None:
    add = adder(group)
    add(
        "header",
        "header of every request",
        type=_key_value,
        nargs="+",
        default=(),
        metavar="KEY=VALUE",
    )
    add(
        "extra-body",
        'fields of every request, as in {"temperature": 0}',
        type=_json_object,
        default={},
        metavar="JSON",
    )
    add(
        "request-timeout",
        "time limit of a request",
        type=float,
        default=_SIX_HOURS,
        metavar="SECONDS",
    )
    add("request-id-prefix", "prefix of X-Request-Id, which the index of a request follows")
    for name, kind in _SAMPLING.items():
        add(name.replace("_", "-"), f"{name} of every request", type=kind)


def _add_dataset(group: argparse._ArgumentGroup) -> None:
    add = adder(group)
    add("dataset-name", f"source of prompts: {', '.join(_DATASETS)}", default="random")
    add(
        "dataset-path",
        "file of the dataset: for custom, JSON lines with a prompt or messages; for sharegpt, "
        "conversations, .json or .jsonl; for trace, lengths and times from Azure, Mooncake or "
        "Vidur, .csv or .jsonl, also .gz",
        type=Path,
    )
    add("num-prompts", "number of requests", type=int, default=1000)
    add("num-warmups", "number of earlier requests that are not measured", type=int, default=0)
    add("seed", "seed of prompts, lengths and times", type=int, default=0)
    add(
        "ignore-eos",
        "continue outputs past EOS to their full length (yes with random and trace)",
        action=argparse.BooleanOptionalAction,
    )
    add("input-len", "tokens per prompt, instead of --random-input-len", type=int)
    add("output-len", "tokens per output, instead of those of the dataset's option", type=int)
    add("random-input-len", "tokens per prompt", type=int, default=1024)
    add("random-output-len", "tokens per output", type=int, default=128)
    add(
        "random-range-ratio",
        "fraction by which both lengths vary, up and down",
        type=float,
        default=0.0,
    )
    add(
        "random-prefix-len",
        "tokens of a prefix that all prompts share",
        type=int,
        default=0,
    )
    add(
        "vocab-size",
        "upper bound of the token ids of random prompts, at most the model's vocabulary",
        type=int,
        default=32000,
    )
    add(
        "custom-output-len",
        "tokens per output for which the file has no number",
        type=int,
        default=256,
    )
    add("sharegpt-output-len", "tokens per output (those of a conversation's answer)", type=int)
    add("trace-length-scale", "factor of all lengths of a trace", type=float, default=1.0)
    add("trace-block-size", "tokens per prefix block of a trace", type=int, default=512)


def _add_traffic(group: argparse._ArgumentGroup) -> None:
    add = adder(group)
    add(
        "request-rate",
        "requests per second, independent of the server's speed (the times of a trace, else inf, "
        "which is all at once)",
        type=float,
    )
    add(
        "burstiness",
        "burstiness of a rate: 1 is a Poisson process, lower is burstier, higher more even",
        type=float,
        default=1.0,
    )
    add("max-concurrency", "maximum number of concurrent requests", type=int)
    add(
        "trace-time-scale",
        "factor of all times of a trace: 0.5 is twice as fast",
        type=float,
        default=1.0,
    )


def _add_results(group: argparse._ArgumentGroup) -> None:
    add = adder(group)
    add(
        "goodput",
        "count the requests that keep all these limits, in milliseconds, on "
        f"{', '.join(GOODPUT_METRICS)}",
        type=_limit,
        nargs="+",
        default=(),
        metavar="KEY:MS",
    )
    add(
        "percentile-metrics",
        f"times to report, with commas: {', '.join(METRICS)} (the first four, and the fifth if "
        "requests are timed)",
        type=_metric_names,
        metavar="KEYS",
    )
    add(
        "metric-percentiles",
        "percentiles of each time, with commas",
        type=_percentiles,
        default="50,90,99",
        metavar="PERCENTS",
    )
    switch(group, "json", "print the result as JSON instead of a table")
    switch(group, "save-result", "write the result to a file, as JSON")
    switch(group, "save-detailed", "write the times and texts of each request too")
    switch(group, "append-result", "append the result to the file, as a further line of JSON")
    add("label", "label of the result and prefix of the file's name (--backend)")
    add(
        "metadata",
        "further fields of the result",
        type=_key_value,
        nargs="+",
        default=(),
        metavar="KEY=VALUE",
    )
    add("result-dir", "directory of that file", type=Path, default=Path())
    add("result-filename", "name of that file (from rate, model and date)")
    switch(group, "disable-tqdm", "show no progress bar")


def _key_value(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not (name.strip() and separator):
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return name.strip(), value.strip()


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value


def _limit(text: str) -> tuple[str, float]:
    name, _, milliseconds = text.partition(":")
    if name not in GOODPUT_METRICS:
        accepted = ", ".join(GOODPUT_METRICS)
        raise argparse.ArgumentTypeError(f"{text!r} is no limit on one of {accepted}")
    try:
        limit = float(milliseconds)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY:MS") from error
    if not limit >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} has a limit below 0")
    return name, limit


def _metric_names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in METRICS:
            accepted = ", ".join(METRICS)
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {accepted}")
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(percent) for percent in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} are no numbers with commas") from error
