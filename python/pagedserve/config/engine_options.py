"""``EngineOptions``: the options of ``EngineArgs`` as keyword arguments, for type checkers.

``make options`` writes this file from the table of ``EngineArgs``.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from pagedserve.config.reasoning import ReasoningFormat
from pagedserve.config.speculative import SpeculativeConfig

if TYPE_CHECKING:
    import torch


class EngineOptions(TypedDict, total=False):
    """Options of ``EngineArgs`` besides the model; None leaves one at its default.

    ``help(pagedserve.EngineArgs)`` and docs/options.md describe each.
    """

    runner: Literal["auto", "generate", "pooling"] | None
    tokenizer: str | None
    revision: str | None
    tokenizer_revision: str | None
    hf_token: Literal[True] | str | None
    download_dir: str | None
    use_tqdm_on_load: bool | None
    load_format: Literal["auto", "safetensors", "dummy"] | None
    tensor_parallel_size: int | None
    distributed_executor_backend: Literal["mp", "ray", "uni"] | None
    distributed_timeout_seconds: float | None
    max_model_len: int | None
    kv_cache_memory: int | None
    gpu_memory_utilization: float | None
    num_gpu_blocks: int | None
    kv_cache_dtype: (
        Literal[
            "auto",
            "int8",
            "fp8_e4m3",
            "fp8_e5m2",
            "fp8",
            "fp8_per_token_head",
            "int8_per_token_head",
        ]
        | None
    )
    block_size: int | None
    swap_space: float | None
    watermark: float | None
    enable_prefix_caching: bool | None
    disable_hybrid_kv_cache_manager: bool | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    enable_chunked_prefill: bool | None
    scheduling_policy: Literal["fcfs", "priority"] | None
    scheduler_delay_factor: float | None
    max_num_bypasses: int | None
    victim_policy: Literal["last", "least_work"] | None
    preemption_mode: Literal["recompute", "swap"] | None
    async_scheduling: bool | None
    dtype: "Literal['auto', 'float32', 'bfloat16', 'float16', 'half', 'float'] | torch.dtype | None"
    backend: Literal["auto", "torch", "native"] | None
    device: str | None
    quantization: (
        Literal["int8", "w8a8", "int4", "gguf", "gptq", "awq", "compressed-tensors"] | None
    )
    attention_backend: Literal["rust", "triton", "torch", "sdpa"] | None
    cpu_kernels: Literal["fused", "modules", "generic"] | None
    cpu_instructions: str | None
    enforce_eager: bool | None
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None
    enable_lora: bool | None
    max_loras: int | None
    max_lora_rank: int | None
    max_cpu_loras: int | None
    limit_mm_per_prompt: Mapping[str, int] | None
    mm_processor_cache_gb: float | None
    seed: int | None
    max_logprobs: int | None
    generation_config: str | None
    override_generation_config: Mapping[str, Any] | None
    logits_processors: tuple[str, ...] | Sequence[str | type] | None
    reasoning_config: ReasoningFormat | Mapping[str, Any] | None
    decision_log: str | None
    decision_log_max_bytes: int | None
    disable_log_stats: bool | None
