"""The engine on a workload of token ids: all requests at time 0, greedy, forced lengths.

A step's share outside the model is what is left of `LLMEngine.step` when the model's forward pass
is taken out: scheduling, moves, arrays, attention metadata, sampling, detokenisation.

With --peer the script of that path measures transformers' static batches of 16 in a process of its
own, in turn with our runs; only such ratios say something about two programs on one machine, and
only of runs whose other_cores (processor time of everybody else, in cores) is near 0.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from loads import GREEDY, MIXED, Request, generate, read_load
from measuring import Clock, PeakMemory, Stopwatch, quantile, report

from pagedserve import LLM
from pagedserve.models.convert import converted_directory
from pagedserve.models.registry import resolve_model

PEER_BATCH_SIZE = 16


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
    engine = llm.llm_engine
    model = engine._executor.loaded.model  # noqa: SLF001  # measured from outside, on purpose
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


class Peer:
    """The peers' transformers script, run on a float32 copy of the same weights."""

    def __init__(self, script: Path, *, workload: Path, model: str, folder: Path) -> None:
        # The script reads the workload that lies beside it and knows no other.
        if (script.parent / "workload_w.json").read_bytes() != workload.read_bytes():
            raise SystemExit(f"--peer measures the workload in {script.parent}, not {workload}")
        self._script = script.resolve()
        source = resolve_model(model)
        weights = converted_directory(source.path) if source.is_gguf else source.path
        self._environment = os.environ | {"PEER_MODEL": str(weights), "PEER_WORK": str(folder)}

    def measure(self, load: str, num_requests: int) -> dict[str, float]:
        """One run of the peer, with the figures that decide whether it counts."""
        arguments = ("static", "float32", PEER_BATCH_SIZE, load, num_requests, 1)
        done = subprocess.run(
            [sys.executable, str(self._script), *map(str, arguments)],
            env=self._environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        row = json.loads(done.stdout.splitlines()[-1])
        return {
            "generated_per_second": float(row["gen_tps"]),
            "own_cores": float(row["own_cores"]),
            "other_cores": float(row["other_cores"]),
        }


def median(results: Sequence[Result]) -> dict[str, Any]:
    """The median of each figure over the runs."""
    return {
        field.name: statistics.median(getattr(result, field.name) for result in results)
        for field in fields(Result)
    }


def options_from(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", type=Path, required=True, help="JSON file with the loads")
    parser.add_argument("--load", default="W", help="name of the load in it")
    parser.add_argument("--num-requests", type=int, help="only the first so many")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
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
    parser.add_argument("--repeat", type=int, default=1, help="runs; the median is printed too")
    parser.add_argument("--peer", type=Path, metavar="E2E_TF", help="e2e_tf.py to run in turn")
    parser.add_argument("--json", action="store_true", help="one object a line")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the load and print what came out."""
    options = options_from(arguments)
    torch.set_num_threads(options.threads)
    requests = read_load(options.workload, options.load, options.num_requests)
    llm = LLM(
        model=options.model,
        dtype=options.dtype,
        num_gpu_blocks=options.num_gpu_blocks,
        enable_prefix_caching=options.enable_prefix_caching,
        enable_chunked_prefill=options.enable_chunked_prefill,
    )
    kinds = MIXED if options.sampling == "mixed" else GREEDY
    generate(llm, [{**request, "out": 4} for request in requests[:PEER_BATCH_SIZE]])  # warm up
    results, peer_rates = [], []
    with tempfile.TemporaryDirectory() as folder:
        peer = options.peer and Peer(
            options.peer, workload=options.workload, model=options.model, folder=Path(folder)
        )
        for run in range(options.repeat):
            results.append(measure(llm, requests, kinds))
            about = {"load": options.load, "dtype": options.dtype, "run": run + 1}
            report("run", {**about, **asdict(results[-1])}, as_json=options.json)
            if peer:
                row = peer.measure(options.load, len(requests))
                peer_rates.append(row["generated_per_second"])
                report("peer", {"run": run + 1, **row}, as_json=options.json)
    if options.repeat > 1:
        report("median", median(results), as_json=options.json)
    if peer_rates:
        theirs = statistics.median(peer_rates)
        ours = statistics.median(result.generated_per_second for result in results)
        figures = {"peer_generated_per_second": theirs, "ratio": ours / theirs}
        report("ratio", figures, as_json=options.json)


if __name__ == "__main__":
    main()
