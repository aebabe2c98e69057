# Names at the top level.  `make stubs` writes this file from __init__.py.

from pagedserve._core import __version__
from pagedserve.config import EngineArgs
from pagedserve.config.engine_options import EngineOptions
from pagedserve.decisions.answers import (
    ChoiceAnswer,
    Decision,
    Diagnostics,
    NoulAnswer,
    ScoreAnswer,
)
from pagedserve.decisions.calibration import Calibration
from pagedserve.decisions.questions import Question
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
    ModelLoadError,
    PagedServeError,
    RequestError,
    UnsupportedModelError,
)
from pagedserve.inputs import ExplicitEncoderDecoderPrompt, Prompt, TextPrompt, TokensPrompt
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
from pagedserve.sampling_params.structured_outputs import StructuredOutputsParams
from pagedserve.scheduler import (
    BlockMoves,
    BlockSpaceManager,
    CacheChoices,
    CacheConfig,
    CachedBlockAllocator,
    GroupStats,
    InputBuffers,
    InvariantError,
    KVGroup,
    LRUEvictor,
    Prefix,
    ScheduledSequenceGroup,
    Scheduler,
    SchedulerChoices,
    SchedulerConfig,
    SchedulerOutputs,
    SequenceGroupMetadata,
    StaleHandleError,
    StepError,
    TokenLookup,
    UncachedBlockAllocator,
)

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "BlockMoves",
    "BlockSpaceManager",
    "CacheChoices",
    "CacheConfig",
    "CachedBlockAllocator",
    "Calibration",
    "ChoiceAnswer",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "ConcurrentCallError",
    "ConfigError",
    "Decision",
    "Diagnostics",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineClient",
    "EngineDeadError",
    "EngineOptions",
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
    "NoulAnswer",
    "PagedServeError",
    "PoolingParams",
    "PoolingRequestOutput",
    "Prefix",
    "Prompt",
    "Question",
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
    "ScoreAnswer",
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
