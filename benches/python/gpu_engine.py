"""The engine on a GPU: its tokens, the time of its decode steps, its throughput.

Each part is run by itself and prints bars as lines of JSON (`measuring.report`): a name, what is
asked, what was measured, and whether it holds.

exact: a tiny random model in float32; tokens of our backends, eager and with CUDA graphs, with
steps that go ahead and that wait, with swapping and with a prefix cache, against transformers' own
generate, prompt by prompt.
decode: an 8-billion-parameter Llama shape with made-up weights in bfloat16; the time of a step
against that of its bytes (weights without the embedding, which is only looked up in, and all keys
and values) at the copy bandwidth of the same run.
throughput: the same shape, prompts of 16 to 512 tokens and 128 new ones, since transformers'
`generate_batch` has one length for all requests.
ranks: the tiny model on two GPUs, eager and with CUDA graphs, against one; then a rank is killed.
"""

import argparse
import contextlib
import gc
import json
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import report
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from pagedserve import LLM, LLMEngine, SamplingParams
from pagedserve.errors import ExecutorDeadError
from pagedserve.inputs import TokensPrompt
from pagedserve.models.load.dummy import dummy_model
from pagedserve.sampling_params import RequestOutputKind

TINY: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
}
LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "eos_token_id": None,
    "bos_token_id": None,
    "dtype": "bfloat16",
}
# Nobody is swapped out here, so no host memory is pinned.
SERVED: dict[str, Any] = {
    "load_format": "dummy",
    "device": "cuda",
    "max_model_len": 2048,
    "max_num_seqs": 128,
    "swap_space": 0.0,
}
EXACT_TOKENS = 24
CONTEXT = 1024
NUM_STEPS = 32
# Batch, and the most times that a step may take what its bytes do.
DECODE_BARS = ((1, 1.3), (128, 1.6))
MOST_OUTSIDE = 0.05
# Between two kernels of one step there is less.
LAUNCH_GAP_US = 10.0
NUM_REQUESTS, NUM_NEW, LEAST_RATIO = 128, 128, 3.0


def bar(name: str, asked: str, measured: str, *, holds: bool) -> None:
    """Print one bar."""
    row = {"name": name, "bar": asked, "measured": measured, "holds": holds}
    report("bar", row, as_json=True)


def directory_of(config: dict[str, Any], folder: str) -> str:
    """A directory with nothing but this config."""
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return folder


def free_memory() -> None:
    """Give back what deleted models held."""
    gc.collect()
    torch.cuda.empty_cache()


def tokens_of(llm: LLM, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """Greedy tokens of all prompts, run together."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def theirs(directory: str, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Greedy tokens of transformers with the same weights, one prompt at a time."""
    device = torch.device("cuda", torch.cuda.current_device())
    config = AutoConfig.from_pretrained(directory)
    model: Any = dummy_model(
        config, attention="eager", dtype=torch.float32, device=device, seed=0
    ).eval()
    tokens = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=EXACT_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        tokens.append(output[0, len(prompt) :].tolist())
    return tokens


def exact(directory: str) -> None:
    """Tokens of every way to run against those of transformers."""
    random = np.random.default_rng(0)
    shared = random.integers(3, 500, 40).tolist()
    lengths = (1, 7, 16, 33, 100, 200)
    prompts = [random.integers(3, 500, length).tolist() for length in lengths]
    prompts += [shared + prompt[:5] for prompt in prompts[1:]]
    expected = theirs(directory, prompts)
    ways: dict[str, dict[str, Any]] = {
        "torch": {"attention_backend": "torch"},
        "triton, eager": {"attention_backend": "triton", "enforce_eager": True},
        "triton, graphs": {"attention_backend": "triton"},
        "no step ahead": {"async_scheduling": False},
        "swap": {"num_gpu_blocks": 40, "preemption_mode": "swap", "swap_space": 0.1},
        "prefix cache": {"enable_prefix_caching": True},
        "prefix cache, chunks, swap": {
            "enable_prefix_caching": True,
            "enable_chunked_prefill": True,
            "max_num_batched_tokens": 64,
            "num_gpu_blocks": 40,
            "preemption_mode": "swap",
            "swap_space": 0.1,
        },
    }
    for name, options in ways.items():
        arguments: dict[str, Any] = {"num_gpu_blocks": 400, "max_num_seqs": 16, "seed": 0}
        arguments |= {"load_format": "dummy", "dtype": "float32", "device": "cuda"} | options
        llm = LLM(directory, **arguments)
        twice = [tokens_of(llm, prompts, EXACT_TOKENS) for _ in range(2)]
        pairs = [pair for got in twice for pair in zip(got, expected, strict=True)]
        num_equal = sum(found == wanted for found, wanted in pairs)
        scheduler = llm.llm_engine.scheduler
        swapped = scheduler.num_preemptions > 0 or "preemption_mode" not in options
        holds = num_equal == len(pairs) and swapped
        measured = f"{num_equal} of {len(pairs)}, {scheduler.num_preemptions} preemptions"
        bar(f"tokens, {name}", "transformers' own", measured, holds=holds)
        del llm, scheduler
        free_memory()


def copy_bandwidth() -> float:
    """Bytes a second that a copy within the device reads and writes, the best of a few."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return float(2 * source.numel() / min(times))


def start_decoding(engine: LLMEngine, batch: int) -> None:
    """Take up so many requests and step until all of them decode, CONTEXT tokens behind each."""
    params = SamplingParams(
        temperature=0,
        max_tokens=4 * NUM_STEPS,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    random = np.random.default_rng(batch)
    for number in range(batch):
        prompt = random.integers(0, 100_000, CONTEXT - NUM_STEPS).tolist()
        request = TokensPrompt(prompt_token_ids=prompt)
        engine.add_request(f"{batch}-{number}", request, params)
    while engine.scheduler.num_waiting:
        engine.step()
    for _ in range(4):
        engine.step()


def step_seconds(engine: LLMEngine, num_steps: int) -> list[float]:
    """Run so many steps and time each."""
    times = []
    for _ in range(num_steps):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    return times


def outside_gpu(run: Callable[[], object]) -> float:
    """Share of the time in which the GPU has nothing to do, gaps between kernels left out."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiled.events() or ()
        if event.device_type.name == "CUDA"
    )
    if not spans:
        raise RuntimeError("the profiler saw no kernel")
    idle, busy_until = 0.0, spans[0][1]
    for start, end in spans:
        if start - busy_until > LAUNCH_GAP_US:
            idle += start - busy_until
        busy_until = max(busy_until, end)
    return float(idle / (busy_until - spans[0][0]))


def decode(directory: str) -> None:
    """Time of a decode step against that of its bytes."""
    bandwidth = copy_bandwidth()
    llm = LLM(directory, **SERVED)
    engine = llm.llm_engine
    embedding = LLAMA_8B["vocab_size"] * LLAMA_8B["hidden_size"] * torch.bfloat16.itemsize
    weights = engine.memory.weight_bytes - embedding
    per_token = engine.memory.block_bytes / engine.memory.block_size
    for batch, most in DECODE_BARS:
        start_decoding(engine, batch)
        step = statistics.median(step_seconds(engine, NUM_STEPS))
        needed = (weights + batch * CONTEXT * per_token) / bandwidth
        measured = f"{step * 1e3:.2f} ms, {step / needed:.2f} x {needed * 1e3:.2f} ms"
        about = f"decode step, batch {batch}, context {CONTEXT}"
        bar(about, f"{most} x its bytes", measured, holds=step <= most * needed)
        share = outside_gpu(partial(step_seconds, engine, 8))
        asked = f"under {MOST_OUTSIDE:.0%}" if batch > 1 else "no bar"
        holds = share < MOST_OUTSIDE or batch == 1
        bar(f"time outside the GPU, batch {batch}", asked, f"{share:.1%}", holds=holds)
        engine.abort_request([f"{batch}-{number}" for number in range(batch)])
    print(f"copy bandwidth {bandwidth / 1e9:.0f} GB/s", flush=True)


def throughput(directory: str) -> None:
    """New tokens a second, ours and transformers' continuous batching, the same weights."""
    random = np.random.default_rng(1)
    lengths = np.exp(random.uniform(np.log(16), np.log(512), NUM_REQUESTS)).astype(int)
    prompts = [random.integers(0, 100_000, length).tolist() for length in lengths]
    llm = LLM(directory, **SERVED)
    tokens_of(llm, prompts, 8)
    started = time.perf_counter()
    tokens_of(llm, prompts, NUM_NEW)
    ours = NUM_REQUESTS * NUM_NEW / (time.perf_counter() - started)
    del llm
    free_memory()
    print(f"ours: {ours:.0f} new tokens/s", flush=True)
    rate = continuous_batching(directory, prompts)
    bar(
        "throughput against transformers' generate_batch",
        f"{LEAST_RATIO:.0f} times",
        f"{ours:.0f} and {rate:.0f} tokens/s, {ours / rate:.2f} times",
        holds=ours >= LEAST_RATIO * rate,
    )


def continuous_batching(directory: str, prompts: list[list[int]]) -> float:
    """New tokens a second of transformers, the second of two runs of one manager."""
    device = torch.device("cuda", torch.cuda.current_device())
    config = AutoConfig.from_pretrained(directory)
    model: Any = dummy_model(config, attention="sdpa", dtype=torch.bfloat16, device=device, seed=0)
    model.eval().requires_grad_(requires_grad=False)
    settings = GenerationConfig(
        max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    seconds = 0.0
    for _ in range(2):
        started = time.perf_counter()
        outputs = model.generate_batch(
            prompts, generation_config=settings, persistent_manager=True, progress_bar=False
        )
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    num_new = sum(len(output.generated_tokens) for output in outputs.values())
    if num_new != NUM_REQUESTS * NUM_NEW:
        raise RuntimeError(f"transformers made {num_new} tokens, not {NUM_REQUESTS * NUM_NEW}")
    return num_new / seconds


def ranks(directory: str) -> None:
    """Tokens of two ranks, a GPU each, against those of one; and a rank that is killed."""
    config = AutoConfig.from_pretrained(directory)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    words = WordLevel({f" {number}": number for number in range(config.vocab_size)}, " 0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(directory)
    random = np.random.default_rng(2)
    prompts = [random.integers(3, 500, length).tolist() for length in (1, 7, 33, 100, 200)]
    arguments: dict[str, Any] = {"num_gpu_blocks": 400, "max_num_seqs": 16, "device": "cuda"}
    arguments["dtype"] = "float32"
    llm = LLM(directory, **arguments)
    expected = tokens_of(llm, prompts, EXACT_TOKENS)
    del llm
    free_memory()
    ways: dict[str, dict[str, Any]] = {
        "eager": {"enforce_eager": True},
        "graphs": {},
        "prefix cache, chunks": {"enable_prefix_caching": True, "enable_chunked_prefill": True},
    }
    for name, options in ways.items():
        llm = LLM(directory, tensor_parallel_size=2, **arguments, **options)
        same = [tokens_of(llm, prompts, EXACT_TOKENS) == expected for _ in range(2)]
        bar(f"tokens of two ranks, {name}", "one's, twice", str(same), holds=all(same))
        if name == "graphs":
            kill_rank(llm, prompts, expected)
        del llm
        free_memory()


def kill_rank(llm: LLM, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """A rank is killed while its graphs run: that is said, and a restart mends it."""
    [rank] = rank_pids()
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.perf_counter())
        os.kill(rank, signal.SIGKILL)

    threading.Timer(0.2, kill).start()
    try:
        while True:
            tokens_of(llm, prompts, 8 * EXACT_TOKENS)
    except ExecutorDeadError as error:
        seconds = time.perf_counter() - killed[0]
        bar("a rank is killed", "said within 1 s", f"{seconds:.2f} s: {error}", holds=seconds < 1)
    llm.llm_engine.restart()
    holds = tokens_of(llm, prompts, EXACT_TOKENS) == expected
    bar("restart of the ranks", "the same tokens", str(holds), holds=holds)


def rank_pids() -> list[int]:
    """The processes that run a rank of this one."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and "executor.rank" in (process / "cmdline").read_text():
                found.append(int(process.name))
    return found


PARTS: dict[str, tuple[Callable[[str], None], dict[str, Any]]] = {
    "exact": (exact, TINY),
    "decode": (decode, LLAMA_8B),
    "throughput": (throughput, LLAMA_8B),
    "ranks": (ranks, TINY),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    run, config = PARTS[parser.parse_args(arguments).part]
    with tempfile.TemporaryDirectory() as folder:
        run(directory_of(config, folder))


if __name__ == "__main__":
    main()
