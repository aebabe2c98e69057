"""Typed decisions a second of pagedserve's server, and of vLLM's on the same load.

A decision is a request of several questions about a state that was never seen before.  Both servers
run from the beginning to the end, and take their decisions in turn, since the speed of a machine
changes: with one client, and with several, once all of the cache's memory has been written.  Both
compute in the same dtype and cache prefixes.  vLLM decides with Qwen3 alone of the models here, so
the model is a Qwen3 of SmolLM2-135M's sizes and tokenizer with random weights.

    python benches/python/decision_load.py --vllm-python VENV/bin/python
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from http.client import HTTPConnection
from itertools import count, islice, product
from pathlib import Path
from typing import Any

import torch
from decisions import questions_of
from measuring import report, report_table
from servers import free_port, running, server_command
from transformers import AutoConfig, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from pagedserve.models.load.convert import converted_directory
from pagedserve.models.load.sources import resolve_model

# SmolLM2 makes 12 tokens of it.
SENTENCE = "The parcel was sent to another town and came back unopened. "
TOKENS_OF_SENTENCE = 12
# Fields of a config that Llama and Qwen3 have in common.
SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings",
)  # fmt: skip


def save_qwen3(directory: Path) -> None:
    """Save a Qwen3 of SmolLM2-135M's sizes, with its tokenizer."""
    like = converted_directory(resolve_model("smollm2").path)
    sizes = AutoConfig.from_pretrained(like).to_dict()
    torch.manual_seed(0)
    config = Qwen3Config(**{name: sizes[name] for name in SIZES}, tie_word_embeddings=True)
    # As Qwen3 is published.
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(directory)
    AutoTokenizer.from_pretrained(like).save_pretrained(directory)


def decision(number: int, num_questions: int, num_tokens: int) -> bytes:
    """Body of a decision whose state begins as no other."""
    state = f"{number}: " + SENTENCE * (num_tokens // TOKENS_OF_SENTENCE)
    return json.dumps({"state": state, "questions": questions_of(num_questions)}).encode()


def decide(port: int, body: bytes) -> None:
    """Send a decision; each of its questions is answered."""
    connection = HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/v1/systemone", body, {"Content-Type": "application/json"})
    answer = json.load(connection.getresponse())
    connection.close()
    if answer.get("answers", {}).keys() != json.loads(body)["questions"].keys():
        raise SystemExit(f"not all questions were answered: {answer}")


def decisions_a_second(port: int, bodies: Sequence[bytes], num_clients: int) -> float:
    """Rate at which so many clients at once get their decisions."""
    with ThreadPoolExecutor(num_clients) as clients:
        began = time.perf_counter()
        list(clients.map(partial(decide, port), bodies))
        return len(bodies) / (time.perf_counter() - began)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both servers in turn, and print the medians and their ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--state-tokens", type=int, default=512)
    parser.add_argument("--clients", type=int, default=8, help="at once, besides one alone")
    parser.add_argument("--decisions", type=int, default=24, help="of each load and turn")
    parser.add_argument(
        "--warm",
        type=int,
        default=120,
        help="decisions before a measurement; 120 write all of the cache's memory once",
    )
    parser.add_argument("--turns", type=int, default=3, help="of each server")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--vllm-python", type=Path, help="the interpreter vllm is installed for")
    parser.add_argument("--json", action="store_true", help="write one JSON object a line")
    options = parser.parse_args(arguments)
    make = partial(decision, num_questions=options.questions, num_tokens=options.state_tokens)
    programs: dict[str, Path | None] = {"pagedserve": None}
    if options.vllm_python is not None:
        programs["vllm"] = options.vllm_python
    ports = dict[str, int]()
    states = {program: map(make, count()) for program in programs}
    loads = (1, options.clients)
    rates: dict[tuple[str, int], list[float]] = {
        (program, load): [] for program in programs for load in loads
    }
    with tempfile.TemporaryDirectory() as directory, ExitStack() as servers:
        save_qwen3(Path(directory))
        for program, python in programs.items():
            ports[program] = free_port()
            command = server_command(directory, ports[program], python, options.dtype)
            servers.enter_context(running(command, ports[program]))
            before = [*islice(states[program], options.warm)]
            decisions_a_second(ports[program], before, options.clients)
        for turn, load, program in product(range(options.turns), loads, programs):
            bodies = [*islice(states[program], options.decisions)]
            rate = decisions_a_second(ports[program], bodies, load)
            rates[program, load].append(rate)
            row = {"program": program, "clients": load, "decisions_per_second": rate}
            report("run", {"turn": turn, **row}, as_json=options.json)
    report_table("median", table(rates), as_json=options.json)


def table(rates: dict[tuple[str, int], list[float]]) -> list[dict[str, Any]]:
    """Median rate of each program and load, and how many times it pagedserve's is."""
    medians = {key: statistics.median(each) for key, each in rates.items()}
    return [
        {
            "program": program,
            "clients": load,
            "decisions_per_second": rate,
            "pagedserve / it": medians["pagedserve", load] / rate,
        }
        for (program, load), rate in medians.items()
    ]


if __name__ == "__main__":
    main()
