"""pagedserve: a paged-attention serving engine whose scheduler is a separate library.

``import pagedserve`` loads neither torch nor transformers; each name is loaded when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from pagedserve._core import __version__
from pagedserve.collector import collector_paused
from pagedserve.errors import extra_needed

if TYPE_CHECKING:
    from pagedserve._core import (
        BlockSpaceManager,
        CacheChoices,
        CacheConfig,
        CachedBlockAllocator,
        GroupStats,
        InputBuffers,
        KVGroup,
        LRUEvictor,
        Prefix,
        ScheduledSequenceGroup,
        Scheduler,
        SchedulerChoices,
        SchedulerConfig,
        SchedulerOutputs,
        SequenceGroupMetadata,
        TokenLookup,
        UncachedBlockAllocator,
    )
    from pagedserve.config import EngineArgs
    from pagedserve.engine.arg_utils import AsyncEngineArgs
    from pagedserve.engine.async_engine import AsyncLLMEngine
    from pagedserve.engine.client import EngineClient
    from pagedserve.engine.llm_engine import LLMEngine
    from pagedserve.errors import (
        ConcurrentCallError,
        ConfigError,
        EngineDeadError,
        EngineStalledError,
        ExecutorDeadError,
        InvariantError,
        ModelLoadError,
        PagedServeError,
        RequestError,
        StaleHandleError,
        StepError,
        UnsupportedModelError,
    )
    from pagedserve.inputs import ExplicitEncoderDecoderPrompt, TextPrompt, TokensPrompt
    from pagedserve.llm import LLM
    from pagedserve.lora.request import LoRARequest
    from pagedserve.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        PoolingRequestOutput,
        RequestMetrics,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from pagedserve.pooling_params import PoolingParams
    from pagedserve.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
    from pagedserve.structured_outputs import StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "BlockSpaceManager",
    "CacheChoices",
    "CacheConfig",
    "CachedBlockAllocator",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "ConcurrentCallError",
    "ConfigError",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineClient",
    "EngineDeadError",
    "EngineStalledError",
    "ExecutorDeadError",
    "ExplicitEncoderDecoderPrompt",
    "GroupStats",
    "InputBuffers",
    "InvariantError",
    "KVGroup",
    "LLMEngine",
    "LRUEvictor",
    "LoRARequest",
    "Logprob",
    "ModelLoadError",
    "PagedServeError",
    "PoolingParams",
    "PoolingRequestOutput",
    "Prefix",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScheduledSequenceGroup",
    "Scheduler",
    "SchedulerChoices",
    "SchedulerConfig",
    "SchedulerOutputs",
    "ScoringOutput",
    "ScoringRequestOutput",
    "SequenceGroupMetadata",
    "StaleHandleError",
    "StepError",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokenLookup",
    "TokensPrompt",
    "UncachedBlockAllocator",
    "UnsupportedModelError",
    "__version__",
]

_HOME = {
    "LLM": "pagedserve.llm",
    "AsyncEngineArgs": "pagedserve.engine.arg_utils",
    "AsyncLLMEngine": "pagedserve.engine.async_engine",
    "LLMEngine": "pagedserve.engine.llm_engine",
    "EngineArgs": "pagedserve.config",
    "EngineClient": "pagedserve.engine.client",
    "LoRARequest": "pagedserve.lora.request",
    "PoolingParams": "pagedserve.pooling_params",
    "StructuredOutputsParams": "pagedserve.structured_outputs",
    **dict.fromkeys(
        ["BeamSearchParams", "RequestOutputKind", "SamplingParams"], "pagedserve.sampling_params"
    ),
    **dict.fromkeys(
        ["ExplicitEncoderDecoderPrompt", "TextPrompt", "TokensPrompt"], "pagedserve.inputs"
    ),
    **dict.fromkeys(
        [
            "BeamSearchOutput",
            "BeamSearchSequence",
            "ClassificationOutput",
            "ClassificationRequestOutput",
            "CompletionOutput",
            "EmbeddingOutput",
            "EmbeddingRequestOutput",
            "PoolingRequestOutput",
            "Logprob",
            "RequestMetrics",
            "RequestOutput",
            "ScoringOutput",
            "ScoringRequestOutput",
        ],
        "pagedserve.outputs",
    ),
    **dict.fromkeys(
        [
            "BlockSpaceManager",
            "CacheChoices",
            "CacheConfig",
            "CachedBlockAllocator",
            "GroupStats",
            "InputBuffers",
            "LRUEvictor",
            "Prefix",
            "ScheduledSequenceGroup",
            "Scheduler",
            "SchedulerChoices",
            "SchedulerConfig",
            "SchedulerOutputs",
            "SequenceGroupMetadata",
            "TokenLookup",
            "UncachedBlockAllocator",
            "KVGroup",
        ],
        "pagedserve._core",
    ),
    **dict.fromkeys(
        [
            "ConcurrentCallError",
            "ConfigError",
            "EngineDeadError",
            "EngineStalledError",
            "ExecutorDeadError",
            "InvariantError",
            "ModelLoadError",
            "PagedServeError",
            "RequestError",
            "StaleHandleError",
            "StepError",
            "UnsupportedModelError",
        ],
        "pagedserve.errors",
    ),
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'pagedserve' has no attribute {name!r}")
    with extra_needed(f"pagedserve.{name}", "engine"), collector_paused():
        value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
