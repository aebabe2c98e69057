"""Construction of an engine's components from its arguments.

A tokenizer and an executor are imported only to be loaded: an engine that is given both needs no
torch.
"""

import logging
from concurrent.futures import Future, wait
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from pagedserve._core import CacheConfig, KVGroup, Scheduler, SchedulerConfig
from pagedserve.config import EngineArgs
from pagedserve.engine.ahead import OpenedFiles, begin_packing, open_files, take_ahead
from pagedserve.errors import ConfigError, extra_needed
from pagedserve.executor.memory import MemoryPlan
from pagedserve.executor.protocol import CacheShape, Executor, ModelInfo, StepLimits
from pagedserve.models.load.sources import ModelSource, find_source
from pagedserve.native.choice import BackendChoice, check_backend, choose_backend
from pagedserve.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pagedserve.models.load.gguf_header import GgufHeader
    from pagedserve.native.load import LoadedNative

logger = logging.getLogger(__name__)


def load(
    args: EngineArgs, tokenizer: Tokenizer | None, executor: Executor | None
) -> tuple[Tokenizer, Executor]:
    """Load a model and its tokenizer, of which the caller may have given one or both.

    Raises:
        ImportError: A package that the backend needs is not installed.
        ConfigError: The backend does not support the options.
        ModelLoadError: The model or its tokenizer cannot be loaded.
    """
    if executor is not None:
        if tokenizer is None:
            tokenizer = _load_tokenizer(args, choose_backend(args), None)
        return tokenizer, executor
    check_backend(args)
    begun = take_ahead(args)
    if begun is None and tokenizer is None:  # before a model is found, and perhaps downloaded
        with extra_needed("pagedserve.LLMEngine", choose_backend(args).extra):
            import_module("tokenizers")
    files = open_files(args, find_source(args)) if begun is None else begun.files
    logger.info("backend: %s, %s", files.backend.name, files.backend.reason)
    if files.opened is not None:
        loaded = begin_packing(args, files.opened) if begun is None else begun.loaded
        return _load_native(args, files, loaded, tokenizer)
    # Before the weights, so that a model without a tokenizer is refused at once.
    if tokenizer is None:
        tokenizer = _load_tokenizer(args, files.backend, files.source)
    with extra_needed("pagedserve.LLMEngine", files.backend.extra):
        from pagedserve.executor.choose import make_executor
    return tokenizer, make_executor(args)


def _load_native(
    args: EngineArgs,
    files: OpenedFiles,
    loaded: "Future[LoadedNative]",
    tokenizer: Tokenizer | None,
) -> tuple[Tokenizer, Executor]:
    """Load a model of the native backend; its weights are packed while its tokenizer is made."""
    try:
        from pagedserve.native.executor import NativeExecutor  # which takes a while

        if tokenizer is None:
            header = None if files.opened is None else files.opened.header
            tokenizer = _load_tokenizer(args, files.backend, files.source, header)
    finally:
        wait([loaded])  # the files are closed before an error is reported
    return tokenizer, NativeExecutor(args, loaded.result())


def _load_tokenizer(
    args: EngineArgs,
    backend: BackendChoice,
    source: ModelSource | None,
    header: "GgufHeader | None" = None,
) -> Tokenizer:
    """Load the model's tokenizer; with transformers only where torch may run the model too."""
    with extra_needed("pagedserve.LLMEngine", backend.extra):
        from pagedserve.models.tokenizer.loader import load_tokenizer

        uses_transformers = None if backend.may_be_torch else False
        return load_tokenizer(
            args, uses_transformers=uses_transformers, model=source, header=header
        )


@dataclass(frozen=True, slots=True)
class Built:
    """Scheduler of an engine, with its configuration and memory plan.

    Attributes:
        scheduler: The scheduler.
        config: Configuration of the scheduler.
        cache: Configuration of the KV cache.
        memory: Memory plan: how the memory is used.
    """

    scheduler: Scheduler
    config: SchedulerConfig
    cache: CacheConfig
    memory: MemoryPlan


def build(args: EngineArgs, executor: Executor) -> Built:
    """Determine the number of blocks, create the scheduler, and allocate the KV cache.

    Raises:
        ConfigError: Arguments that contradict each other, the model or the available memory.
    """
    model = executor.model_info
    config = scheduler_config(args, model.max_model_len)
    limits = step_limits(config, model, args)
    memory = executor.determine_num_blocks(limits)
    logger.info("%s", memory.describe())
    config = scheduler_config(args, config.max_model_len, memory)
    groups = memory.groups
    if model.encoder_decoder is not None:
        groups = (*groups, KVGroup("cross"))
    cache = CacheConfig(
        num_gpu_blocks=memory.num_gpu_blocks,
        num_cpu_blocks=memory.num_cpu_blocks,
        groups=groups,
        **args.cache_options,
    )
    scheduler = Scheduler(
        config, cache, log=args.decision_log, log_max_bytes=args.decision_log_max_bytes
    )
    executor.init_cache(
        CacheShape(
            num_gpu_blocks=memory.num_gpu_blocks,
            num_cpu_blocks=memory.num_cpu_blocks,
            block_size=cache.block_size,
            limits=limits,
            groups=groups,
        )
    )
    return Built(scheduler, config, cache, memory)


def scheduler_config(
    args: EngineArgs, max_model_len: int, memory: MemoryPlan | None = None
) -> SchedulerConfig:
    """Create the configuration of the scheduler.

    Args:
        args: Options of the engine.
        max_model_len: Maximum tokens of a sequence of the model.
        memory: Memory plan; None while it is not known, and only the limits are needed.

    Raises:
        ConfigError: Prefix caching or draft tokens with a model that has recurrent states.
    """
    options = args.scheduler_options
    if memory is not None and any(group.kind == "state" for group in memory.groups):
        if args.num_drafts:
            raise ConfigError(
                f"speculative_config is {args.speculative_config}, and layers of this model keep a "
                "state of the whole sequence, which cannot be rolled back after a rejected draft "
                "token: leave it out"
            )
        if args.enable_prefix_caching:
            raise ConfigError(
                "enable_prefix_caching is True, and layers of this model keep a state of the whole "
                "sequence, which the blocks of a prefix do not contain: leave it out"
            )
    return SchedulerConfig(max_model_len=max_model_len, **options)


def step_limits(config: SchedulerConfig, model: ModelInfo, args: EngineArgs) -> StepLimits:
    """Maximum contents of a step of such a scheduler.

    Layers with a sliding window or chunks have separate blocks, unless no sequence is longer.
    """
    window = model.group_window
    if args.disable_hybrid_kv_cache_manager or (window or 0) >= config.max_model_len:
        window = None
    return StepLimits(
        max_num_tokens=config.max_num_batched_tokens,
        max_num_rows=config.max_num_seqs,
        max_model_len=config.max_model_len,
        group_window=window,
        group_kind=model.group_kind,
        num_lookahead_slots=args.num_drafts,
    )
