import argparse
import dataclasses
import inspect
from typing import Any

import pytest

from pagedserve import LLM, EngineArgs
from pagedserve.engine.args import parse_bytes
from pagedserve.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": ""}, "model is empty"),
        ({"model": None}, "model is None; it must be a string"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"block_size": 0}, "block_size is 0; it must be an integer, at least 1"),
        ({"block_size": None}, "block_size is None; it must be an integer, at least 1"),
        ({"num_gpu_blocks": 0}, "num_gpu_blocks is 0; it must be an integer, at least 1, or None"),
        ({"num_gpu_blocks": 2.5}, r"num_gpu_blocks is 2\.5"),
        ({"max_num_seqs": True}, "max_num_seqs is True"),
        ({"max_model_len": -3}, "max_model_len is -3"),
        ({"kv_cache_memory": "1GiB"}, "kv_cache_memory is '1GiB'"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching is 1; it must be True or False"),
        ({"swap_space": -0.5}, r"swap_space is -0\.5; it must be a number of GiB, at least 0"),
        ({"swap_space": float("nan")}, "swap_space is nan"),
        ({"swap_space": "4"}, "swap_space is '4'"),
        ({"preemption_mode": "drop"}, "preemption_mode is 'drop'; it must be recompute, swap or"),
        ({"preemption_mode": 1}, "preemption_mode is 1; it must be a string, or None"),
        ({"attention_backend": "flash"}, "attention_backend is 'flash': accepted are rust, torch"),
        ({"cpu_tier": "fast"}, "cpu_tier is 'fast': accepted are fused, modules, generic"),
        (
            {"cpu_tier": "fused", "attention_backend": "torch"},
            "cpu_tier is 'fused', whose layers attend in Rust, and attention_backend is 'torch'",
        ),
        ({"quantization": "int4"}, "quantization is 'int4': accepted are int8, None"),
        ({"quantization": 8}, "quantization is 8"),
        (
            {"quantization": "int8", "cpu_tier": "generic"},
            "quantization is 'int8', and cpu_tier is 'generic', whose linear layers are torch's",
        ),
        ({"device": "gpu"}, "device is 'gpu': accepted are auto, cpu, cuda, cuda:0"),
        ({"device": "cuda:one"}, "device is 'cuda:one': accepted are auto, cpu"),
        ({"device": None}, "device is None; it must be a string"),
        ({"load_format": "random"}, "load_format is 'random': accepted are auto, dummy"),
        ({"enforce_eager": 1}, "enforce_eager is 1; it must be True or False"),
        ({"async_scheduling": 1}, "async_scheduling is 1; it must be True, False or None"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization is 0; it must be a number above 0"),
        ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization is 1\.5; it must be"),
        ({"gpu_memory_utilization": True}, "gpu_memory_utilization is True"),
        (
            {"cpu_tier": "fused", "attention_backend": "triton"},
            "cpu_tier is 'fused', whose layers attend in Rust, and attention_backend is 'triton'",
        ),
        ({"num_lookahead_slots": -1}, "num_lookahead_slots is -1; it must be an integer, at least"),
        ({"seed": -1}, "seed is -1; it must be an integer, at least 0"),
    ],
)
def test_a_bad_value_is_named_with_what_is_accepted(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs(**({"model": "smollm2"} | options))


def parse(*argv: str) -> EngineArgs:
    parser = argparse.ArgumentParser()
    EngineArgs.add_cli_args(parser)
    return EngineArgs.from_cli_args(parser.parse_args(argv))


def test_the_command_line_has_the_same_defaults() -> None:
    assert parse("--model", "smollm2") == EngineArgs(model="smollm2")


def test_every_field_can_be_given_on_the_command_line() -> None:
    given = EngineArgs(
        model="a",
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
        num_lookahead_slots=2,
        attention_backend="torch",
        cpu_tier="modules",
        quantization="int8",
        load_format="dummy",
        enforce_eager=True,
        async_scheduling=True,
        cpu_instructions="avx2",
    )
    argv = []
    for name, value in dataclasses.asdict(given).items():
        option = f"--{name.replace('_', '-')}"
        argv += [option] if value is True else [option, str(value)]
    assert parse(*argv) == given


def test_llm_takes_the_same_arguments_with_the_same_defaults() -> None:
    parameters = dict(inspect.signature(LLM).parameters)
    assert {
        one.name: inspect.Parameter.empty if one.default is dataclasses.MISSING else one.default
        for one in dataclasses.fields(EngineArgs)
    } == {name: parameter.default for name, parameter in parameters.items()}


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1000", 1000), ("2k", 2000), ("512MiB", 512 << 20), ("1.5GiB", 3 << 29), ("2 GB", 2 * 10**9)],
)
def test_bytes_have_units(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "1.2.3k", "-5", "4 apples", "nan"])
def test_other_texts_are_no_bytes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="no number of bytes"):
        parse_bytes(text)
