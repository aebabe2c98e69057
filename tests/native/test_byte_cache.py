"""KV cache in bytes, against transformers with a cache that rounds keys and values alike."""

from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import pagedserve.native.load
from pagedserve import LLM, SamplingParams
from pagedserve.config import EngineArgs
from pagedserve.config.cache import KVCacheDtype
from pagedserve.errors import ConfigError
from pagedserve.inputs import TokensPrompt
from pagedserve.models.load.sources import find_local
from pagedserve.models.tokenizer.loader import load_tokenizer
from pagedserve.native.load import LoadedNative, load_native, open_native
from pagedserve.quantize.likelihood import windows
from tests.support.decoders import VOCAB_SIZE, save_decoder
from tests.support.native import logits_of
from tests.support.rounding_cache import LEVELS, RoundingCache

TOKENS = np.random.default_rng(5).integers(0, VOCAB_SIZE, 80, np.int32)
SIXTEEN: dict[str, Any] = {"head_dim": 16}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


each_dtype = pytest.mark.parametrize("cache_dtype", LEVELS)


def load(path: Path, **options: Any) -> LoadedNative:
    return load_native(EngineArgs(str(path), backend="native", **options))


@each_dtype
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mistral"])
def test_logits_are_those_of_rounded_keys_and_values(
    tmp_path: Path, name: str, cache_dtype: KVCacheDtype
) -> None:
    directory = save_decoder(tmp_path, name, **SIXTEEN)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = torch.from_numpy(TOKENS)[None].long()
    with torch.inference_mode():
        expected = model(ids, past_key_values=RoundingCache(cache_dtype)).logits[0].numpy()
        exact = model(ids).logits[0].numpy()
    found = logits_of(load(directory), TOKENS, cache_dtype=cache_dtype)
    errors = np.abs(found - expected)
    # A number that lies between two levels may be rounded to the other by a float's last bit.
    assert np.median(errors) < 0.1 * np.median(np.abs(exact - expected))
    assert errors.max() < 0.01 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        ("float32", "int8"),
        ("bfloat16", "int8"),
        ("float16", "int8"),
        ("float32", "fp8_e4m3"),
        ("bfloat16", "fp8_e5m2"),
    ],
)
def test_rows_are_the_same_in_any_chunks_and_on_any_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, cache_dtype: KVCacheDtype
) -> None:
    directory = save_decoder(tmp_path, "qwen3", **SIXTEEN)
    found: list[NDArray[Any]] = []
    for num_threads in (1, 2):
        monkeypatch.setattr(pagedserve.native.load, "num_compute_threads", lambda n=num_threads: n)
        loaded = load(directory, dtype=dtype)
        found.append(logits_of(loaded, TOKENS, cache_dtype=cache_dtype))
        found.append(logits_of(loaded, TOKENS, 1, 2, 40, 77, 79, cache_dtype=cache_dtype))
    for other in found[1:]:
        assert np.array_equal(found[0], other)


def tokens_of(llm: LLM, prompts: list[TokensPrompt]) -> list[list[list[int]]]:
    params = [GREEDY, SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=24, ignore_eos=True)]
    chosen = [params[number % 2] for number in range(len(prompts))]
    outputs = llm.generate(prompts, chosen, use_tqdm=False)
    return [[list(completion.token_ids) for completion in output.outputs] for output in outputs]


@pytest.mark.parametrize(
    ("backend", "cache_dtype"), [("native", "int8"), ("native", "fp8_e4m3"), ("torch", "int8")]
)
def test_little_memory_and_shared_prefixes_change_no_token(
    tmp_path: Path, backend: Any, cache_dtype: KVCacheDtype
) -> None:
    directory = str(save_decoder(tmp_path, "llama", **SIXTEEN))
    prompts: list[TokensPrompt] = [
        {"prompt_token_ids": [*TOKENS[:33].tolist(), *TOKENS[number : number + 9].tolist()]}
        for number in range(16)
    ]
    options: dict[str, Any] = {"backend": backend, "kv_cache_dtype": cache_dtype}
    with LLM(directory, num_gpu_blocks=200, **options) as ample:
        expected = tokens_of(ample, prompts)
        assert ample.llm_engine.scheduler.num_preemptions == 0
    tight: dict[str, Any] = {
        "num_gpu_blocks": 24,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 24,
        "max_num_seqs": 12,
        "preemption_mode": "swap",
        "swap_space": 0.01,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    }
    with LLM(directory, **options, **tight) as llm:
        assert tokens_of(llm, prompts) == expected
        assert llm.llm_engine.scheduler.num_preemptions > 0


def test_real_text_is_almost_as_likely() -> None:
    args = EngineArgs("smollm2", backend="native")
    source = find_local(args.model)
    assert source is not None
    opened = open_native(args, source)
    loaded = load_native(args, opened)
    tokenizer = load_tokenizer(args, model=source, header=opened.header)
    text = (files("pagedserve.quantize") / "sample.txt").read_text("utf-8")
    losses: dict[KVCacheDtype, list[NDArray[Any]]] = {"auto": [], **{kind: [] for kind in LEVELS}}
    for ids in windows(tokenizer, text, 400):
        for cache_dtype, found in losses.items():
            logits = logits_of(loaded, ids, cache_dtype=cache_dtype)[:-1]
            logits -= logits.max(axis=1, keepdims=True)
            totals = np.log(np.exp(logits).sum(axis=1, dtype="f8"))
            found.append(totals - logits[np.arange(len(logits)), ids[1:]])
    loss = {kind: np.concatenate(found).mean() for kind, found in losses.items()}
    bounds: dict[KVCacheDtype, float] = {"int8": 1.005, "fp8_e4m3": 1.02, "fp8_e5m2": 1.05}
    for kind, bound in bounds.items():
        assert np.exp(loss[kind] - loss["auto"]) < bound, kind


@pytest.mark.parametrize(("dtype", "share"), [("float32", 3.8), ("bfloat16", 1.9)])
def test_more_blocks_fit(dtype: str, share: float) -> None:
    options: dict[str, Any] = {"dtype": dtype, "backend": "native", "kv_cache_memory": 32 << 20}
    with (
        LLM("smollm2", **options) as plain,
        LLM("smollm2", kv_cache_dtype="int8", **options) as llm,
    ):
        num_blocks = plain.llm_engine.memory.num_gpu_blocks
        found = llm.llm_engine.memory.num_gpu_blocks
    # Of 30 layers, 3 heads of 16 tokens: a key and a value of 64 bytes and a scale of 2 each.
    assert found == (32 << 20) // (30 * 3 * 16 * 2 * 66)
    assert found > share * num_blocks


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"block_size": 8}, "block_size is 8, and kv_cache_dtype is 'int8'"),
        ({"kv_cache_dtype": "fp8_e5m2", "block_size": 8}, "block_size is 8, and kv_cache_dtype is"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype is 'nvfp4'; it must be one of auto, int8"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], refusal: str) -> None:
    with pytest.raises(ConfigError, match=refusal):
        EngineArgs("smollm2", **({"kv_cache_dtype": "int8"} | options))


def test_heads_that_do_not_fit_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    directory = save_decoder(tmp_path, "llama", head_dim=12)
    weights = load_file(directory / "model.safetensors")
    weights["model.norm.weight"].fill_(torch.nan)  # which is refused once it is read
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="which needs heads of a multiple of 16 numbers, and"):
        LLM(str(directory), kv_cache_dtype="int8")


@pytest.mark.parametrize(
    ("name", "cache_dtype"),
    [("int8_per_token_head", "int8"), ("fp8", "fp8_e4m3"), ("fp8_per_token_head", "fp8_e4m3")],
)
def test_names_of_vllm_are_accepted(name: Any, cache_dtype: KVCacheDtype) -> None:
    assert EngineArgs("smollm2", kv_cache_dtype=name).kv_cache_dtype == cache_dtype
