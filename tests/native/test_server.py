"""Adapters and embeddings of a native engine over HTTP."""

from pathlib import Path
from typing import Any

from pagedserve import LLM, EngineArgs, LLMEngine, SamplingParams
from pagedserve.server.options import ServerArgs
from tests.server.conftest import Served
from tests.support.adapter_files import save_adapter
from tests.support.decoders import save_decoder

PROMPT = [1, 5, 9]


def served(model: Path, **options: Any) -> Served:
    args = EngineArgs(str(model), backend="native", use_tqdm_on_load=False, **options)
    how = ServerArgs(
        port=0, uvicorn_log_level="warning", served_model_name=("m",), enable_admin_routes=True
    )
    return Served(lambda: LLMEngine(args), how)


def test_adapters_are_loaded_and_unloaded(tmp_path: Path) -> None:
    model = save_decoder(tmp_path / "model", "llama")
    modules = {f"model.layers.{layer}.mlp.down_proj": (96, 64) for layer in range(3)}
    adapter = save_adapter(tmp_path / "a", modules, rank=16, number=1)
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    with LLM(str(model), backend="torch", enable_lora=True, num_gpu_blocks=16) as llm:
        params = SamplingParams(**greedy)
        outputs = llm.generate([PROMPT] * 2, params, lora_request=[None, adapter], use_tqdm=False)
    base, adapted = (list(output.outputs[0].token_ids) for output in outputs)
    with served(model, enable_lora=True, num_gpu_blocks=16) as running:

        def ask(name: str) -> Any:
            answer = running.complete(model=name, prompt=PROMPT, return_token_ids=True, **greedy)
            return answer.json()["choices"][0]["token_ids"] if answer.is_success else None

        assert ask("a") is None
        body = {"lora_name": "a", "lora_path": adapter.lora_path}
        assert running.http.post("/v1/load_lora_adapter", json=body).is_success
        assert [ask("m"), ask("a")] == [base, adapted]
        assert running.http.post("/v1/unload_lora_adapter", json={"lora_name": "a"}).is_success
        assert [ask("m"), ask("a")] == [base, None]
    assert base != adapted


def test_embeddings(tmp_path: Path) -> None:
    model = save_decoder(tmp_path, "qwen3")
    options: dict[str, Any] = {"runner": "pooling", "num_gpu_blocks": 16}
    with LLM(str(model), backend="torch", **options) as llm:
        (output,) = llm.embed([PROMPT], use_tqdm=False)
    with served(model, **options) as running:
        answer = running.http.post("/v1/embeddings", json={"model": "m", "input": [PROMPT]})
    (found,) = answer.json()["data"]
    assert max(map(abs, map(float.__sub__, found["embedding"], output.outputs.embedding))) < 1e-5
