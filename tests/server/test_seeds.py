"""The same seed, the same tokens: whatever else runs, in chunks, after preemption, from swap."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from pagedserve import SamplingParams
from tests.server.conftest import Process

if TYPE_CHECKING:
    from pagedserve import LLM

# Prompts of some 20 to 150 tokens: several steps of 48 tokens each.
PROMPTS = [
    " ".join(f"{word} {number}" for number in range(length))
    for word, length in (("one", 10), ("river", 40), ("moon", 25), ("glass", 60), ("tea", 15))
]
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.9, "seed": 11, "n": 2},
    {"temperature": 0.7, "seed": 12, "top_p": 0.9},
    {"temperature": 1.0, "seed": 13, "top_k": 40, "repetition_penalty": 1.1},
]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_seeds_hold_over_http(mode: str, tmp_path: Path, smollm2: "LLM") -> None:
    options = ["--num-gpu-blocks", "28", "--max-num-batched-tokens", "48", "--max-num-seqs", "16"]
    server = Process(tmp_path / "log", "smollm2", *options, "--preemption-mode", mode)
    server.wait_until_healthy()
    requests: list[dict[str, Any]] = [
        {"prompt": prompt, "max_tokens": 40, "ignore_eos": True} | params
        for prompt in PROMPTS
        for params in PARAMS
    ]

    def texts(body: dict[str, Any]) -> list[str]:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)
        return [choice["text"] for choice in answer.json()["choices"]]

    with ThreadPoolExecutor(len(requests)) as pool:
        found = list(pool.map(texts, requests))
    metrics = httpx.get(f"{server.url}/metrics").text
    assert server.end() == 0, server.log
    preemptions = re.search(r"^vllm:num_preemptions_total\{.*\} (\S+)$", metrics, re.MULTILINE)
    assert preemptions is not None
    assert float(preemptions[1]) > 0
    params = [
        SamplingParams(**{key: body[key] for key in body if key != "prompt"}) for body in requests
    ]
    outputs = smollm2.generate([body["prompt"] for body in requests], params, use_tqdm=False)
    wanted = [[completion.text for completion in output.outputs] for output in outputs]
    assert found == wanted
