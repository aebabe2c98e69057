"""Options as users of vLLM have them in their scripts."""

import argparse
import dataclasses
import re
from dataclasses import fields
from typing import Any, cast

import pytest

from pagedserve import (
    LLM,
    AsyncEngineArgs,
    CacheConfig,
    ConfigError,
    EngineArgs,
    SamplingParams,
    SchedulerConfig,
)
from pagedserve.cli.main import make_parser
from pagedserve.cli.serve import read_args
from pagedserve.config.argument_parser import FlexibleArgumentParser
from pagedserve.config.options import options_of
from pagedserve.server.options import ServerArgs
from pagedserve.vllm_names import ABSENT_METHODS, ABSENT_OPTIONS, ALIASES, HINTS

# As vLLM writes its defaults down; each asks for nothing that is not here.
VLLM_0_6_2: dict[str, Any] = {
    "tokenizer": None,
    "skip_tokenizer_init": False,
    "tokenizer_mode": "auto",
    "trust_remote_code": False,
    "download_dir": None,
    "load_format": "auto",
    "dtype": "auto",
    "kv_cache_dtype": "auto",
    "seed": 0,
    "max_model_len": None,
    "worker_use_ray": False,
    "distributed_executor_backend": None,
    "pipeline_parallel_size": 1,
    "tensor_parallel_size": 1,
    "max_parallel_loading_workers": None,
    "block_size": 16,
    "enable_prefix_caching": False,
    "disable_sliding_window": False,
    "use_v2_block_manager": False,
    "swap_space": 4,
    "cpu_offload_gb": 0,
    "gpu_memory_utilization": 0.9,
    "max_num_batched_tokens": None,
    "max_num_seqs": 256,
    "disable_log_stats": False,
    "revision": None,
    "code_revision": None,
    "rope_scaling": None,
    "rope_theta": None,
    "tokenizer_revision": None,
    "quantization": None,
    "enforce_eager": None,
    "max_context_len_to_capture": None,
    "max_seq_len_to_capture": 8192,
    "disable_custom_all_reduce": False,
    "limit_mm_per_prompt": None,
    "lora_dtype": "auto",
    "num_scheduler_steps": 1,
    "num_gpu_blocks_override": None,
    "num_lookahead_slots": 0,
    "preemption_mode": None,
    "scheduler_delay_factor": 0.0,
    "enable_chunked_prefill": None,
    "speculative_model": None,
    "disable_async_output_proc": False,
}
VLLM_NEWEST: dict[str, Any] = {
    "runner": "auto",
    "convert": "auto",
    "hf_overrides": {},
    "hf_token": None,
    "enable_sleep_mode": False,
    "model_impl": "vllm",
    "data_parallel_size": 1,
    "max_num_seqs": None,
    "block_size": None,
    "enable_prefix_caching": None,
    "compilation_config": None,
    "speculative_config": None,
    "structured_outputs_config": None,
    "scheduling_policy": "fcfs",
    "async_scheduling": None,
    "generation_config": "auto",
    "override_generation_config": {},
    "kv_cache_memory_bytes": None,
}


@pytest.mark.parametrize("options", [VLLM_0_6_2, VLLM_NEWEST])
def test_vllms_defaults_ask_for_nothing(options: dict[str, Any]) -> None:
    args = EngineArgs("smollm2", **options)
    plain = EngineArgs("smollm2", swap_space=args.swap_space)
    if options is VLLM_NEWEST:
        plain = EngineArgs("smollm2", override_generation_config={})
    # What the core is told is what it does anyway.
    assert core_values(args) == core_values(plain)
    untold = {field.name: None for field, known in options_of(args) if known.part}
    assert dataclasses.replace(args, **cast(Any, untold)) == plain


def core_values(args: EngineArgs) -> list[dict[str, object]]:
    """All that the core's two configurations have been told, or know themselves."""
    configs = (
        SchedulerConfig(max_model_len=99, **args.scheduler_options),
        CacheConfig(num_gpu_blocks=9, **args.cache_options),
    )
    return [
        {name: getattr(config, name) for name in dir(config) if not name.startswith("_")}
        for config in configs
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"data_parallel_size": 2},
            "data_parallel_size is 2, which is not supported: pagedserve",
        ),
        ({"data_parallel_size": True}, "data_parallel_size is True"),
        ({"enable_sleep_mode": True}, "enable_sleep_mode is True.*give False"),
        (
            {"structured_outputs_config": {"disable_any_whitespace": True}},
            "structured_outputs_config is .* not supported: structured_outputs of a request",
        ),
        ({"task": "reward"}, "task is 'reward', which is not supported: give runner"),
        ({"worker_cls": "my.Worker"}, "worker_cls is 'my.Worker'.*give 'auto'"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype is 'nvfp4'; it must be one of auto, int8"),
        ({"enable_prompt_adapter": True}, "enable_prompt_adapter is True.*adapters are LoRA's"),
        ({"speculative_model": "[ngram]"}, "speculative_model is .*give speculative_config"),
        (
            {"quantization": "fp8"},
            "quantization is 'fp8'; it must be one of int8, w8a8, int4, gguf, gptq, awq, comp",
        ),
        ({"load_format": "pt"}, "load_format is 'pt'; it must be one of auto, safetensors, dummy"),
        ({"num_gpu_block": 3}, "unknown option: num_gpu_block=3; did you mean num_gpu_blocks"),
        ({"swap": 3}, "unknown option: swap=3"),
        ({"zzz": 3}, r"unknown option: zzz=3; help\(pagedserve.EngineArgs\) lists them"),
        (
            {"num_gpu_blocks": 3, "num_gpu_blocks_override": 4},
            "num_gpu_blocks_override and num_gpu_blocks are the same option",
        ),
    ],
)
@pytest.mark.parametrize("make", [EngineArgs, LLM])
def test_what_is_not_there_is_named(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make("smollm2", **options)


def test_other_names_of_the_same_option() -> None:
    named = EngineArgs("smollm2", num_gpu_blocks=5, kv_cache_memory=7)
    options: dict[str, Any] = {"num_gpu_blocks_override": 5, "kv_cache_memory_bytes": 7}
    assert EngineArgs("smollm2", **options) == named


@pytest.mark.parametrize("name", ["task", "convert"])
@pytest.mark.parametrize("task", ["embed", "embedding", "classify", "score"])
def test_a_task_of_pooling_is_a_runner(name: str, task: str) -> None:
    options: dict[str, Any] = {name: task}
    pooling = EngineArgs("a", runner="pooling")
    assert EngineArgs("a", **options) == EngineArgs("a", runner="pooling", **options) == pooling
    assert EngineArgs("a", runner=None, **options) == pooling
    assert EngineArgs("a", **options, runner=None) == pooling
    with pytest.raises(ConfigError, match=f"{name} and runner are the same option"):
        EngineArgs("a", runner="generate", **options)
    with pytest.raises(ConfigError, match=f"runner and {name} are the same option"):
        EngineArgs("a", **options, runner="generate")


def test_no_name_means_two_things() -> None:
    own = set(EngineArgs.__dataclass_fields__)
    tables = [own, set(ALIASES), set(ABSENT_OPTIONS), set(HINTS)]
    assert len(set().union(*tables)) == sum(map(len, tables))
    assert set(ALIASES.values()) <= own


def test_a_command_line_takes_them_too(capsys: pytest.CaptureFixture[str]) -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    argv = "--model a --data-parallel-size 1 --num-gpu-blocks-override 5 --no-enable-prompt-adapter"
    namespace = parser.parse_args([*argv.split(), "--max-seq-len-to-capture", "4096"])
    assert EngineArgs.from_cli_args(namespace) == EngineArgs("a", num_gpu_blocks=5)
    # Scripts hand all that was parsed to LLM.
    assert EngineArgs(**vars(namespace)) == EngineArgs("a", num_gpu_blocks=5)
    parser.print_help()
    assert "data-parallel-size" not in capsys.readouterr().out
    with pytest.raises(ConfigError, match="enable_sleep_mode is True"):
        EngineArgs.from_cli_args(parser.parse_args(["--model", "a", "--enable-sleep-mode"]))


@pytest.mark.parametrize(
    "argv",
    [
        "-tp 1 -pp 1 -dp 1 -O2 -ep",
        "--chat-template-content-format auto --api-server-count 1",
        "--disable-uvicorn-access-log --disable-frontend-multiprocessing",
        "--enable-server-load-tracking --enable-request-id-headers",
        "--no-return-tokens-as-token-ids --mm-encoder-tp-mode weights --skip-mm-profiling",
        "--disable-fastapi-docs --disable-access-log-for-endpoints /health,/metrics",
        "--cudagraph-capture-sizes 1 2 4 --max-cudagraph-capture-size 4 --kv-cache-metrics",
        "--worker-cls auto --max-num-scheduled-tokens 512 --no-enable-expert-parallel",
        '-cc {"mode":3,"fast":true} --attention-config {"backend":"FLASH_ATTN"}',
        "--enable-log-outputs --language-model-only",
    ],
)
def test_a_server_accepts_vllms_options(argv: str) -> None:
    given, _ = read_args(make_parser().parse_args(["serve", "a", *argv.split()]))
    plain, _ = read_args(make_parser().parse_args(["serve", "a"]))
    assert given == plain


# Fields of vLLM's EngineArgs that steer its machinery.
MACHINERY: dict[str, Any] = {
    "compilation_config": {"cudagraph_mode": "PIECEWISE"},
    "attention_config": {"backend": "FLASHINFER"},
    "structured_outputs_config": {
        "backend": "xgrammar",
        "disable_fallback": True,
        "disable_any_whitespace": False,
    },
    "cpu_offload_gb": 0.0,
    "moe_backend": "auto",
    "all2all_backend": "naive",
    "safetensors_load_strategy": "lazy",
    "offload_params": set(),
    "spec_method": None,
    "log_level": "info",
    "disable_mm_preprocessor_cache": True,
    "guided_decoding_disable_fallback": True,
    "reasoning_parser": "",
    "shutdown_timeout": 0,
}


def test_options_of_vllms_machinery_are_accepted() -> None:
    assert EngineArgs("smollm2", **MACHINERY) == EngineArgs("smollm2")


def test_options_that_a_user_may_expect_an_effect_of_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options: dict[str, Any] = {"trust_remote_code": True, "enable_expert_parallel": False}
    assert EngineArgs("smollm2", **options) == EngineArgs("smollm2")
    (message,) = caplog.messages
    assert message == (
        "trust_remote_code is True, which has no effect: code of a model's repository is never run"
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("disable_fastapi_docs", "/openapi.json describes a server, and no other pages exist"),
        ("language_model_only", "limit_mm_per_prompt={'image': 0} refuses images"),
    ],
)
def test_a_log_line_says_what_a_flag_leaves_as_it_is(
    caplog: pytest.LogCaptureFixture, name: str, reason: str
) -> None:
    assert EngineArgs("smollm2", **cast("Any", {name: True})) == EngineArgs("smollm2")
    assert caplog.messages == [f"{name} is True, which has no effect: {reason}"]


@pytest.mark.parametrize("name", ["mamba_cache_dtype", "mamba_ssm_cache_dtype"])
def test_dtypes_of_states_are_those_of_the_model(name: str) -> None:
    for neutral in ("auto", None):
        assert EngineArgs("a", **cast("Any", {name: neutral})) == EngineArgs("a")
    with pytest.raises(ConfigError, match=f"{name} is 'float32', which is not supported: states"):
        EngineArgs("a", **cast("Any", {name: "float32"}))


def test_options_of_a_script_replace_hidden_ones() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--grpc-port", type=str)
    group = parser.add_argument_group("of the script")
    EngineArgs.add_cli_args(parser)
    parser.add_argument("--log-level", type=str)
    parser.add_argument("--chat-template")
    group.add_argument("--moe-backend", type=str)
    argv = "--model a --grpc-port 0 --log-level 5 --chat-template x.jinja --moe-backend 3"
    given = parser.parse_args(argv.split())
    assert (given.grpc_port, given.log_level, given.moe_backend) == ("0", "5", "3")
    assert EngineArgs.from_cli_args(given) == EngineArgs("a")


@pytest.mark.parametrize("command", ["serve", "run-batch -i a -o b"])
def test_options_of_vllms_server_are_refused_by_name(command: str) -> None:
    argv = [*command.split(), "--model", "a", "--grpc-port", "5"]
    with pytest.raises(ConfigError, match="grpc_port is 5, which is not supported: a server"):
        read_args(make_parser().parse_args(argv))


def test_short_options_have_their_effect() -> None:
    given, _ = read_args(make_parser().parse_args(["serve", "a", "-tp", "2"]))
    assert given.tensor_parallel_size == 2
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 2"):
        read_args(make_parser().parse_args(["serve", "a", "-pp", "2"]))


def test_limits_of_audio_and_of_videos_have_no_effect() -> None:
    limits = {"image": 1, "video": 10, "audio": 2, "vision_chunk": 0}
    assert EngineArgs("a", limit_mm_per_prompt=limits).max_images_per_prompt == 1
    assert EngineArgs("a", limit_mm_per_prompt={"audio": 1}).max_images_per_prompt == 16


# What this engine supports, and what a reason may no longer claim since then.
SUPPORTED = {
    "kv_cache_dtype": ("not quantized",),
    "tensor_parallel_size": ("one device", "this process"),
    "limit_mm_per_prompt": ("text alone",),
    "speculative_config": ("each token", "one token a step"),
    "swap_space": ("KV cache stay",),
    "enable_lora": ("float32",),
}


def test_reasons_name_what_exists_and_deny_nothing_that_is_supported() -> None:
    known = {field.name for field in (*fields(EngineArgs), *fields(ServerArgs))}
    known |= {field.name for field in fields(SamplingParams)}
    known |= {"stream_interval", "return_tokens_as_token_ids"}  # fields of requests
    reasons = {absent.reason for absent in ABSENT_OPTIONS.values()}
    reasons |= {*ABSENT_METHODS.values(), *HINTS.values()}
    for reason in reasons:
        named = set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", reason))
        assert named <= known, reason
        for option, claims in SUPPORTED.items():
            assert option in known
            assert not any(claim in reason for claim in claims), reason
        assert "not there" not in reason
    assert not {name for name in ABSENT_METHODS if hasattr(LLM, name)}


def test_a_script_parses_options_of_an_engine() -> None:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(description="a script"))
    parser.set_defaults(model="smollm2")
    namespace = parser.parse_args(["--max_model_len", "50", "--tensor-parallel-size", "1"])
    assert AsyncEngineArgs.from_cli_args(namespace) == EngineArgs("smollm2", max_model_len=50)
    options: dict[str, Any] = {"enable_log_requests": False, "disable_log_requests": True}
    assert AsyncEngineArgs("a", **options) == EngineArgs("a")


def test_no_adapters_are_accepted_without_enable_lora() -> None:
    assert EngineArgs("a", max_loras=0).scheduler_options == EngineArgs("a").scheduler_options
