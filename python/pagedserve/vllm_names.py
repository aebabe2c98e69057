"""vLLM's names that this engine spells otherwise or does not have, in one place.

A script written for vLLM runs where it asks for nothing that is not here: an absent option is
accepted with its neutral values, which ask for nothing, and refused by name with any other.
Options that only steer vLLM's own machinery (``HINTS``) are accepted with any value.
"""

import argparse
import ast
import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from functools import wraps
from typing import Any, Final, NamedTuple, TypeVar

from pagedserve.errors import ConfigError, RequestError

T = TypeVar("T")

# vLLM's name -> ours.
ALIASES: Final = {
    "num_gpu_blocks_override": "num_gpu_blocks",
    "kv_cache_memory_bytes": "kv_cache_memory",
}


class Absent(NamedTuple):
    """An option of vLLM that is not here.

    Attributes:
        neutral: Values that ask for nothing; the first is vLLM's default.
        reason: What is said of any other.
    """

    neutral: tuple[object, ...]
    reason: str


def _absent(names: str, neutral: tuple[object, ...], reason: str) -> dict[str, Absent]:
    return dict.fromkeys(names.split(), Absent(neutral, reason))


ABSENT_OPTIONS: Final[dict[str, Absent]] = {
    **_absent(
        "pipeline_parallel_size data_parallel_size "
        "decode_context_parallel_size prefill_context_parallel_size",
        (1, None),
        "one device computes a model",
    ),
    **_absent(
        "worker_use_ray enable_expert_parallel enable_eplb",
        (False, None),
        "one device computes a model",
    ),
    **_absent("trust_remote_code", (False, None), "code of a model's repository is never run"),
    **_absent("code_revision", (None, "main"), "code of a model's repository is never run"),
    **_absent(
        "tokenizer_mode",
        ("auto", "hf"),
        "tokenizers are those of transformers, which converts mistral-common's",
    ),
    **_absent("hf_config_path", (None,), "the config is the model's own"),
    **_absent("skip_tokenizer_init", (False, None), "detokenize=False leaves text out"),
    **_absent("config_format", ("auto", "hf"), "models are in Hugging Face format or GGUF"),
    **_absent("model_impl", ("auto", "transformers"), "models are those of transformers"),
    **_absent("task", ("auto", "generate", None), "give runner"),
    **_absent("convert", ("auto", "none", None), "models do what they were trained for"),
    **_absent("kv_cache_dtype", ("auto",), "keys and values are stored in the model's dtype"),
    **_absent("calculate_kv_scales", (False, None), "keys and values are not quantized"),
    **_absent(
        "cpu_offload_gb kv_offloading_size", (0, None), "weights and KV cache stay on the device"
    ),
    **_absent("quantization_param_path override_attention_dtype", (None,), "it is not there"),
    **_absent("enable_sleep_mode", (False, None), "an engine gives its memory back when it ends"),
    **_absent(
        "enable_prompt_adapter fully_sharded_loras enable_lora_bias",
        (False, None),
        "adapters are LoRA's, without biases, on one device",
    ),
    **_absent("max_prompt_adapters", (1, None), "adapters are LoRA's"),
    **_absent("max_prompt_adapter_token", (0, None), "adapters are LoRA's"),
    **_absent(
        "lora_extra_vocab_size", (256, 0, None), "an adapter has the vocabulary of its model"
    ),
    **_absent("lora_dtype", ("auto", None), "adapters are applied in float32"),
    **_absent(
        "long_lora_scaling_factors default_mm_loras qlora_adapter_name_or_path",
        (None,),
        "adapters are given with each request",
    ),
    **_absent(
        "mm_processor_kwargs media_io_kwargs interleave_mm_strings",
        (None, {}, False),
        "models take text alone",
    ),
    **_absent("allowed_local_media_path", ("", None), "models take text alone"),
    **_absent("enable_prompt_embeds", (False, None), "prompts are text or token ids"),
    **_absent("hf_overrides model_loader_extra_config", (None, {}), "change its config.json"),
    **_absent("rope_scaling rope_theta", (None, {}), "change the model's config.json"),
    **_absent(
        "ignore_patterns", (None, [], ()), "only the files that are needed are fetched anyway"
    ),
    **_absent(
        "speculative_model num_speculative_tokens "
        "speculative_draft_tensor_parallel_size speculative_max_model_len "
        "speculative_disable_by_batch_size ngram_prompt_lookup_max ngram_prompt_lookup_min",
        (None,),
        "give speculative_config",
    ),
    **_absent("num_lookahead_slots", (0, None), "give speculative_config"),
    **_absent("num_scheduler_steps", (1, None), "each step is scheduled"),
    **_absent("disable_sliding_window", (False, None), "a model's window is always obeyed"),
    **_absent("compilation_config", (None, 0, {}), "models are not compiled"),
    **_absent("logits_processors", (None, [], ()), "give them to SamplingParams"),
    **_absent("logprobs_mode", ("raw_logprobs", None), "log-probabilities are the model's own"),
    **_absent("max_num_partial_prefills max_long_partial_prefills", (1, None), "no such limit"),
    **_absent("long_prefill_token_threshold", (0, None), "no such limit"),
    **_absent("scheduler_cls", (None,), "the scheduler is the Rust core's"),
    **_absent(
        "structured_outputs_config pooler_config override_pooler_config "
        "kv_transfer_config kv_events_config otlp_traces_endpoint collect_detailed_traces "
        "additional_config override_neuron_config attention_config profiler_config",
        (None, "", {}),
        "it is not there",
    ),
    **_absent("stream_interval", (1, None), "an output comes with each token"),
    # Of vLLM's server.
    **_absent("tool_parser_plugin tool_server", (None, ""), "formats are a table"),
}

# Sampling parameters of vLLM that are not here, with the values that ask for nothing.
ABSENT_PARAMS: Final[dict[str, tuple[object, ...]]] = {
    "extra_args": (None,),
    "logprob_token_ids": (None,),
    "thinking_token_budget": (None,),
    "stream_interval": (None, 1),
    "repetition_detection": (None,),
    "flat_logprobs": (False, None),
    "skip_clone": (False, None),
    "skip_reading_prefix_cache": (False, None),
}

# Arguments of methods that are not here; None asks for nothing.
ABSENT_ARGUMENTS: Final = frozenset(
    [
        "prompt_adapter_request",
        "guided_options_request",
        "tokenization_kwargs",
        "mm_processor_kwargs",
        "trace_headers",
        "engine_config",
        "stat_loggers",
    ]
)

# Methods of LLM that are not here, and why.
ABSENT_METHODS: Final = {
    **dict.fromkeys(("reward",), "models generate, embed or name classes"),
    **dict.fromkeys(
        ("start_profile", "stop_profile"), "benches/python/engine.py --profile measures an engine"
    ),
    **dict.fromkeys(
        ("sleep", "wake_up"), "an engine gives its memory back when it is no longer referred to"
    ),
    **dict.fromkeys(
        ("collective_rpc", "apply_model"), "the model runs in this process, and is the executor's"
    ),
    "get_metrics": "llm_engine.stats and RequestOutput.metrics have the figures",
    "set_tokenizer": "give LLM(..., tokenizer=...)",
}

# What only steers vLLM's own machinery, or what nothing here depends on.
HINTS: Final = frozenset(
    [
        "max_seq_len_to_capture",
        "max_context_len_to_capture",
        "disable_custom_all_reduce",
        "use_v2_block_manager",
        "disable_async_output_proc",
        "disable_cascade_attn",
        "max_parallel_loading_workers",
        "ray_workers_use_nsight",
        "cuda_graph_sizes",
        "tokenizer_pool_size",
        "tokenizer_pool_type",
        "tokenizer_pool_extra_config",
        "multi_step_stream_outputs",
        "guided_decoding_backend",
        "prefix_caching_hash_algo",
        "served_model_name",
        "disable_log_requests",
        "enable_log_requests",
        "show_hidden_metrics_for_version",
        "enable_auto_tool_choice",
        "exclude_tools_when_tool_choice_none",
    ]
)


def is_neutral(value: object, neutral: Collection[object]) -> bool:
    """Whether a value is one of those; True is not 1 here, and 0 is not False."""
    return any(type(value) is type(same) and value == same for same in neutral)


def own_options(given: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """Options in our names, without vLLM's that ask for nothing.

    Args:
        given: By our names or vLLM's.
        own: Our names.

    Raises:
        ConfigError: An unknown name, one that is given under two names, or an absent option with a
            value that asks for something.
    """
    options: dict[str, Any] = {}
    for name, value in given.items():
        own_name = ALIASES.get(name, name)
        if own_name != name and value is None:
            continue
        if options.get(own_name) is not None:
            raise ConfigError(f"{name} and {own_name} are the same option: give one of them")
        if own_name in own:
            options[own_name] = value
        elif name in ABSENT_OPTIONS:
            _refuse_unless_neutral(name, value)
        elif name not in HINTS:
            raise ConfigError(_unknown(name, value, own))
    return options


def refuse_arguments(given: Mapping[str, object]) -> None:
    """Take the absent arguments of a method where they are None.

    Raises:
        RequestError: Another value.
        TypeError: An argument of another name.
    """
    for name, value in given.items():
        if name not in ABSENT_ARGUMENTS:
            raise TypeError(f"unexpected keyword argument {name!r}")
        if value is not None:
            raise RequestError(f"not supported yet: {name}={value!r}; leave it out")


def _refuse_unless_neutral(name: str, value: object) -> None:
    neutral, reason = ABSENT_OPTIONS[name]
    if not is_neutral(value, neutral):
        raise ConfigError(
            f"{name} is {value!r}, which is not supported: {reason}; leave it out or give "
            f"{neutral[0]!r}"
        )


def _unknown(name: str, value: object, own: Collection[str]) -> str:
    close = difflib.get_close_matches(name, [*own, *ALIASES], n=1)
    hint = f"did you mean {close[0]}?" if close else "help(pagedserve.EngineArgs) lists them all"
    return f"unknown option: {name}={value!r}; {hint}"


def takes_vllm_names(arguments: type[T]) -> type[T]:
    """Let a dataclass of options be made with vLLM's names too."""
    make: Callable[..., None] = arguments.__init__
    own = [option.name for option in fields(arguments)]  # type: ignore[arg-type]  # a dataclass

    @wraps(make)
    def init(self: T, *positional: Any, **options: Any) -> None:
        make(self, *positional, **own_options(options, own))

    arguments.__init__ = init  # type: ignore[method-assign,assignment]
    return arguments


def add_hidden_arguments(group: argparse._ArgumentGroup) -> None:
    """Take vLLM's names on a command line, unseen; left out, they are not in the namespace."""
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for name in sorted({*ALIASES, *ABSENT_OPTIONS, *HINTS}):
        is_flag = name in ABSENT_OPTIONS and ABSENT_OPTIONS[name].neutral[0] is False
        kind: dict[str, Any] = {"type": _literal, "nargs": "?", "const": True}
        if is_flag:
            kind = {"action": argparse.BooleanOptionalAction}
        group.add_argument(f"--{name.replace('_', '-')}", **hidden, **kind)


def _literal(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
