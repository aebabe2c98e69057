"""``CacheArgs``: options of the KV cache and its memory."""

from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

import pagedserve.checks as checks
from pagedserve.config.core_options import core_option, core_options
from pagedserve.config.options import option, parse_bytes
from pagedserve.errors import ConfigError

KVCacheDtype: TypeAlias = Literal["auto", "int8", "fp8_e4m3", "fp8_e5m2"]

# Names of vLLM.
_DTYPE_ALIASES: Final = {
    "fp8": "fp8_e4m3",
    "fp8_per_token_head": "fp8_e4m3",
    "int8_per_token_head": "int8",
}


def _kv_cache_dtype(name: str, value: object) -> object:
    given = _DTYPE_ALIASES.get(value, value) if isinstance(value, str) else value
    return checks.choice(get_args(KVCacheDtype))(name, given)


# The default; a model on the CPU accepts nothing else.
GPU_MEMORY_UTILIZATION: Final = 0.9


@dataclass(kw_only=True)
class CacheArgs:
    """The options of ``EngineArgs`` for the KV cache and its memory."""

    max_model_len: int | None = option(
        None,
        checks.optional_count(2),
        "Maximum number of tokens of a sequence, prompt and output together, at least 2.",
        concern="memory and KV cache",
        unset="the model's maximum",
    )
    kv_cache_memory: int | None = option(
        None,
        checks.optional_count(),
        "Size of the KV cache in bytes; the command line also accepts units, as in 512MiB.",
        concern="memory and KV cache",
        unset="1 GiB on the CPU, less if less is free; on a GPU what gpu_memory_utilization leaves",
        parse=parse_bytes,
    )
    gpu_memory_utilization: float = option(
        GPU_MEMORY_UTILIZATION,
        checks.real("a number above 0, at most 1", low=0, high=1, open_low=True),
        "Fraction of the GPU's total memory for weights, activations, CUDA graphs and KV cache "
        "together, above 0, at most 1. The largest step is run once to measure what activations "
        "need. On the CPU only the default is accepted.",
        concern="memory and KV cache",
    )
    num_gpu_blocks: int | None = option(
        None,
        checks.optional_count(),
        "Number of KV blocks.",
        concern="memory and KV cache",
        unset="as many as fit in kv_cache_memory",
    )
    kv_cache_dtype: KVCacheDtype = option(
        "auto",
        _kv_cache_dtype,
        "Storage type of keys and values: auto is dtype; int8, fp8_e4m3 (or fp8) and fp8_e5m2 have "
        "a scale for each token and KV head, so that almost twice as many blocks fit as of "
        "bfloat16, or four times as many as of float32; int8 is the most accurate. Attention "
        "backends rust and triton; block_size is a multiple of 16.",
        concern="memory and KV cache",
        converts=Literal["fp8", "fp8_per_token_head", "int8_per_token_head"],
    )
    block_size: int = option(
        16,
        checks.count(),
        "Number of tokens per KV block.",
        concern="memory and KV cache",
        part="cache",
    )
    swap_space: float | None = option(
        None,
        checks.optional(checks.real("a number of GiB, at least 0, or None", low=0)),
        "Host memory for the KV blocks of preempted requests, in GiB.",
        concern="memory and KV cache",
        unset="as much as the KV cache, at most 4 and at most half of the free host memory",
    )
    watermark: float | None = core_option(
        "cache",
        "watermark",
        checks.optional(checks.real("a number from 0 to 1, or None", low=0, high=1)),
        "Fraction of the KV blocks that stays free when a prompt is admitted.",
        concern="memory and KV cache",
    )
    enable_prefix_caching: bool | None = core_option(
        "cache",
        "enable_prefix_caching",
        checks.optional(checks.flag),
        "Keep computed KV blocks for later prompts with the same prefix.",
        concern="memory and KV cache",
    )
    disable_hybrid_kv_cache_manager: bool = option(
        False,
        checks.flag,
        "Store layers with a sliding window or attention chunks in the same KV blocks as "
        "full-attention layers, with as many tokens.",
        concern="memory and KV cache",
    )

    @property
    def cache_options(self) -> dict[str, Any]:
        """Arguments of ``CacheConfig``, without those at the core's default."""
        return core_options(self, "cache")

    def check_head_size(self, head_size: int) -> None:
        """Check that heads of a model can be stored as ``kv_cache_dtype`` says.

        Raises:
            ConfigError: They cannot.
        """
        if self.kv_cache_dtype != "auto" and head_size % 16:
            raise ConfigError(
                f"kv_cache_dtype is {self.kv_cache_dtype!r}, which needs heads of a multiple of 16 "
                f"numbers, and those of the model have {head_size}: leave it out"
            )

    def check_without_gpu(self) -> None:
        """Check the options of a model on the CPU.

        Raises:
            ConfigError: A fraction of the GPU's memory is given.
        """
        if self.gpu_memory_utilization != GPU_MEMORY_UTILIZATION:
            raise ConfigError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}, and the model is on the "
                "CPU, whose memory other programs use too: give kv_cache_memory instead"
            )
