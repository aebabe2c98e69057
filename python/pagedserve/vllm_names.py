"""vLLM's names that this engine spells differently or does not support, in one place.

A script written for vLLM runs if it needs nothing unsupported: an absent option is accepted with
its neutral values, which change nothing, and refused by name with any other.
Options that only steer vLLM's own machinery (``HINTS``) are accepted with any value.
"""

import argparse
import ast
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from functools import wraps
from typing import Any, Final, NamedTuple, TypedDict, TypeVar

import pagedserve.checks as checks
from pagedserve.errors import ConfigError, RequestError

T = TypeVar("T")

# vLLM's name -> ours.
ALIASES: Final = {
    "num_gpu_blocks_override": "num_gpu_blocks",
    "kv_cache_memory_bytes": "kv_cache_memory",
}

# vLLM's short options -> names, ours or vLLM's.
_SHORT: Final = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-O": "optimization_level",
}

_WHERE_LISTED: Final = "; help(pagedserve.EngineArgs) lists them all"


class Absent(NamedTuple):
    """An option of vLLM that is not supported.

    Attributes:
        neutral: Values that change nothing; the first is vLLM's default.
        reason: Why any other is refused, or what to give instead; a fact of this engine.
    """

    neutral: tuple[object, ...]
    reason: str


def _absent(names: str, neutral: tuple[object, ...], reason: str) -> dict[str, Absent]:
    return dict.fromkeys(names.split(), Absent(neutral, reason))


_NO_PREFILL_LIMIT: Final = "max_num_batched_tokens alone limits the prompts of a step"

ABSENT_OPTIONS: Final[dict[str, Absent]] = {
    **_absent(
        "pipeline_parallel_size", (1, None), "give tensor_parallel_size, which splits every layer"
    ),
    **_absent("data_parallel_size", (1, None), "pagedserve deploy runs several replicas"),
    **_absent(
        "decode_context_parallel_size prefill_context_parallel_size",
        (1, None),
        "tensor_parallel_size splits the KV cache by heads alone",
    ),
    **_absent("worker_use_ray", (False, None), "give distributed_executor_backend='ray'"),
    **_absent(
        "enable_expert_parallel enable_eplb",
        (False, None),
        "tensor_parallel_size splits each expert",
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
    **_absent("model_impl", ("auto", "transformers"), "models are transformers' classes"),
    **_absent("task", ("auto", "generate", None), "give runner"),
    **_absent("convert", ("auto", "none", None), "models do what they were trained for"),
    **_absent(
        "calculate_kv_scales", (False, None), "scales of keys and values are computed with them"
    ),
    **_absent("cpu_offload_gb", (0, None), "weights stay on the device"),
    **_absent(
        "kv_offloading_size", (0, None), "give swap_space, for the KV blocks of preempted requests"
    ),
    **_absent(
        "quantization_param_path", (None,), "scales of keys and values are computed with them"
    ),
    **_absent("override_attention_dtype", (None,), "attention has the dtype of the KV cache"),
    **_absent("enable_sleep_mode", (False, None), "shutdown() frees an engine's memory"),
    **_absent(
        "enable_prompt_adapter fully_sharded_loras enable_lora_bias",
        (False, None),
        "adapters are LoRA's, without biases, in one process",
    ),
    **_absent("max_prompt_adapters", (1, None), "adapters are LoRA's"),
    **_absent("max_prompt_adapter_token", (0, None), "adapters are LoRA's"),
    **_absent(
        "lora_extra_vocab_size", (256, 0, None), "an adapter has the vocabulary of its model"
    ),
    **_absent("lora_dtype", ("auto", None), "adapters have the model's dtype"),
    **_absent(
        "long_lora_scaling_factors default_mm_loras qlora_adapter_name_or_path",
        (None,),
        "adapters are given with each request",
    ),
    **_absent(
        "mm_processor_kwargs media_io_kwargs interleave_mm_strings",
        (None, {}, False),
        "images and audio are processed as the model's files say",
    ),
    **_absent(
        "allowed_local_media_path", ("", None), "images and audio of requests are sent with them"
    ),
    **_absent(
        "enable_prompt_embeds",
        (False, None),
        "prompts are text or token ids, with images or audio",
    ),
    **_absent("hf_overrides model_loader_extra_config", (None, {}), "change its config.json"),
    **_absent("rope_scaling rope_theta", (None, {}), "change the model's config.json"),
    **_absent("ignore_patterns", (None, [], ()), "only needed files are downloaded"),
    **_absent(
        "speculative_model num_speculative_tokens "
        "speculative_draft_tensor_parallel_size speculative_max_model_len "
        "speculative_disable_by_batch_size ngram_prompt_lookup_max ngram_prompt_lookup_min",
        (None,),
        "give speculative_config",
    ),
    **_absent("num_lookahead_slots", (0, None), "give speculative_config"),
    **_absent("num_scheduler_steps", (1, None), "every step is scheduled"),
    **_absent("disable_sliding_window", (False, None), "a model's sliding window always applies"),
    **_absent("compilation_config", (None, 0, {}), "models are not compiled"),
    **_absent("logprobs_mode", ("raw_logprobs", None), "log-probabilities are the model's own"),
    **_absent("max_num_partial_prefills max_long_partial_prefills", (1, None), _NO_PREFILL_LIMIT),
    **_absent("long_prefill_token_threshold", (0, None), _NO_PREFILL_LIMIT),
    **_absent("scheduler_cls", (None,), "the scheduler is the Rust core's"),
    **_absent("structured_outputs_config", (None, "", {}), "llguidance compiles all grammars"),
    **_absent(
        "pooler_config override_pooler_config",
        (None, "", {}),
        "pooling is that of the model's files",
    ),
    **_absent(
        "kv_transfer_config kv_events_config", (None, "", {}), "each engine has its KV cache alone"
    ),
    **_absent(
        "otlp_traces_endpoint collect_detailed_traces",
        (None, "", {}),
        "give otlp_traces_endpoint to a server, which traces requests",
    ),
    **_absent(
        "additional_config override_neuron_config attention_config profiler_config",
        (None, "", {}),
        "it configures parts of vLLM",
    ),
    **_absent("stream_interval", (1, None), "give stream_interval in requests to a server"),
    # Options of vLLM's server.
    **_absent("tool_server", (None, ""), "tools are called by the client"),
    **_absent("api_server_count", (1, None), "one process serves HTTP"),
    **_absent("chat_template_content_format", ("auto", None), "found from the chat template"),
    **_absent(
        "return_tokens_as_token_ids",
        (False, None),
        "give return_tokens_as_token_ids in requests to a server",
    ),
}

# Sampling parameters of vLLM that are not supported, with the values that change nothing.
ABSENT_PARAMS: Final[dict[str, tuple[object, ...]]] = {
    "extra_args": (None,),
    "logprob_token_ids": (None,),
    "stream_interval": (None, 1),
    "repetition_detection": (None,),
    "flat_logprobs": (False, None),
    "skip_clone": (False, None),
    "skip_reading_prefix_cache": (False, None),
}


class AbsentArguments(TypedDict, total=False):
    """Arguments of methods that are not supported; None changes nothing."""

    prompt_adapter_request: None
    guided_options_request: None
    tokenization_kwargs: None
    mm_processor_kwargs: None
    trace_headers: None
    stat_loggers: None


class AbsentPoolingArguments(AbsentArguments, total=False):
    """Arguments of methods that pool that are not supported; None changes nothing."""

    lora_request: None


# With the one that ``AsyncLLMEngine.from_engine_args`` takes by position.
ABSENT_ARGUMENTS: Final = frozenset(AbsentPoolingArguments.__annotations__) | {"engine_config"}

# Methods of LLM that are not supported, and why.
ABSENT_METHODS: Final = {
    "reward": "models generate, embed, classify or score",
    **dict.fromkeys(
        ("start_profile", "stop_profile"), "benches/python/engine.py --profile measures an engine"
    ),
    **dict.fromkeys(
        ("sleep", "wake_up"), "shutdown() frees the memory, and a new LLM allocates it again"
    ),
    **dict.fromkeys(
        ("collective_rpc", "apply_model"), "the model belongs to the executor and its ranks"
    ),
    "set_tokenizer": "give LLM(..., tokenizer=...)",
}

# Options that affect vLLM's internals alone, or nothing that is visible to the caller.
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
        "optimization_level",
        "mm_encoder_tp_mode",
        "skip_mm_profiling",
        "disable_frontend_multiprocessing",
        # A server has no access log of uvicorn, and always an X-Request-Id, GET /load and
        # GET /tokenizer_info.
        "disable_uvicorn_access_log",
        "enable_request_id_headers",
        "enable_server_load_tracking",
        "enable_tokenizer_info_endpoint",
    ]
)


def is_neutral(value: object, neutral: Collection[object]) -> bool:
    """Whether a value is one of those; True is not 1 here, and 0 is not False."""
    return any(type(value) is type(same) and value == same for same in neutral)


def own_options(given: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """Options by our names, without vLLM's neutral ones.

    Args:
        given: Options by our names or vLLM's.
        own: Our names.

    Raises:
        ConfigError: An unknown name, an option given under two names, or an absent option with a
            value that is not neutral.
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
    """Accept the absent arguments of a method if they are None.

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
    hint = checks.did_you_mean(name, [*own, *ALIASES])
    return f"unknown option: {name}={value!r}{hint or _WHERE_LISTED}"


def takes_names(
    own_names: Callable[[dict[str, Any]], dict[str, Any]],
) -> Callable[[type[T]], type[T]]:
    """Let a dataclass accept further names of its arguments.

    Args:
        own_names: Returns named arguments by the names of the dataclass.
    """

    def decorate(arguments: type[T]) -> type[T]:
        make: Callable[..., None] = arguments.__init__

        @wraps(make)
        def init(self: T, *positional: Any, **named: Any) -> None:
            make(self, *positional, **own_names(named))

        arguments.__init__ = init  # type: ignore[method-assign,assignment]
        return arguments

    return decorate


def takes_vllm_names(arguments: type[T]) -> type[T]:
    """Let a dataclass of options accept vLLM's names too."""
    own = [option.name for option in fields(arguments)]  # type: ignore[arg-type]  # a dataclass
    return takes_names(lambda given: own_options(given, own))(arguments)


def add_hidden_arguments(parser: argparse.ArgumentParser) -> None:
    """Accept vLLM's names on a command line, hidden; not given, they are not in the namespace."""
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for name in sorted({*ALIASES, *ABSENT_OPTIONS, *HINTS}):
        is_flag = name in ABSENT_OPTIONS and ABSENT_OPTIONS[name].neutral[0] is False
        kind: dict[str, Any] = {"type": _literal, "nargs": "?", "const": True}
        if is_flag:
            kind = {"action": argparse.BooleanOptionalAction}
        parser.add_argument(f"--{name.replace('_', '-')}", **hidden, **kind)
    for flag, name in _SHORT.items():
        parser.add_argument(flag, dest=name, type=_literal, **hidden)


def _literal(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
