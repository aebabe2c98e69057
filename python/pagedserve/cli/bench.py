"""``pagedserve bench``: benchmarks of a running server, or of an engine in this process.

Their implementations are imported when they run.
"""

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from pagedserve.bench.options import BenchOptions, add_options
from pagedserve.cli.early import check_early
from pagedserve.config import EngineArgs
from pagedserve.config.sampling import DEFAULT_PARAMS
from pagedserve.engine_bench.options import LatencyOptions, StartupOptions, ThroughputOptions
from pagedserve.errors import ConfigError, extra_needed
from pagedserve.native.choice import choose_backend

if TYPE_CHECKING:
    from pagedserve.engine_bench.result import BenchResult

_SERVE = (
    "Send requests to an OpenAI-compatible server and measure what it answers: throughput, time "
    "to first token, time between tokens, end-to-end time, errors. docs/benchmarking.md says what "
    "each figure means."
)
_LATENCY = "Measure the seconds that one batch takes, from its prompts to its last token."
_THROUGHPUT = "Measure requests and tokens per second, all requests given at once."
_STARTUP = "Measure the seconds of a start with empty caches, and with full ones."


def add_bench_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the benchmarks to a command line; the ``run`` of each takes the parsed options."""
    bench = commands.add_parser("bench", help="measure a running server, or an engine")
    kinds = bench.add_subparsers(required=True)
    serve = kinds.add_parser(
        "serve",
        help="send requests to a server and measure its answers",
        description=_SERVE,
    )
    add_options(serve)
    serve.set_defaults(run=_run_serve)
    _add_engine_bench(kinds, "latency", LatencyOptions, _LATENCY)
    _add_engine_bench(kinds, "throughput", ThroughputOptions, _THROUGHPUT)
    _add_engine_bench(kinds, "startup", StartupOptions, _STARTUP)


def _add_engine_bench(
    kinds: "argparse._SubParsersAction[Any]",
    name: str,
    options: type[LatencyOptions | ThroughputOptions | StartupOptions],
    description: str,
) -> None:
    parser = kinds.add_parser(
        name,
        usage=f"pagedserve bench {name} --model MODEL [options]",
        help=f"{description[0].lower()}{description[1:-1]}",
        description=description,
    )
    options.add_to(parser)
    EngineArgs.add_cli_args(parser, without=DEFAULT_PARAMS)
    parser.set_defaults(run=partial(_run_engine_bench, name, options))


def _run_serve(namespace: argparse.Namespace) -> int:
    options = BenchOptions.from_namespace(namespace)
    with extra_needed("pagedserve bench", "bench"):
        from pagedserve.bench.serve import bench_serve
    bench_serve(options)
    return 0


def _run_engine_bench(
    name: str,
    kind: type[LatencyOptions | ThroughputOptions | StartupOptions],
    namespace: argparse.Namespace,
) -> int:
    options = kind.from_namespace(namespace)
    if namespace.model is None:
        raise ConfigError("no model: give --model")
    args = EngineArgs.from_cli_args(namespace)
    command, extra = f"pagedserve bench {name}", choose_backend(args).extra
    check_early(args, command, extra)
    with extra_needed(command, extra):
        result = _measure(args, options)
    print("\n".join(result.lines))
    if options.output_json is not None:
        from pagedserve.bench.files import write_json

        write_json(options.output_json, result.fields)
    return 0


def _measure(
    args: EngineArgs, options: LatencyOptions | ThroughputOptions | StartupOptions
) -> "BenchResult":
    match options:
        case LatencyOptions():
            from pagedserve.engine_bench.latency import measure_latency

            return measure_latency(args, options)
        case ThroughputOptions():
            from pagedserve.engine_bench.throughput import measure_throughput

            return measure_throughput(args, options)
    from pagedserve.engine_bench.startup import measure_startup

    return measure_startup(args, options)
