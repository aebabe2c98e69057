"""A server whose model several processes share: the same answers, and an end that is told."""

import contextlib
import json
from pathlib import Path
from typing import Any

import httpx
import psutil

from pagedserve import LLM, SamplingParams, TokensPrompt
from tests.server.conftest import Process
from tests.support.families import save_family


def test_a_server_of_ranks_answers_and_says_when_one_has_died(tmp_path: Path) -> None:
    directory = save_family(tmp_path / "model", "qwen2")
    options = ("--num-gpu-blocks", "64", "--tensor-parallel-size", "2")
    server = Process(tmp_path / "log", str(directory), *options)
    server.wait_until_healthy()
    body: dict[str, Any] = {
        "prompt": [3, 4, 5],
        "max_tokens": 400,
        "temperature": 0,
        "ignore_eos": True,
    }
    llm = LLM(str(directory), num_gpu_blocks=64, use_tqdm_on_load=False)
    [wanted] = llm.generate(
        TokensPrompt(prompt_token_ids=[3, 4, 5]),
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
        use_tqdm=False,
    )
    url = f"{server.url}/v1/completions"
    answer = httpx.post(url, json=body | {"max_tokens": 20}, timeout=60).json()
    assert answer["choices"][0]["text"] == wanted.outputs[0].text
    events: list[str] = []
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=60) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
            if len(events) == 5:
                [rank] = psutil.Process(server.process.pid).children(recursive=True)
                rank.kill()
    *_, last = [json.loads(event) for event in events if event != "[DONE]"]
    said = json.dumps(last)
    assert "rank 1 of 2" in said or last["choices"][0]["finish_reason"] == "error"
    with contextlib.suppress(httpx.TransportError):  # it may have ended by now
        assert httpx.get(f"{server.url}/health", timeout=10).status_code == 503
        assert httpx.post(url, json=body, timeout=10).status_code == 503
    assert server.process.wait() == 1  # by itself
    assert "SIGKILL" in server.log
