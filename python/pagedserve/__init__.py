"""pagedserve: a paged-attention serving engine whose scheduler is a separate library.

``import pagedserve`` loads neither torch nor transformers; each name is loaded when first used.
Type checkers read the names from ``__init__.pyi``, which ``make stubs`` writes from this module.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Final

from pagedserve._core import __version__ as __version__
from pagedserve.collector import collector_paused
from pagedserve.errors import extra_needed

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

# Names that ``dir`` lists, by the module that defines them.
_LISTED: Final = {
    "pagedserve._core": ["__version__"],
    "pagedserve.llm": ["LLM"],
    "pagedserve.config": ["EngineArgs"],
    "pagedserve.engine.arg_utils": ["AsyncEngineArgs"],
    "pagedserve.engine.async_engine": ["AsyncLLMEngine"],
    "pagedserve.engine.client": ["EngineClient"],
    "pagedserve.engine.llm_engine": ["LLMEngine"],
    "pagedserve.config.engine_options": ["EngineOptions"],
    "pagedserve.inputs": [
        "ExplicitEncoderDecoderPrompt",
        "Prompt",
        "PromptType",
        "TextPrompt",
        "TokensPrompt",
    ],
    "pagedserve.lora.request": ["LoRARequest"],
    "pagedserve.decisions.answers": [
        "ChoiceAnswer",
        "Decision",
        "Diagnostics",
        "NoulAnswer",
        "ScoreAnswer",
    ],
    "pagedserve.decisions.calibration": ["Calibration"],
    "pagedserve.decisions.questions": ["Question"],
    "pagedserve.pooling_params": ["PoolingParams"],
    "pagedserve.sampling_params": ["BeamSearchParams", "RequestOutputKind", "SamplingParams"],
    "pagedserve.sampling_params.structured_outputs": ["StructuredOutputsParams"],
    "pagedserve.outputs": [
        "BeamSearchOutput",
        "BeamSearchSequence",
        "ClassificationOutput",
        "ClassificationRequestOutput",
        "CompletionOutput",
        "EmbeddingOutput",
        "EmbeddingRequestOutput",
        "Logprob",
        "PoolingOutput",
        "PoolingRequestOutput",
        "RequestMetrics",
        "RequestOutput",
        "ScoringOutput",
        "ScoringRequestOutput",
    ],
    "pagedserve.errors": [
        "ConcurrentCallError",
        "ConfigError",
        "EngineDeadError",
        "EngineStalledError",
        "ExecutorDeadError",
        "ModelLoadError",
        "PagedServeError",
        "RequestError",
        "UnsupportedModelError",
    ],
}
# Names whose public module is ``pagedserve.scheduler``, accepted here too.
_SCHEDULER: Final = {
    "pagedserve.scheduler": [
        "BlockMoves",
        "BlockSpaceManager",
        "CacheChoices",
        "CacheConfig",
        "CachedBlockAllocator",
        "GroupStats",
        "InputBuffers",
        "InvariantError",
        "LRUEvictor",
        "Prefix",
        "ScheduledSequenceGroup",
        "Scheduler",
        "SchedulerChoices",
        "SchedulerConfig",
        "SchedulerOutputs",
        "SequenceGroupMetadata",
        "StaleHandleError",
        "StepError",
        "TokenLookup",
        "UncachedBlockAllocator",
        "KVGroup",
    ],
}
_HOME: Final = {name: module for module, names in (_LISTED | _SCHEDULER).items() for name in names}

__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'pagedserve' has no attribute {name!r}")
    with extra_needed(f"pagedserve.{name}", "engine"), collector_paused():
        value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(name for names in _LISTED.values() for name in names)


class _VllmModules:
    """Meta path finder for vLLM's module names.

    It imports ``vllm_modules`` only when no file has the name.
    """

    @staticmethod
    def find_spec(name: str, *_more: object) -> "ModuleSpec | None":
        if not name.startswith("pagedserve."):
            return None
        from pagedserve.vllm_modules import find_spec

        return find_spec(name)


class _OtherNames:
    """Meta path finder for ``pagedserve`` under another name: ``sys.modules["vllm"] = pagedserve``.

    Comes first: the files would be found too, and give each module a second time.
    """

    @staticmethod
    def find_spec(name: str, *_more: object) -> "ModuleSpec | None":
        package, _, module = name.partition(".")
        if package == __name__ or package not in sys.modules:
            return None
        if sys.modules[package] is not sys.modules.get(__name__):
            return None
        from pagedserve.vllm_modules import find_other_name

        return find_other_name(name, f"{__name__}.{module}")


sys.meta_path.insert(0, _OtherNames)
sys.meta_path.append(_VllmModules)
