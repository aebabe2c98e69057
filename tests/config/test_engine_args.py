import argparse
import ast
import dataclasses
import inspect
import json
from typing import Any, get_args

import pytest
import torch

from pagedserve import LLM, CacheConfig, EngineArgs, SchedulerConfig
from pagedserve.config.engine_options import EngineOptions
from pagedserve.config.options import Concern, flag_of, options_of, parse_bytes, parse_integer
from pagedserve.config.speculative import SpeculativeConfig
from pagedserve.deploy.options import DeployArgs
from pagedserve.errors import ConfigError
from pagedserve.sampling_params.options import PARAMETERS
from pagedserve.server.options import ServerArgs
from tests.support import typed_options
from tests.support.option_tables import with_table
from tests.support.pages import DOCS, PAGES


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": ""}, "model is ''; it must be smollm2, a directory"),
        ({"model": None}, "model is None; it must be smollm2"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"block_size": 0}, "block_size is 0; it must be an integer, at least 1"),
        (
            {"num_gpu_blocks": 0},
            r"num_gpu_blocks is 0; it must be an integer, at least 1 and below 2\*\*63, or None",
        ),
        ({"max_num_seqs": 1 << 63}, r"max_num_seqs is 9223372036854775808; .* below 2\*\*63"),
        ({"block_size": 1 << 63}, r"block_size is 9223372036854775808; .* below 2\*\*63"),
        ({"num_gpu_blocks": 2.5}, r"num_gpu_blocks is 2\.5"),
        ({"max_num_seqs": True}, "max_num_seqs is True"),
        ({"max_model_len": -3}, "max_model_len is -3"),
        ({"kv_cache_memory": "1GiB"}, "kv_cache_memory is '1GiB'"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching is 1; it must be True or False"),
        ({"swap_space": -0.5}, r"swap_space is -0\.5; it must be a number of GiB, at least 0"),
        ({"swap_space": float("nan")}, "swap_space is nan"),
        ({"swap_space": "4"}, "swap_space is '4'"),
        (
            {"preemption_mode": "drop"},
            "preemption_mode is 'drop'; it must be one of recompute, swap,",
        ),
        ({"preemption_mode": 1}, "preemption_mode is 1; it must be one of"),
        (
            {"attention_backend": "flash"},
            "attention_backend is 'flash'; it must be one of rust, triton, torch",
        ),
        (
            {"cpu_kernels": "fast"},
            "cpu_kernels is 'fast'; it must be one of fused, modules",
        ),
        (
            {"cpu_kernels": "fused", "attention_backend": "torch"},
            "cpu_kernels is 'fused', whose layers attend in Rust, and attention_backend is 'torch'",
        ),
        (
            {"quantization": "int3"},
            "quantization is 'int3'; it must be one of int8, w8a8, int4, gguf",
        ),
        ({"quantization": 8}, "quantization is 8"),
        (
            {"quantization": "int8", "cpu_kernels": "generic"},
            "quantization is 'int8', and cpu_kernels is 'generic', whose linear layers are torch's",
        ),
        ({"device": "gpu"}, "device is 'gpu'; it must be auto, cpu, cuda, cuda:0"),
        ({"device": "cuda:one"}, "device is 'cuda:one'; it must be auto, cpu"),
        ({"device": 0}, "device is 0; it must be auto, cpu"),
        (
            {"load_format": "random"},
            "load_format is 'random'; it must be one of auto, safe",
        ),
        ({"enforce_eager": 1}, "enforce_eager is 1; it must be True or False"),
        ({"async_scheduling": 1}, "async_scheduling is 1; it must be True or False"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization is 0; it must be a number above 0"),
        ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization is 1\.5; it must be"),
        ({"gpu_memory_utilization": True}, "gpu_memory_utilization is True"),
        (
            {"cpu_kernels": "fused", "attention_backend": "triton"},
            "cpu_kernels is 'fused', whose layers attend in Rust, and attention_backend is 'trit",
        ),
        ({"scheduling_policy": "lifo"}, "scheduling_policy is 'lifo'; it must be one of fcfs, pri"),
        ({"scheduler_delay_factor": -1}, "scheduler_delay_factor is -1; it must be a number"),
        ({"max_num_bypasses": -1}, "max_num_bypasses is -1; it must be an integer, at least 0"),
        ({"victim_policy": "first"}, "victim_policy is 'first'; it must be one of last, least_w"),
        ({"watermark": 1.5}, r"watermark is 1\.5; it must be a number from 0 to 1, or None"),
        ({"seed": -1}, "seed is -1; it must be an integer, at least 0"),
        (
            {"device": "cpu", "gpu_memory_utilization": 0.5},
            r"gpu_memory_utilization is 0\.5, and the model is on the CPU.*give kv_cache_memory",
        ),
        (
            {"tensor_parallel_size": 2, "load_format": "dummy"},
            "load_format is 'dummy', and tensor_parallel_size is 2, whose ranks read",
        ),
    ],
)
def test_a_bad_value_is_named_with_what_is_accepted(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs(**({"model": "smollm2"} | options))


def test_an_assigned_value_is_checked() -> None:
    args = EngineArgs("smollm2", seed=5)
    args.dtype = "half"  # type: ignore[assignment]  # a name of vLLM's
    args.seed = None  # type: ignore[assignment]  # the default
    args.num_gpu_blocks_override = 7
    args.trust_remote_code = False
    assert args == EngineArgs("smollm2", dtype="float16", num_gpu_blocks=7)
    assert EngineArgs(**vars(args)) == args
    with pytest.raises(ConfigError, match="seed is -1; it must be an integer, at least 0"):
        args.seed = -1
    with pytest.raises(ConfigError, match="unknown option: sed=1; did you mean seed"):
        args.sed = 1
    assert args.seed == 0


def parse(*argv: str) -> EngineArgs:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    return EngineArgs.from_cli_args(parser.parse_args(argv))


def test_the_command_line_has_the_same_defaults() -> None:
    assert parse("--model", "smollm2") == EngineArgs(model="smollm2")


def test_every_field_can_be_given_on_the_command_line() -> None:
    given = EngineArgs(
        model="a",
        tokenizer="b",
        dtype="bfloat16",
        device="cuda:1",
        max_model_len=100,
        num_gpu_blocks=7,
        block_size=8,
        max_num_seqs=9,
        max_num_batched_tokens=200,
        seed=3,
        kv_cache_memory=1 << 20,
        gpu_memory_utilization=0.8,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        swap_space=0.5,
        preemption_mode="swap",
        scheduling_policy="priority",
        scheduler_delay_factor=0.5,
        max_num_bypasses=3,
        victim_policy="last",
        watermark=0.25,
        disable_hybrid_kv_cache_manager=True,
        max_logprobs=20,
        generation_config="vllm",
        override_generation_config={"top_k": 5},
        attention_backend="torch",
        cpu_kernels="modules",
        quantization="int8",
        load_format="dummy",
        enforce_eager=True,
        async_scheduling=True,
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
        max_cpu_loras=3,
        disable_log_stats=True,
        cpu_instructions="avx2",
        logits_processors=("a:B", "c"),
    )
    argv = []
    for name, value in dataclasses.asdict(given).items():
        if value is None:
            continue
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, tuple):
            argv += [option, *value]
            continue
        shown = json.dumps(value) if isinstance(value, dict) else str(value)
        argv += [option] if value is True else [option, shown]
    assert parse(*argv) == given


def test_options_of_the_core_are_passed_on_by_its_names() -> None:
    args = EngineArgs(
        "a",
        scheduling_policy="priority",
        scheduler_delay_factor=0.5,
        max_num_bypasses=3,
        victim_policy="last",
        watermark=0.25,
    )
    config = SchedulerConfig(max_model_len=100, **args.scheduler_options)
    assert (config.policy, config.delay_factor) == ("priority", 0.5)
    assert (config.max_num_bypasses, config.victim_policy) == (3, "last")
    cache = CacheConfig(num_gpu_blocks=10, **args.cache_options)
    assert (cache.watermark, cache.block_size) == (0.25, 16)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(EngineArgs)][1:])
def test_none_leaves_any_option_at_its_default(name: str) -> None:
    given: dict[str, Any] = {name: None}
    assert EngineArgs("smollm2", **given) == EngineArgs("smollm2")


@pytest.mark.parametrize(
    ("given", "held"),
    [("half", "float16"), ("float", "float32"), (torch.bfloat16, "bfloat16"), ("auto", "auto")],
)
def test_a_dtype_has_several_names(given: Any, held: str) -> None:
    assert EngineArgs("smollm2", dtype=given).dtype == held


@pytest.mark.parametrize(
    ("name", "alias"),
    [
        *(("dtype", alias) for alias in ("half", "float")),
        *(("kv_cache_dtype", f"{kind}_per_token_head") for kind in ("fp8", "int8")),
        ("kv_cache_dtype", "fp8"),
        ("distributed_executor_backend", "uni"),
    ],
)
def test_the_command_line_accepts_vllms_names_of_choices(name: str, alias: str) -> None:
    options: dict[str, Any] = {name: alias}
    assert parse("--model", "a", flag_of(name), alias) == EngineArgs("a", **options)


def test_llm_takes_the_same_arguments_with_the_same_defaults() -> None:
    parameters = dict(inspect.signature(LLM).parameters)
    assert {
        field.name: inspect.Parameter.empty
        if field.default is dataclasses.MISSING
        else field.default
        for field in dataclasses.fields(EngineArgs)
    } == {name: parameter.default for name, parameter in parameters.items()}


def test_the_options_of_llm_make_the_same_arguments() -> None:
    tags = {"reasoning_start_str": "a", "reasoning_end_str": "b"}
    args = EngineArgs("smollm2", reasoning_config=tags, max_num_seqs=3)
    assert EngineArgs(**args.llm_options) == args


def test_programs_can_list_the_options() -> None:
    assert [*EngineArgs.__annotations__] == [field.name for field in dataclasses.fields(EngineArgs)]


def test_type_checkers_see_the_same_options() -> None:
    written = typed_options.MODULE.read_text(encoding="utf-8")
    made = ast.parse(typed_options.module())
    assert ast.dump(ast.parse(written)) == ast.dump(made), "run make options"
    names = [field.name for field in dataclasses.fields(EngineArgs)]
    assert ["model", *EngineOptions.__annotations__] == names


@pytest.mark.parametrize(
    ("given", "held"),
    [
        ({"hf_token": True}, {"hf_token": None}),
        ({"distributed_executor_backend": "uni"}, {"distributed_executor_backend": "mp"}),
        ({"speculative_config": {"method": "ngram"}}, {"speculative_config": SpeculativeConfig()}),
    ],
)
def test_further_types_of_options_are_converted(given: Any, held: Any) -> None:
    assert EngineArgs("smollm2", **given) == EngineArgs("smollm2", **held)


@pytest.mark.parametrize(("name", "arguments"), PAGES.items())
def test_docs_have_the_same_options(name: str, arguments: type) -> None:
    page = (DOCS / name).read_text(encoding="utf-8")
    assert with_table(page, arguments) == page, "run make options"
    assert all(f"| `{option.name}` |" in page for option in dataclasses.fields(arguments))


def test_help_says_what_each_option_is() -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    shown = " ".join(parser.format_help().split())
    assert "--block-size BLOCK_SIZE Number of tokens per KV block. (default: 16)" in shown
    assert "block_size: Number of tokens per KV" in inspect.getdoc(EngineArgs)  # type: ignore[operator]


def test_help_has_one_group_for_each_concern() -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser(conflict_handler="resolve"))
    ServerArgs.add_cli_args(parser)
    DeployArgs.add_cli_args(parser)
    shown = parser.format_help()
    all_options = (*options_of(EngineArgs), *options_of(ServerArgs), *options_of(DeployArgs))
    concerns = {known.concern for _, known in all_options}
    assert all(shown.count(f"\n{concern}:\n") == 1 for concern in concerns)
    logging = shown[shown.index("\nlogging and tracing:\n") :]
    assert logging.index("--decision-log ") < logging.index("--log-format ") < len(logging)
    assert {*concerns, *(known.concern for known in PARAMETERS.values())} == {*get_args(Concern)}
    assert all(known.text.endswith(".") for _, known in all_options)


@pytest.mark.parametrize(
    ("text", "number"), [("4096", 4096), ("4k", 4000), ("4K", 4096), ("25.6k", 25600), ("-1", -1)]
)
def test_integers_have_units(text: str, number: int) -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    namespace = parser.parse_args(["--model", "smollm2", f"--seed={text}"])
    assert namespace.seed == number


@pytest.mark.parametrize("text", ["", "k", "4kk", "1.5", "4kK", "nank", "many", f"{'9' * 400}G"])
def test_other_texts_are_no_integers(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="invalid int value"):
        parse_integer(text)


def test_a_parsers_own_defaults_are_obeyed() -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.set_defaults(model="smollm2", seed=3)
    assert EngineArgs.from_cli_args(parser.parse_args([])) == EngineArgs("smollm2", seed=3)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1000", 1000), ("2k", 2000), ("512MiB", 512 << 20), ("1.5GiB", 3 << 29), ("2 GB", 2 * 10**9)],
)
def test_bytes_have_units(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "1.2.3k", "-5", "4 apples", "nan", f"{'9' * 300}G"])
def test_other_texts_are_no_bytes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="no number of bytes"):
        parse_bytes(text)
