"""vLLM's names that this engine spells differently or does not support, in one place.

A script written for vLLM runs if it needs nothing unsupported: an absent option is accepted with
its neutral values, which change nothing, and refused by name with any other.
Options without effect on results (``HINTS``) are accepted with any value.
"""

import argparse
import ast
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import wraps
from typing import Any, Final, NamedTuple, TypedDict, TypeVar

import pagedserve.checks as checks
from pagedserve.errors import ConfigError, RequestError

T = TypeVar("T")

logger = logging.getLogger(__name__)

# vLLM's name -> ours.
ALIASES: Final = {
    "num_gpu_blocks_override": "num_gpu_blocks",
    "kv_cache_memory_bytes": "kv_cache_memory",
}

# Values of vLLM's ``convert``, and of its former option ``task``, that are ``runner="pooling"``.
_POOLING_TASKS: Final = ("embed", "embedding", "classify", "score")

# vLLM's short options -> names, ours or vLLM's.
_SHORT: Final = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-O": "optimization_level",
    "-ep": "enable_expert_parallel",
    "-cc": "compilation_config",
    "-ac": "attention_config",
}

_WHERE_LISTED: Final = "; help(pagedserve.EngineArgs) lists them all"


class Absent(NamedTuple):
    """An option of vLLM that is not supported.

    Attributes:
        neutral: Values that change nothing; the first is vLLM's default.
        reason: Why any other is refused, or what to give instead; a fact of this engine.
        hints: Keys of a mapping that have no effect here, as options of ``HINTS``; its other keys
            may be off.
    """

    neutral: tuple[object, ...]
    reason: str
    hints: tuple[str, ...] = ()


def _absent(
    names: str, neutral: tuple[object, ...], reason: str, hints: tuple[str, ...] = ()
) -> dict[str, Absent]:
    return dict.fromkeys(names.split(), Absent(neutral, reason, hints))


_NO_PREFILL_LIMIT: Final = "max_num_batched_tokens alone limits the prompts of a step"

# Options of vLLM's server that are no fields of its ``EngineArgs``.
ABSENT_SERVER_OPTIONS: Final[dict[str, Absent]] = {
    **_absent("chat_template", (None,), "give chat_template to LLM.chat, or to a server"),
    **_absent("tool_server", (None, ""), "tools are called by the client"),
    **_absent("tool_strict_level", ("auto", None), "give strict of each tool in requests"),
    **_absent(
        "anthropic_disabled_thinking_effort",
        ("auto", None),
        "thinking that is disabled is a variable of the chat template",
    ),
    **_absent("middleware", (None, []), "a server loads no middleware"),
    **_absent("grpc_port", (None,), "a server serves HTTP alone"),
    **_absent(
        "tokens_only enable_scale_out", (False, None), "a server has the routes of its API alone"
    ),
    **_absent(
        "fingerprint_value",
        (None,),
        "responses have null as their fingerprint",
    ),
    **_absent("api_server_count", (1, None), "one process serves HTTP"),
    **_absent("chat_template_content_format", ("auto", None), "found from the chat template"),
    **_absent(
        "return_tokens_as_token_ids",
        (False, None),
        "give return_tokens_as_token_ids in requests to a server",
    ),
}

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
        "data_parallel_rank data_parallel_start_rank data_parallel_address data_parallel_rpc_port "
        "device_ids",
        (None,),
        "pagedserve deploy runs several replicas",
    ),
    **_absent("data_parallel_size_local", (None, 1), "pagedserve deploy runs several replicas"),
    **_absent(
        "data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb "
        "enable_elastic_ep enable_fault_tolerance",
        (False, None),
        "pagedserve deploy runs several replicas",
    ),
    **_absent("nnodes", (1, None), "give distributed_executor_backend='ray' for several machines"),
    **_absent(
        "node_rank", (0, None), "give distributed_executor_backend='ray' for several machines"
    ),
    **_absent("code_revision", (None, "main"), "code of a model's repository is never run"),
    **_absent(
        "tokenizer_mode",
        ("auto", "hf", "slow"),
        "tokenizers are those of transformers, which converts mistral-common's",
    ),
    **_absent("hf_config_path", (None,), "the config is the model's own"),
    **_absent("model_weights", ("", None), "give the directory of the model's files as the model"),
    **_absent(
        "model_class_overrides quantization_config",
        (None, {}),
        "modules and checkpoints are as the model's config.json says",
    ),
    **_absent("skip_tokenizer_init", (False, None), "detokenize=False leaves text out"),
    **_absent("config_format", ("auto", "hf"), "models are in Hugging Face format or GGUF"),
    **_absent("model_impl", ("auto", "vllm", "transformers"), "models are transformers' classes"),
    **_absent("task", ("auto", "generate", None), "give runner"),
    **_absent("convert", ("auto", "none", None), "models do what they were trained for"),
    **_absent(
        "calculate_kv_scales", (False, None), "scales of keys and values are computed with them"
    ),
    **_absent("cpu_offload_gb", (0, None), "weights stay on the device"),
    **_absent(
        "kv_offloading_size", (0, None), "give swap_space, for the KV blocks of preempted requests"
    ),
    **_absent("offload_group_size", (0, None), "weights stay on the device"),
    **_absent("kv_cache_dtype_skip_layers", (None, []), "all layers have one dtype of the cache"),
    **_absent(
        "kv_sharing_fast_prefill", (False, None), "every layer computes all tokens of a prompt"
    ),
    **_absent(
        "mamba_cache_dtype mamba_ssm_cache_dtype",
        ("auto", None),
        "states have the dtype of the modules that compute them",
    ),
    **_absent(
        "quantization_param_path", (None,), "scales of keys and values are computed with them"
    ),
    **_absent("override_attention_dtype", (None,), "attention has the dtype of the KV cache"),
    **_absent("enable_sleep_mode", (False, None), "shutdown() frees an engine's memory"),
    **_absent(
        "enable_prompt_adapter fully_sharded_loras enable_lora_bias enable_tower_connector_lora "
        "enable_moe_shared_loras",
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
        "long_lora_scaling_factors default_mm_loras qlora_adapter_name_or_path lora_target_modules "
        "max_lora_cls_labels",
        (None,),
        "adapters are given with each request",
    ),
    **_absent(
        "mm_processor_kwargs media_io_kwargs interleave_mm_strings mm_encoder_attn_dtype "
        "trust_request_mm_kwargs",
        (None, {}, False),
        "images and audio are processed as the model's files say",
    ),
    **_absent(
        "allowed_local_media_path", ("", None), "images and audio of requests are sent with them"
    ),
    **_absent(
        "enable_prompt_embeds enable_mm_embeds mm_encoder_only",
        (False, None),
        "prompts are text or token ids, with images or audio",
    ),
    **_absent("hf_overrides model_loader_extra_config", (None, {}), "change its config.json"),
    **_absent("rope_scaling rope_theta", (None, {}), "change the model's config.json"),
    **_absent("ignore_patterns", (None, [], ()), "only needed files are downloaded"),
    **_absent(
        "speculative_model num_speculative_tokens "
        "speculative_draft_tensor_parallel_size speculative_max_model_len "
        "speculative_disable_by_batch_size ngram_prompt_lookup_max ngram_prompt_lookup_min "
        "spec_method spec_model spec_tokens",
        (None,),
        "give speculative_config",
    ),
    **_absent("num_lookahead_slots", (0, None), "give speculative_config"),
    **_absent("num_scheduler_steps", (1, None), "every step is scheduled"),
    **_absent("disable_sliding_window", (False, None), "a model's sliding window always applies"),
    **_absent("logprobs_mode", ("raw_logprobs", None), "log-probabilities are the model's own"),
    **_absent("max_num_partial_prefills max_long_partial_prefills", (1, None), _NO_PREFILL_LIMIT),
    **_absent("long_prefill_token_threshold", (0, None), _NO_PREFILL_LIMIT),
    **_absent("long_prefill_token_threshold_adaptive", (False, None), _NO_PREFILL_LIMIT),
    **_absent("max_num_active_seqs", (None,), "give max_num_seqs"),
    **_absent("scheduler_cls", (None,), "the scheduler is the Rust core's"),
    **_absent("worker_cls", ("auto", None), "workers are those of this engine"),
    **_absent(
        "worker_extension_cls io_processor_plugin", ("", None), "workers are those of this engine"
    ),
    **_absent(
        "structured_outputs_config",
        (None, "", {}),
        "structured_outputs of a request has these options",
        hints=("backend", "disable_fallback"),
    ),
    **_absent(
        "guided_decoding_disable_any_whitespace guided_decoding_disable_additional_properties",
        (None, False),
        "structured_outputs of a request has these options",
    ),
    **_absent("reasoning_parser reasoning_parser_plugin", ("", None), "give reasoning_config"),
    **_absent("logits_processor_pattern", (None,), "give logits_processors"),
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
        "additional_config override_neuron_config profiler_config aux_output_config engram_config "
        "diffusion_config watermark_config ec_transfer_config weight_transfer_config "
        "fault_tolerance_config custom_histogram_buckets",
        (None, "", {}),
        "it configures parts of vLLM",
    ),
    **_absent(
        "enable_return_routed_experts return_sampling_mask enable_trace_replay",
        (False, None),
        "outputs have tokens, text and log-probabilities",
    ),
    **_absent(
        "per_request_spec_decode_metrics", ("none", None), "counts of draft tokens are metrics"
    ),
    **_absent("stream_interval", (1, None), "give stream_interval in requests to a server"),
    **ABSENT_SERVER_OPTIONS,
}

# Sampling parameters of vLLM that are not supported, with the values that change nothing.
ABSENT_PARAMS: Final[dict[str, tuple[object, ...]]] = {
    "logprob_token_ids": (None,),
    "stream_interval": (None, 1),
    "repetition_detection": (None,),
    "flat_logprobs": (False, None),
    "skip_clone": (False, None, True),
    "skip_reading_prefix_cache": (False, None),
}


class AbsentNamedArguments(TypedDict, total=False):
    """Arguments of methods that are not supported, and have no position in vLLM."""

    guided_options_request: None
    tokenization_kwargs: Mapping[str, Any] | None
    mm_processor_kwargs: Mapping[str, Any] | None
    stat_loggers: Sequence[object] | None
    data_parallel_rank: None
    prompt_text: None
    reasoning_ended: None
    reasoning_parser_kwargs: None


class AbsentArguments(AbsentNamedArguments, total=False):
    """Arguments of methods that are not supported; None and empty ones change nothing."""

    prompt_adapter_request: None
    trace_headers: None


class AbsentPoolingArguments(AbsentArguments, total=False):
    """Arguments of methods that pool that are not supported; None changes nothing."""

    lora_request: None


# With the one that ``AsyncLLMEngine.from_engine_args`` takes by position.
ABSENT_ARGUMENTS: Final = frozenset(AbsentPoolingArguments.__annotations__) | {"engine_config"}

# Keys of absent mappings that have no effect here: no model accepts videos.
_HINT_KEYS: Final = {"mm_processor_kwargs": ("fps", "do_sample_frames")}
_EMPTY: Final[tuple[object, ...]] = (None, [], {}, ())

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

# Options without effect here, with the reason that a log line gives.
_NOTED_FLAGS: Final = {
    "trust_remote_code": "code of a model's repository is never run",
    **dict.fromkeys(
        ("enable_expert_parallel", "enable_eplb"), "tensor_parallel_size splits each expert"
    ),
    "language_model_only": "limit_mm_per_prompt={'image': 0} refuses images",
    "enable_log_outputs": "log_prompts logs prompts and outputs",
    "enable_per_request_metrics": "GET /metrics has the times of requests",
    "disable_fastapi_docs": "/openapi.json describes a server, and no other pages exist",
    "enable_ssl_refresh": "certificates are read at the start",
}
_NOTED_VALUES: Final = {
    "log_config_file": "log_format is the format of a server's log",
}

# Options that affect vLLM's internals alone, or nothing that is visible to the caller.
_HINT_FLAGS: Final = frozenset(
    [
        "disable_custom_all_reduce",
        "use_v2_block_manager",
        "disable_async_output_proc",
        "disable_cascade_attn",
        "ray_workers_use_nsight",
        "disable_log_requests",
        "enable_log_requests",
        "enable_auto_tool_choice",
        "exclude_tools_when_tool_choice_none",
        "skip_mm_profiling",
        "disable_frontend_multiprocessing",
        "numa_bind",
        "enable_hc_sp",
        "enable_batch_sharded_sampling",
        "enable_ep_weight_filter",
        "enable_dbo",
        "disable_nccl_for_dp_synchronization",
        "eplb_log_balancedness",
        "use_fp64_gumbel",
        "aggregate_engine_logging",
        "allow_deprecated_quantization",
        "enable_shm_tensor_arena",
        "mm_device_do_normalize",
        "specialize_active_lora",
        "enable_mixed_moe_lora_format",
        "disable_chunked_mm_input",
        "disable_mm_preprocessor_cache",
        "enable_multimodal_encoder_data_parallel",
        "scheduler_reserve_full_isl",
        "kv_cache_metrics",
        "cudagraph_metrics",
        "enable_layerwise_nvtx_tracing",
        "enable_mfu_metrics",
        "enable_logging_iteration_details",
        "jit_monitor_verbose",
        "enable_mm_processor_stats",
        "enable_flashinfer_autotune",
        "sleep_mode_offload_cudagraph",
        "enable_cumem_allocator",
        "enable_nccl_comm_suspend",
        "enable_mamba_shared_prefix_checkpoint",
        "use_replayssm",
        "enable_mamba_cache_stochastic_rounding",
        "swa_bounded_replay",
        "fail_on_environ_validation",
        "guided_decoding_disable_fallback",
        "dcp_q_replicate",
        "enable_offline_docs",
        "log_error_stack",
        "enable_log_deltas",
        "enable_flash_late_interaction",
        "cohere_is_reasoning_model",
        "disable_uvicorn_access_log",
        "enable_request_id_headers",
        "enable_server_load_tracking",
        "enable_tokenizer_info_endpoint",
    ]
)
_HINT_LISTS: Final = frozenset(
    [
        "cuda_graph_sizes",
        "cudagraph_capture_sizes",
        "numa_bind_nodes",
        "numa_bind_cpus",
        "cpu_offload_params",
        "offload_params",
        "allowed_media_domains",
        "sleep_preserve_parameter_names",
    ]
)
_HINT_VALUES: Final = frozenset(
    [
        "max_seq_len_to_capture",
        "max_context_len_to_capture",
        "max_parallel_loading_workers",
        "tokenizer_pool_size",
        "tokenizer_pool_type",
        "tokenizer_pool_extra_config",
        "multi_step_stream_outputs",
        "guided_decoding_backend",
        "prefix_caching_hash_algo",
        "served_model_name",
        "show_hidden_metrics_for_version",
        "optimization_level",
        "mm_encoder_tp_mode",
        "compilation_config",
        "attention_config",
        "kernel_config",
        "mamba_config",
        "eplb_config",
        "ec_manager_config",
        "logging_config",
        "log_level",
        "performance_mode",
        "safetensors_load_strategy",
        "safetensors_prefetch_num_threads",
        "safetensors_prefetch_block_size",
        "pt_load_map_location",
        "max_cudagraph_capture_size",
        "ir_op_priority",
        "master_addr",
        "master_port",
        "cpu_distributed_timeout_seconds",
        "data_parallel_backend",
        "dp_sync_interval",
        "dcp_comm_backend",
        "dcp_kv_cache_interleave_size",
        "cp_kv_cache_interleave_size",
        "data_parallel_supervisor_port",
        "dp_supervisor_probe_interval_s",
        "dp_supervisor_probe_timeout_s",
        "dp_supervisor_probe_failure_threshold",
        "_api_process_count",
        "_api_process_rank",
        "moe_backend",
        "linear_backend",
        "all2all_backend",
        "sparse_indexer_topk_backend",
        "gdn_prefill_backend",
        "kda_prefill_backend",
        "kda_decode_backend",
        "elastic_ep_max_dp_size",
        "ubatch_size",
        "dbo_decode_token_threshold",
        "dbo_prefill_token_threshold",
        "expert_placement_strategy",
        "num_redundant_experts",
        "eplb_window_size",
        "eplb_step_interval",
        "offload_backend",
        "offload_num_in_group",
        "offload_prefetch_step",
        "kv_offloading_backend",
        "prefix_cache_retention_interval",
        "prefix_match_unit",
        "max_num_scheduled_tokens",
        "prefill_schedule_interval",
        "mm_processor_cache_type",
        "mm_hasher_algorithm",
        "mm_shm_cache_max_object_size_mb",
        "mm_encoder_attn_backend",
        "mm_encoder_fp8_scale_path",
        "mm_encoder_fp8_scale_save_path",
        "mm_encoder_fp8_scale_save_margin",
        "mm_tensor_ipc",
        "mm_processor_device",
        "mm_ipc_gpu_memory_gb",
        "video_pruning_rate",
        "video_pruning_method",
        "renderer_num_workers",
        "kv_cache_metrics_sample",
        "jit_monitor_mode",
        "mamba_block_size",
        "mamba_cache_mode",
        "mamba_backend",
        "mamba_ssu_algorithm",
        "mamba_cache_philox_rounds",
        "replayssm_buffer_len",
        "shutdown_timeout",
        "max_num_queued_reqs",
        "max_num_queued_tokens",
        "disable_access_log_for_endpoints",
        "h11_max_incomplete_event_size",
        "h11_max_header_count",
        "fingerprint_mode",
        "cohere_format",
    ]
)

# Options that are accepted with any value, and why a log line says so; empty where none does.
HINTS: Final[dict[str, str]] = {
    **dict.fromkeys((*_HINT_FLAGS, *_HINT_LISTS, *_HINT_VALUES), ""),
    **_NOTED_FLAGS,
    **_NOTED_VALUES,
}

# vLLM's names of options of an engine.
ENGINE_NAMES: Final = tuple(
    name for name in (*ALIASES, *ABSENT_OPTIONS, *HINTS) if name not in ABSENT_SERVER_OPTIONS
)


def is_neutral(value: object, neutral: Collection[object]) -> bool:
    """Whether a value is one of those; True is not 1 here, 0 is not False, and 0.0 is 0."""
    return any(_kind(value) is _kind(same) and value == same for same in neutral)


def _kind(value: object) -> type:
    return float if type(value) is int else type(value)


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
    names: dict[str, str] = {}
    for name, named in given.items():
        own_name, value = _own_option(name, named)
        if value in (None, "auto") and (own_name != name or own_name in options):
            continue
        if options.get(own_name) not in (None, "auto", value):
            raise ConfigError(f"{name} and {names[own_name]} are the same option: give one of them")
        names[own_name] = name
        if own_name in own:
            options[own_name] = value
        elif name in ABSENT_OPTIONS:
            _refuse_unless_neutral(name, value)
        elif name not in HINTS:
            raise ConfigError(_unknown(name, value, own))
        elif value and HINTS[name]:
            logger.warning("%s is %r, which has no effect: %s", name, value, HINTS[name])
    return options


def _own_option(name: str, value: object) -> tuple[str, object]:
    """Name and value here of an option by our name or vLLM's."""
    if name in ("task", "convert") and value in _POOLING_TASKS:
        return "runner", "pooling"
    return ALIASES.get(name, name), value


def refuse_arguments(given: Mapping[str, object]) -> None:
    """Accept the absent arguments of a method if they change nothing.

    Raises:
        RequestError: Another value.
        TypeError: An argument of another name.
    """
    for name, value in given.items():
        if name not in ABSENT_ARGUMENTS:
            raise TypeError(f"unexpected keyword argument {name!r}")
        if not changes_nothing(name, value):
            raise RequestError(f"not supported yet: {name}={value!r}; leave it out")


def changes_nothing(name: str, value: object) -> bool:
    """Whether an absent argument, or key of a prompt, is empty apart from keys without effect."""
    if isinstance(value, Mapping):
        hints = _HINT_KEYS.get(name, ())
        return all(key in hints or is_neutral(part, _EMPTY) for key, part in value.items())
    return is_neutral(value, _EMPTY)


def _refuse_unless_neutral(name: str, value: object) -> None:
    neutral, reason, hints = ABSENT_OPTIONS[name]
    requested = value
    if hints and isinstance(value, Mapping):
        requested = {key: part for key, part in value.items() if part and key not in hints}
    if not is_neutral(requested, neutral):
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


def add_hidden_arguments(
    parser: argparse.ArgumentParser, names: Collection[str] = ENGINE_NAMES
) -> None:
    """Accept vLLM's names on a command line, hidden; not given, they are not in the namespace.

    Options of a script by the same names, added before or later, replace them.
    """
    flags = {f"--{name.replace('_', '-')}": name for name in names}
    own = parser._option_string_actions.keys()  # noqa: SLF001  # argparse has no other names
    for flag, name in sorted((flags | _SHORT).items()):
        if flag not in own:
            hidden: dict[str, Any] = {
                "dest": name,
                "default": argparse.SUPPRESS,
                "help": argparse.SUPPRESS,
            }
            parser.add_argument(flag, **hidden, **_kind_of(name))
    for container in (parser, *parser._action_groups):  # noqa: SLF001  # as above
        container.conflict_handler = "resolve"


def _kind_of(name: str) -> dict[str, Any]:
    """How ``add_argument`` reads a hidden option."""
    is_off = name in ABSENT_OPTIONS and ABSENT_OPTIONS[name].neutral[0] is False
    if is_off or name in _HINT_FLAGS or name in _NOTED_FLAGS:
        return {"action": argparse.BooleanOptionalAction}
    if name in _HINT_LISTS:
        return {"type": _literal, "nargs": "+"}
    return {"type": _literal, "nargs": "?", "const": True}


def _literal(text: str) -> object:
    for read in (json.loads, ast.literal_eval):
        with suppress(SyntaxError, ValueError):
            return read(text)
    return text
