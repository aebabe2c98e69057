"""What only a GPU can show of the engine; `make gpu-check` runs it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedserve import LLM, ConfigError, SamplingParams
from pagedserve.device import Cuda
from pagedserve.sampling.on_gpu import GpuOps
from pagedserve.sampling.rows import RowSampling
from pagedserve.sampling.sampler import Sampler
from tests.support.adapter_files import save_adapter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
PROMPTS = [[5, 6, 7], list(range(20, 60)), [11]]


def load(directory: Path, **options: Any) -> LLM:
    config = CONFIG | {"model_type": options.pop("model_type", "llama")}
    (directory / "config.json").write_text(json.dumps(config))
    given: dict[str, Any] = {
        "load_format": "dummy",
        "device": "cuda",
        "dtype": "float32",
        "max_num_seqs": 8,
    }
    return LLM(str(directory), **(given | options))


def tokens(llm: LLM, lora_request: Any = None, **params: Any) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, **params)
    outputs = llm.generate(
        prompt_token_ids=PROMPTS,
        sampling_params=sampling,
        use_tqdm=False,
        lora_request=lora_request,
    )
    return [output.outputs[0].token_ids for output in outputs]


def test_graphs_give_the_tokens_of_the_eager_engine(tmp_path: Path) -> None:
    eager = load(tmp_path, enforce_eager=True, num_gpu_blocks=64)
    graphs = load(tmp_path, num_gpu_blocks=64)
    for params in ({"temperature": 0}, {"temperature": 1.0, "seed": 3}):
        assert tokens(graphs, **params) == tokens(eager, **params)


def test_graphs_and_kernels_of_adapters_give_the_tokens_of_torch(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_gpu_blocks": 64, "enable_lora": True, "max_lora_rank": 16}
    plain = load(tmp_path, attention_backend="torch", enforce_eager=True, **options)
    kernels = load(tmp_path, attention_backend="triton", **options)
    inside = {"self_attn.q_proj": (128, 128), "self_attn.v_proj": (128, 64)}
    inside |= {"mlp.gate_proj": (128, 128), "mlp.down_proj": (128, 128)}
    layers = {f"model.layers.{n}.{name}": inside[name] for n in range(2) for name in inside}
    ends = {"model.embed_tokens": (512, 128), "lm_head": (128, 512)}
    wanted = [
        save_adapter(tmp_path / "layers", layers, rank=16, number=1),
        save_adapter(tmp_path / "ends", ends, rank=5, number=2),
        None,
    ]
    found = tokens(kernels, lora_request=wanted, temperature=0)
    assert found == tokens(plain, lora_request=wanted, temperature=0)
    assert found != tokens(kernels, temperature=0), "else nothing here would show anything"
    assert tokens(kernels, temperature=0) == tokens(plain, temperature=0)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_fused_layers_give_the_tokens_of_the_torch_backend(tmp_path: Path, model_type: str) -> None:
    options: dict[str, Any] = {"model_type": model_type, "num_gpu_blocks": 64}
    plain = load(tmp_path, attention_backend="torch", enforce_eager=True, **options)
    fused = load(tmp_path, attention_backend="triton", **options)
    assert "decoder layers 2" in fused.llm_engine.model_info.backends
    assert tokens(fused, temperature=0) == tokens(plain, temperature=0)


def test_steps_that_go_ahead_give_the_tokens_of_those_that_wait(tmp_path: Path) -> None:
    waits = load(tmp_path, async_scheduling=False, num_gpu_blocks=64)
    for options in ({}, {"enforce_eager": True}, {"num_gpu_blocks": 6}):
        ahead = load(tmp_path, **{"num_gpu_blocks": 64, **options})
        for params in ({"temperature": 0}, {"temperature": 1.0, "seed": 3, "top_p": 0.9}):
            assert tokens(ahead, **params) == tokens(waits, **params)
        assert ahead.llm_engine.stats.num_async_steps > 10
        assert waits.llm_engine.stats.num_async_steps == 0


def test_the_profile_run_leaves_the_share_that_was_asked_for(tmp_path: Path) -> None:
    llm = load(tmp_path, gpu_memory_utilization=0.5)
    tokens(llm, temperature=0)
    free, total = torch.cuda.mem_get_info()
    # The allocator rounds; beyond that no step takes more than was set aside.
    assert total - free <= 0.5 * total + (256 << 20)
    assert llm.llm_engine.memory.pool_bytes > 0.3 * total


def test_a_step_that_cannot_fit_is_refused_with_the_sum(tmp_path: Path) -> None:
    huge = CONFIG["vocab_size"] * torch.cuda.mem_get_info()[1] // (1 << 20)
    with pytest.raises(
        ConfigError, match=r"out of memory in the profile run.*weights take .*lower"
    ):
        load(tmp_path, max_num_seqs=huge, max_num_batched_tokens=huge)


def test_the_sampler_draws_on_the_gpu_what_it_draws_on_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 1000, generator=generator) * 3
    logits[5, 7] = torch.nan
    rows = [
        RowSampling(temperature=0.0),
        *(RowSampling(temperature=0.9, uniforms=(n / 7,)) for n in range(4)),
        RowSampling(temperature=1.0, uniforms=(0.5,)),
        RowSampling(temperature=1.0, top_p=0.8, uniforms=(0.2, 0.6)),
        RowSampling(temperature=1.0, top_k=5, uniforms=(0.9,)),
        RowSampling(temperature=0.0, num_logprobs=3),
    ]
    here = Sampler().sample(logits.numpy(), rows)
    there = Sampler(GpuOps(Cuda(torch.device("cuda", 0)))).sample(logits.cuda(), rows)
    assert here.tokens.tolist() == there.tokens.tolist()
    assert here.errors == there.errors
    assert list(here.errors) == [5]
