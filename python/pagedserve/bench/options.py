"""The options of ``pagedserve bench serve``, by the names that ``vllm bench serve`` gives them.

Reading them loads nothing but argparse: the command line stays quick to start.
"""

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pagedserve.bench.api import APIS
from pagedserve.bench.metrics import GOODPUT_METRICS, METRICS
from pagedserve.checks import Check, choice, each, integer, optional, real
from pagedserve.errors import ConfigError

_DATASETS = ("random", "custom", "trace")
_DEFAULT_METRICS = ("ttft", "tpot", "itl", "e2el")
_SIX_HOURS = 21600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """What a run is asked for; each field is the option of the same name, None where not given."""

    base_url: str | None
    host: str
    port: int
    backend: str
    endpoint: str | None
    model: str | None
    api_key: str | None
    header: Sequence[tuple[str, str]]
    extra_body: Mapping[str, Any]
    request_timeout: float
    dataset_name: str
    dataset_path: Path | None
    num_prompts: int
    num_warmups: int
    seed: int
    vocab_size: int
    ignore_eos: bool | None
    random_input_len: int
    random_output_len: int
    random_range_ratio: float
    random_prefix_len: int
    custom_output_len: int
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
    result_dir: Path
    result_filename: str | None
    disable_tqdm: bool

    @classmethod
    def from_namespace(cls, namespace: argparse.Namespace) -> "BenchOptions":
        """What a command line says.

        Raises:
            ConfigError: As below.
        """
        return cls(**{field.name: getattr(namespace, field.name) for field in fields(cls)})

    def __post_init__(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            ConfigError: A value out of range, or options that contradict each other.
        """
        for name, check in _CHECKS.items():
            try:
                check(f"--{name.replace('_', '-')}", getattr(self, name))
            except ValueError as error:
                raise ConfigError(str(error)) from error
        if self.dataset_name != "random":
            self.dataset_file()
        elif self.dataset_path is not None:
            raise ConfigError("--dataset-name random takes no --dataset-path; custom and trace do")

    def dataset_file(self) -> Path:
        """The file of a dataset that is one.

        Raises:
            ConfigError: None was given.
        """
        if self.dataset_path is None:
            raise ConfigError(f"--dataset-name {self.dataset_name} needs --dataset-path")
        return self.dataset_path

    def finite_rate(self) -> float | None:
        """Requests a second; None where no rate spreads them over time."""
        rate = self.request_rate
        return None if rate is None or math.isinf(rate) else rate

    def server_url(self) -> str:
        """The server's address without a path."""
        if self.base_url is not None:
            return self.base_url.rstrip("/")
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def goes_past_eos(self) -> bool:
        """Whether answers are as long as planned: unless told, where lengths were made up."""
        return self.dataset_name != "custom" if self.ignore_eos is None else self.ignore_eos

    def metrics(self, *, is_timed: bool) -> Sequence[str]:
        """The times to report; how late requests were sent among them where they had a time."""
        if self.percentile_metrics is not None:
            return self.percentile_metrics
        return (*_DEFAULT_METRICS, "client_queue_time") if is_timed else _DEFAULT_METRICS


def _rate(name: str, value: float) -> float:
    """A number above 0, infinity among them: everything at once."""
    if value == math.inf:
        return value
    return real("above 0, or inf", low=0, open_low=True)(name, value)


_COUNT = integer("1 or more", low=1)
_ABOVE_ZERO = real("a number above 0", low=0, open_low=True)

_CHECKS: Mapping[str, Check[Any]] = {
    "port": integer("1 or more", low=1),
    "backend": choice(tuple(APIS)),
    "request_timeout": _ABOVE_ZERO,
    "dataset_name": choice(_DATASETS),
    "num_prompts": _COUNT,
    "num_warmups": integer("0 or more", low=0),
    "seed": integer("0 or more", low=0),
    "vocab_size": _COUNT,
    "random_input_len": _COUNT,
    "random_output_len": _COUNT,
    "random_range_ratio": real("from 0 to 1", low=0, high=1),
    "random_prefix_len": integer("0 or more", low=0),
    "custom_output_len": _COUNT,
    "trace_time_scale": _ABOVE_ZERO,
    "trace_length_scale": _ABOVE_ZERO,
    "trace_block_size": _COUNT,
    "request_rate": optional(_rate),
    "burstiness": _ABOVE_ZERO,
    "max_concurrency": optional(_COUNT),
    "metric_percentiles": each(real("from 0 to 100", low=0, high=100), "numbers"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add all options of a run to a command line."""
    _add_server(parser.add_argument_group("server"))
    _add_dataset(parser.add_argument_group("what is sent"))
    _add_traffic(parser.add_argument_group("when it is sent"))
    _add_results(parser.add_argument_group("results"))


def _adder(group: argparse._ArgumentGroup) -> Callable[..., None]:
    """What adds an option to a group, its default shown where there is one to show."""

    def add(name: str, text: str, *, default: object = None, **given: Any) -> None:
        shown = text if default in (None, (), {}) else f"{text} (%(default)s)"
        group.add_argument(f"--{name}", default=default, help=shown, **given)

    return add


def _switch(group: argparse._ArgumentGroup, name: str, text: str) -> None:
    group.add_argument(f"--{name}", action="store_true", help=text)


def _add_server(group: argparse._ArgumentGroup) -> None:
    add = _adder(group)
    add("base-url", "address of the server, in the place of --host and --port")
    add("host", "name or address of the server", default="127.0.0.1")
    add("port", "its port", type=int, default=8000)
    add("backend", f"its interface: {', '.join(APIS)}", default="openai")
    add("endpoint", "path of the endpoint; unless given, that of --backend")
    add("model", "name of the model; unless given, the first of /v1/models")
    add("api-key", "sent as a bearer token; unless given, OPENAI_API_KEY")
    add("header", "for every request", type=_header, nargs="+", default=(), metavar="KEY=VALUE")
    add(
        "extra-body",
        'fields for every request, as in {"temperature": 0}',
        type=_json_object,
        default={},
        metavar="JSON",
    )
    add(
        "request-timeout",
        "give a request up after so long",
        type=float,
        default=_SIX_HOURS,
        metavar="SECONDS",
    )


def _add_dataset(group: argparse._ArgumentGroup) -> None:
    add = _adder(group)
    add("dataset-name", f"where prompts come from: {', '.join(_DATASETS)}", default="random")
    add(
        "dataset-path",
        "for custom, JSON lines with a prompt or messages; for trace, the lengths and times of "
        "Azure, Mooncake or Vidur; .csv or .jsonl, also .gz",
        type=Path,
    )
    add("num-prompts", "requests to send", type=int, default=1000)
    add("num-warmups", "requests before these, not measured", type=int, default=0)
    add("seed", "for prompts, lengths and times", type=int, default=0)
    add(
        "ignore-eos",
        "let answers go on to their full length; unless said, not with custom",
        action=argparse.BooleanOptionalAction,
    )
    add("random-input-len", "tokens of a prompt", type=int, default=1024)
    add("random-output-len", "tokens of an answer", type=int, default=128)
    add(
        "random-range-ratio",
        "both lengths vary by this part of themselves, up and down",
        type=float,
        default=0.0,
    )
    add(
        "random-prefix-len",
        "tokens in front of every prompt, the same for all",
        type=int,
        default=0,
    )
    add(
        "vocab-size",
        "made up prompts have token ids below this; at most that of the model",
        type=int,
        default=32000,
    )
    add("custom-output-len", "tokens of an answer, if the file is silent", type=int, default=256)
    add("trace-length-scale", "all lengths of a trace times this", type=float, default=1.0)
    add("trace-block-size", "tokens of a prefix block of a trace", type=int, default=512)


def _add_traffic(group: argparse._ArgumentGroup) -> None:
    add = _adder(group)
    add(
        "request-rate",
        "requests a second, whatever the server does; unless given, the times of a trace, or all "
        "at once (inf)",
        type=float,
    )
    add(
        "burstiness",
        "of a rate: 1 is a Poisson process, less comes in bursts, more is evener",
        type=float,
        default=1.0,
    )
    add("max-concurrency", "requests on their way at a time, at most", type=int)
    add(
        "trace-time-scale",
        "the times of a trace times this: 0.5 is twice as fast",
        type=float,
        default=1.0,
    )


def _add_results(group: argparse._ArgumentGroup) -> None:
    add = _adder(group)
    add(
        "goodput",
        "count the requests within all these limits, in milliseconds, on "
        f"{', '.join(GOODPUT_METRICS)}",
        type=_limit,
        nargs="+",
        default=(),
        metavar="KEY:MS",
    )
    add(
        "percentile-metrics",
        f"times to report, with commas: {', '.join(METRICS)}; unless given, the first four, and "
        "the fifth where requests are timed",
        type=_metric_names,
        metavar="KEYS",
    )
    add(
        "metric-percentiles",
        "percentiles of each, with commas",
        type=_percentiles,
        default="50,90,99",
        metavar="PERCENTS",
    )
    _switch(group, "json", "print the result as JSON, not as a table")
    _switch(group, "save-result", "write the result to a file, as JSON")
    _switch(group, "save-detailed", "with the times of each request")
    add("result-dir", "folder of that file", type=Path, default=Path())
    add("result-filename", "its name; unless given, made of rate, model and date")
    _switch(group, "disable-tqdm", "show no progress")


def _header(text: str) -> tuple[str, str]:
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
