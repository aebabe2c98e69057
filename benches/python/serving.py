"""A server's streams of chats beside the same conversations offline, and beside vLLM's server.

Each round starts each program in a process of its own, one after the other (vLLM's threads spin for
as long as they live), lets it answer all conversations at once, some times, and ends it.  The
conversations are greedy, of some 64 tokens, with answers of a forced length.  The load generator is
`pagedserve bench serve`, on the same processors, for every server.

    python benches/python/serving.py --vllm-python VENV/bin/python
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from measuring import Clock, report, report_table
from servers import KV_CACHE_BYTES, free_port, running, server_command

Row = dict[str, Any]

SUBJECTS = ("a river", "the moon", "old trains", "a good soup", "chess", "whales", "winter")
TASK = (
    "Write the beginning of a short story about {subject}, number {number} of a series, in plain "
    "words. Let it have two people in it who have known each other for a long time, and let them "
    "disagree about something small."
)


def conversations(number: int) -> list[list[dict[str, str]]]:
    """So many different conversations of one message."""
    return [
        [
            {
                "role": "user",
                "content": TASK.format(subject=SUBJECTS[place % len(SUBJECTS)], number=place),
            }
        ]
        for place in range(number)
    ]


@dataclass
class StepTimes:
    """How long the steps of an engine are; offline a token comes with each."""

    seconds: list[float] = field(default_factory=list)

    def timed(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """A step that does the same and is timed."""

        def timed_step() -> Any:
            started = time.perf_counter()
            outputs = step()
            self.seconds.append(time.perf_counter() - started)
            return outputs

        return timed_step


def offline_rows(options: argparse.Namespace) -> Iterator[Row]:
    """What `LLM.chat` reaches, in this process."""
    from pagedserve import LLM, SamplingParams

    llm = LLM(
        options.model,
        dtype="float32",
        max_num_seqs=options.concurrency,
        kv_cache_memory=KV_CACHE_BYTES,
        enable_chunked_prefill=True,  # as both servers
    )
    params = SamplingParams(temperature=0, max_tokens=options.output_len, ignore_eos=True)
    messages = conversations(options.concurrency)
    for _ in range(1 + options.runs):
        steps = StepTimes()
        timed = steps.timed(llm.llm_engine.step)
        with Clock() as clock, patch.object(llm.llm_engine, "step", timed):
            outputs = llm.chat(messages, params, use_tqdm=False)
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        yield {
            "tokens_per_second": tokens / clock.seconds,
            "itl_p50_ms": 1e3 * statistics.median(steps.seconds),
            "other_cores": clock.other_cores,
        }


def server_rows(options: argparse.Namespace, command: Sequence[str], port: int) -> Iterator[Row]:
    """What a server reaches, once it is healthy."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as dataset, running(command, port):
        for messages in conversations(options.concurrency):
            dataset.write(json.dumps({"messages": messages}) + "\n")
        dataset.flush()
        bench = [sys.executable, "-m", "pagedserve", "bench", "serve", "--port", str(port)]
        bench += ["--json", "--backend", "openai-chat", "--dataset-name", "custom", "--ignore-eos"]
        bench += ["--dataset-path", dataset.name, "--num-prompts", str(options.concurrency)]
        bench += ["--custom-output-len", str(options.output_len), "--disable-tqdm"]
        bench += ["--extra-body", '{"temperature": 0}']
        for _ in range(1 + options.runs):
            done = subprocess.run(bench, check=True, stdout=subprocess.PIPE)
            found = json.loads(done.stdout)
            if found["completed"] != options.concurrency:
                raise SystemExit(f"{command[0]}: {found['completed']} requests were answered")
            yield {
                "tokens_per_second": found["output_throughput"],
                "ttft_p50_ms": found["p50_ttft_ms"],
                "ttft_p99_ms": found["p99_ttft_ms"],
                "itl_p50_ms": found["p50_itl_ms"],
                "itl_p99_ms": found["p99_itl_ms"],
            }


def rows_of(program: str, options: argparse.Namespace) -> list[Row]:
    """One round of a program, without its first run, which warms it up."""
    port = free_port()
    if program == "offline":
        command = [sys.executable, __file__, "--offline", "--model", options.model]
        for name in ("concurrency", "output_len", "runs"):
            command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        return [json.loads(line) for line in done.stdout.splitlines()][1:]
    vllm_python = options.vllm_python if program == "vllm" else None
    command = server_command(options.model, port, vllm_python)
    command += ["--max-num-seqs", str(options.concurrency)]
    command += ["--no-enable-prefix-caching"]  # the same conversations come again
    return list(server_rows(options, command, port))[1:]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all programs round after round, and print the medians and their ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--concurrency", type=int, default=64, help="conversations at once")
    parser.add_argument("--output-len", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", type=int, default=2, help="measured runs of a program a round")
    parser.add_argument("--vllm-python", type=Path, help="the interpreter vllm is installed for")
    parser.add_argument("--json", action="store_true", help="write one JSON object a line")
    parser.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.offline:
        for row in offline_rows(options):
            print(json.dumps(row), flush=True)
        return
    programs = ["pagedserve", "offline", *(["vllm"] if options.vllm_python else [])]
    rows: dict[str, list[Row]] = {program: [] for program in programs}
    for number in range(1, options.rounds + 1):
        for program in programs:
            for row in rows_of(program, options):
                rows[program].append(row)
                report("run", {"program": program, "round": number, **row}, as_json=options.json)
    report_table("median", table(rows), as_json=options.json)


def table(rows: dict[str, list[Row]]) -> list[Row]:
    """The medians of each program, and how many times its tokens/s the first one's are."""
    first = statistics.median(row["tokens_per_second"] for row in rows["pagedserve"])
    names = list(rows["pagedserve"][0])
    shown: list[Row] = []
    for program, measured in rows.items():
        medians = {
            name: statistics.median(row[name] for row in measured) if name in measured[0] else None
            for name in names
        }
        ratio = first / medians["tokens_per_second"]
        shown.append({"program": program, **medians, "pagedserve / it": ratio})
    return shown


if __name__ == "__main__":
    main()
