"""Command line of ``bench serve``; its implementation is imported when it runs."""

import argparse
from typing import Any

from pagedserve.bench.options import BenchOptions, add_options
from pagedserve.errors import extra_needed

_DESCRIPTION = (
    "Send requests to an OpenAI-compatible server and measure what it answers: throughput, time "
    "to first token, time between tokens, end-to-end time, errors. docs/benchmarking.md says what "
    "each figure means."
)


def add_bench_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add ``bench serve`` to a command line; its ``run`` takes the parsed options."""
    bench = commands.add_parser("bench", help="measure a running server")
    kinds = bench.add_subparsers(dest="bench", required=True)
    serve = kinds.add_parser(
        "serve",
        help="send requests to a server and measure its answers",
        description=_DESCRIPTION,
    )
    add_options(serve)
    serve.set_defaults(run=_run)


def _run(namespace: argparse.Namespace) -> int:
    options = BenchOptions.from_namespace(namespace)
    with extra_needed("pagedserve bench", "bench"):
        from pagedserve.bench.serve import bench_serve
    bench_serve(options)
    return 0
