"""Loads: requests of token ids, all at time 0, with forced lengths.

A workload is a JSON object; each load in it is a list of {"id", "prompt": [ids], "out": tokens}.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from pagedserve import LLM, SamplingParams
from pagedserve.outputs import RequestOutput

# What the requests of --sampling mixed ask for, in turn.
MIXED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 50, "min_p": 0.05},
    {"temperature": 0.0, "presence_penalty": 0.5, "repetition_penalty": 1.1, "logprobs": 5},
    {"temperature": 0.7, "frequency_penalty": 0.3, "logit_bias": {5: -10.0}, "stop": "<never>"},
)
GREEDY: tuple[dict[str, Any], ...] = ({"temperature": 0.0},)


class Request(TypedDict):
    """One request of a load: its prompt and how many tokens to generate."""

    id: int
    prompt: list[int]
    out: int


def read_load(workload: Path, load: str, num_requests: int | None) -> list[Request]:
    """The first requests of a load, None is all of them."""
    requests: list[Request] = json.loads(workload.read_text())[load]
    return requests[:num_requests]


def generate(
    llm: LLM, requests: Sequence[Request], kinds: Sequence[dict[str, Any]] = GREEDY
) -> list[RequestOutput]:
    """Run all requests to exactly the length that each asks for, sampled in these ways in turn."""
    params = [
        SamplingParams(ignore_eos=True, max_tokens=request["out"], **kinds[number % len(kinds)])
        for number, request in enumerate(requests)
    ]
    prompts = [request["prompt"] for request in requests]
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    for request, output in zip(requests, outputs, strict=True):
        if (generated := len(output.outputs[0].token_ids)) != request["out"]:
            raise RuntimeError(f"request {request['id']}: {generated} tokens, not {request['out']}")
    return outputs
