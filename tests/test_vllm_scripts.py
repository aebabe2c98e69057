"""Offline scripts as vLLM's users have them in hand, with another import."""

import argparse
import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast

import pytest
import torch

import pagedserve
from pagedserve import (
    LLM,
    AsyncLLMEngine,
    BeamSearchParams,
    ConfigError,
    EngineArgs,
    LLMEngine,
    RequestError,
    RequestOutput,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from pagedserve.engine.metric_families import counter
from pagedserve.metrics import Counter, Gauge, Histogram, Vector, metrics_of
from pagedserve.server.limits import Admission
from pagedserve.server.metrics import Metrics
from tests.support.tiny import save_tiny_llama

ROLES = "{% for message in messages %}{{ message.content }} {% endfor %}"
PARTS = "{% for message in messages %}{{ message.content[0].text }} {% endfor %}"
# What scripts for one GPU pass along.
USUAL: dict[str, Any] = {
    "trust_remote_code": False,
    "tensor_parallel_size": 1,
    "gpu_memory_utilization": 0.9,
    "enforce_eager": True,
    "disable_log_stats": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_config: dict[str, Any]) -> str:
    """A directory with a tiny model; its words are numbers of tokens."""
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(tiny_config))
    (directory / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_p": 0.9, "max_new_tokens": 7, "do_sample": True})
    )
    return str(directory)


@pytest.fixture(scope="module")
def make(model: str) -> Callable[..., LLM]:
    """Makes an LLM as a script does; beside its options only what the tiny model asks for."""

    def make(**options: Any) -> LLM:
        return LLM(model=model, load_format="dummy", device="cpu", num_gpu_blocks=32, **options)

    return make


@pytest.fixture(scope="module")
def llm(make: Callable[..., LLM]) -> LLM:
    return make(**USUAL, max_model_len=48)


def test_basic(llm: LLM) -> None:
    prompts = ["5 17 3", "8", "13 21 34 55"]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    outputs = llm.generate(prompts, sampling_params)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt == prompt
        generated_text = output.outputs[0].text
        assert isinstance(generated_text, str)
        assert len(output.outputs[0].token_ids) <= 16
        assert output.num_cached_tokens in (0, None)
        assert (output.lora_request, output.encoder_prompt) == (None, None)


def test_options_are_assigned_before_the_engine_is_created(model: str) -> None:
    engine_args = EngineArgs(model, load_format="dummy", device="cpu", num_gpu_blocks=32)
    engine_args.seed = 3
    engine_args.max_model_len = 48
    with LLM.from_engine_args(engine_args) as llm:
        assert llm.llm_engine.max_model_len == 48
    engine_args.cpu_kernels = "fused"
    engine_args.attention_backend = "torch"
    with pytest.raises(ConfigError, match="cpu_kernels is 'fused'"):
        LLM.from_engine_args(engine_args)
    with pytest.raises(ConfigError, match="cpu_kernels is 'fused'"):
        LLMEngine.from_engine_args(engine_args)


def test_an_engine_keeps_the_options_it_was_created_with(model: str) -> None:
    engine_args = EngineArgs(model, load_format="dummy", device="cpu", num_gpu_blocks=32)
    engine = LLMEngine.from_engine_args(
        engine_args, stat_loggers=None, enable_multiprocessing=False
    )
    engine_args.model = "absent"
    assert engine.get_tokenizer().decode([5, 17]) == "5 17"


def test_prompts_have_many_forms(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3)

    def tokens(prompts: Any, **options: Any) -> list[list[int]]:
        outputs = llm.generate(prompts, params, use_tqdm=False, **options)
        return [output.outputs[0].token_ids for output in outputs]

    (expected,) = tokens("5 17 3")
    ids = [5, 17, 3]
    forms: list[Any] = [ids, [ids], TextPrompt(prompt="5 17 3"), TokensPrompt(prompt_token_ids=ids)]
    assert [tokens(form) for form in forms] == [[expected]] * 4
    assert tokens(["5 17 3", *forms[2:]]) == [expected] * 3
    assert tokens(None, prompt_token_ids=[ids, ids], lora_request=None) == [expected] * 2


def test_the_models_own_parameters_are_taken_where_none_are_given(
    llm: LLM, make: Callable[..., LLM]
) -> None:
    own = llm.get_default_sampling_params()
    assert own == SamplingParams(temperature=0.6, top_p=0.9, max_tokens=7)
    own.temperature = 0
    assert llm.get_default_sampling_params().temperature == 0.6
    (output,) = llm.generate("5 17", use_tqdm=False)
    assert len(output.outputs[0].token_ids) <= 7
    plain = make(generation_config="vllm", override_generation_config={"temperature": 0})
    assert plain.get_default_sampling_params() == SamplingParams(temperature=0)


def test_a_generation_config_that_cannot_be_is_named(
    make: Callable[..., LLM], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="generation_config: cannot read"):
        make(generation_config=str(tmp_path)).get_default_sampling_params()
    (tmp_path / "generation_config.json").write_text('{"top_p": 3}')
    with pytest.raises(ConfigError, match="generation_config: top_p is 3; it must be above 0"):
        make(generation_config=str(tmp_path)).get_default_sampling_params()


def test_chat(llm: LLM) -> None:
    conversation: list[dict[str, Any]] = [
        {"role": "system", "content": "5"},
        {"role": "user", "content": "17"},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": [{"type": "text", "text": "8"}]},
    ]
    params = SamplingParams(temperature=0, max_tokens=4)
    outputs = llm.chat(conversation, params, use_tqdm=False, chat_template=ROLES)
    openai: Any = {"chat_template_content_format": "openai", "chat_template": PARTS}
    (same,) = llm.chat(conversation, params, use_tqdm=False, **openai)
    assert same.prompt == outputs[0].prompt
    with pytest.raises(RequestError, match="format is 'parts'; it must be one of auto, string, op"):
        llm.chat(conversation, params, **openai | {"chat_template_content_format": "parts"})
    assert outputs[0].prompt == "5 17 3 8 "
    assert outputs[0].prompt_token_ids == [5, 17, 3, 8]
    several = llm.chat([conversation] * 3, params, use_tqdm=False, chat_template=ROLES)
    assert [output.outputs[0].token_ids for output in several] == [
        outputs[0].outputs[0].token_ids
    ] * 3
    with pytest.raises(RequestError, match="has no chat template"):
        llm.chat(conversation, params)


def test_prefix_caching(make: Callable[..., LLM]) -> None:
    prefix = " ".join(str(token) for token in range(3, 36))
    prompts = [f"{prefix} {last}" for last in (40, 41, 42)]
    params = SamplingParams(temperature=0.0, max_tokens=4)
    regular = make(gpu_memory_utilization=0.9).generate(prompts, params)
    cached = make(enable_prefix_caching=True, gpu_memory_utilization=0.9)
    cached.generate(prompts[0], params)  # warms the cache up
    again = cached.generate(prompts, params)
    assert [output.outputs[0].text for output in again] == [
        output.outputs[0].text for output in regular
    ]
    assert cached.llm_engine.scheduler.num_cached_tokens >= 3 * 32


def test_beam_search(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True)
    prompts: list[Any] = [{"prompt": "5 17"}, {"prompt_token_ids": [8]}]
    outputs = llm.beam_search(prompts, params)
    assert [len(output.sequences) for output in outputs] == [3, 3]
    for output, prompt in zip(outputs, ([5, 17], [8]), strict=True):
        sums = [sequence.cum_logprob or 0 for sequence in output.sequences]
        assert sums == sorted(sums, reverse=True)
        best = output.sequences[0]
        assert best.tokens[: len(prompt)] == prompt
        assert len(best.tokens) == len(prompt) + 4
        assert best.text.split() == [str(token) for token in best.tokens]
    with pytest.raises(RequestError, match=r"params is .*; it must be BeamSearchParams"):
        llm.beam_search(prompts, [params])  # type: ignore[arg-type]
    single = llm.beam_search("5 17", BeamSearchParams(beam_width=1, max_tokens=4))[0].sequences
    (greedy,) = llm.generate("5 17", SamplingParams(temperature=0, max_tokens=4))
    assert [beam.tokens for beam in single] == [[5, 17, *greedy.outputs[0].token_ids]]


def test_the_engine_is_driven_step_by_step(model: str) -> None:
    parser = argparse.ArgumentParser(description="Drive the engine from a command line")
    parser = EngineArgs.add_cli_args(parser)
    argv = f"--model {model} --load-format dummy --num-gpu-blocks 32 --tensor-parallel-size 1"
    engine_args = EngineArgs.from_cli_args(parser.parse_args(argv.split()))
    engine = LLMEngine.from_engine_args(engine_args)
    test_prompts: list[tuple[str, SamplingParams]] = [
        ("5 17", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
        ("8", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
        ("13 21", SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1)),
    ]
    request_id, finished = 0, list[RequestOutput]()
    while test_prompts or engine.has_unfinished_requests():
        if test_prompts:
            prompt, sampling_params = test_prompts.pop(0)
            engine.add_request(str(request_id), prompt, sampling_params)
            request_id += 1
        finished += [output for output in engine.step() if output.finished]
    assert sorted(output.request_id for output in finished) == ["0", "1", "2"]
    assert {len(output.outputs) for output in finished} == {1, 2}


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_an_engine_describes_its_model(tmp_path: Path, backend: Any) -> None:
    model = str(save_tiny_llama(tmp_path / "llama"))
    options: dict[str, Any] = {"max_model_len": 24, "num_gpu_blocks": 32}
    args = EngineArgs(model, backend=backend, dtype="bfloat16", **options)
    engine = AsyncLLMEngine.from_engine_args(args)
    try:
        config = engine.model_config
        assert (config.model, config.max_model_len) == (model, 24)
        assert config.dtype == torch.bfloat16
        assert config.hf_config.model_type == "llama"
    finally:
        engine.shutdown()


def test_the_engine_of_llm_describes_the_model(llm: LLM) -> None:
    assert llm.llm_engine.model_config.max_model_len == 48


def test_a_script_hands_all_it_parsed_to_llm(model: str) -> None:
    parser = argparse.ArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model=model, load_format="dummy", num_gpu_blocks=32)
    parser.add_argument("--max-tokens", type=int, default=3)
    args = vars(parser.parse_args(["--max-num-seqs", "4", "--no-trust-remote-code"]))
    max_tokens = args.pop("max_tokens")
    params = LLM(**args).get_default_sampling_params()
    params.max_tokens = max_tokens
    assert params.max_tokens == 3


def test_a_bar_of_ones_own(llm: LLM) -> None:
    class Bar:
        def __init__(self, total: int, **_: Any) -> None:
            self.total, self.count = total, 0
            bars.append(self)

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...

        def update(self, count: int) -> None:
            self.count += count

        def set_postfix_str(self, text: str) -> None: ...

    bars: list[Bar] = []
    llm.generate(["5", "8"], SamplingParams(max_tokens=2), use_tqdm=Bar)
    assert [(bar.total, bar.count) for bar in bars] == [(2, 2)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("reward", "no attribute 'reward': models generate, embed, classify or score"),
        ("start_profile", "no attribute 'start_profile': benches"),
        ("set_tokenizer", "give LLM"),
        ("nonsense", "no attribute 'nonsense'$"),
    ],
)
def test_an_absent_method_is_named(llm: LLM, name: str, message: str) -> None:
    with pytest.raises(AttributeError, match=message):
        getattr(llm, name)


def test_priorities_are_one_for_all_or_one_each(make: Callable[..., LLM]) -> None:
    llm = make(scheduling_policy="priority", max_num_seqs=1)
    params = SamplingParams(temperature=0, max_tokens=2)
    outputs = llm.generate(["5", "8", "3"], params, use_tqdm=False, priority=[2, 0, 1])
    ends = [output.metrics.finished_time or 0 for output in outputs]
    assert ends[1] < ends[2] < ends[0]
    assert len(llm.generate(["5", "8"], params, use_tqdm=False, priority=3)) == 2
    with pytest.raises(RequestError, match="1 priorities for 2 prompts"):
        llm.generate(["5", "8"], params, priority=[1])
    with pytest.raises(RequestError, match=r"priority\[0\] is 'high'; it must be an integer"):
        llm.generate("5", params, priority=cast(Any, ["high"]))


def test_an_absent_argument_is_named(llm: LLM) -> None:
    adapter = cast(Any, object())
    with pytest.raises(RequestError, match="not supported yet: prompt_adapter_request="):
        llm.generate("5", prompt_adapter_request=adapter)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        llm.generate("5", nonsense=None)  # type: ignore[call-arg]
    params = SamplingParams(temperature=0, max_tokens=1)
    assert llm.generate("5", params, mm_processor_kwargs={}, tokenization_kwargs={}) != []


def test_names_at_the_top_level_are_vllms() -> None:
    names = (
        "LLM LLMEngine EngineArgs SamplingParams BeamSearchParams RequestOutput CompletionOutput"
    )
    for name in (*names.split(), "TextPrompt", "TokensPrompt", "RequestOutputKind"):
        assert hasattr(pagedserve, name)


def test_metrics_have_vllms_shapes(make: Callable[..., LLM]) -> None:
    llm = make(speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompts = [
        TokensPrompt(prompt_token_ids=token_ids) for token_ids in ([1, 2, 3] * 3, [4, 5] * 3)
    ]
    llm.generate(prompts, params)
    by_name = {metric.name: metric for metric in llm.get_metrics()}
    tokens = by_name["vllm:generation_tokens"]
    assert isinstance(tokens, Counter)
    assert (tokens.value, tokens.labels["engine"]) == (12, "0")
    assert isinstance(by_name["vllm:kv_cache_usage_perc"], Gauge)
    latency = by_name["vllm:e2e_request_latency_seconds"]
    assert isinstance(latency, Histogram)
    assert latency.count == latency.buckets["+Inf"] == 2
    assert latency.sum > 0
    assert isinstance(by_name["vllm:spec_decode_num_drafts"], Counter)


def test_counters_by_position_are_a_vector() -> None:
    samples = [({"engine": "0", "position": str(place)}, 5 - place) for place in range(2)]
    (vector,) = metrics_of([counter("accepted", "Accepted draft tokens.", *samples)])
    assert vector == Vector("accepted", {"engine": "0"}, [5, 4])


def test_metrics_have_the_names_of_a_server(make: Callable[..., LLM]) -> None:
    llm = make()
    engine = llm.llm_engine
    client = cast(Any, SimpleNamespace(is_running=True, snapshot=engine.snapshot))
    exposed = asyncio.run(Metrics(client, "m", Admission(client, None, None)).exposition()).decode()
    shown = re.findall(r"^# TYPE ((?:vllm|pagedserve):\S+) (\w+)", exposed, re.MULTILINE)
    names = {name.removesuffix("_total") if kind == "counter" else name for name, kind in shown}
    names = {name for name in names if not name.endswith("_created")}
    offline = {metric.name for metric in llm.get_metrics()}
    assert names - offline == {"vllm:admission_rejections"}
    assert offline <= names
