"""Construction of an engine's components from its arguments.

A tokenizer and an executor are imported only to be loaded: an engine that is given both needs no
torch.
"""

import logging
from dataclasses import dataclass

from pagedserve._core import CacheConfig, KVGroup, Scheduler, SchedulerConfig
from pagedserve.config import EngineArgs
from pagedserve.engine.scheduler_config import scheduler_config, step_limits
from pagedserve.errors import extra_needed
from pagedserve.executor.memory import MemoryPlan
from pagedserve.executor.protocol import CacheShape, Executor
from pagedserve.native.choice import choose_backend
from pagedserve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def load_tokenizer(args: EngineArgs) -> Tokenizer:
    """Load the model's tokenizer; see `pagedserve.models.tokenizer`."""
    with extra_needed("pagedserve.LLMEngine", "engine"):
        import pagedserve.models.tokenizer as tokenizer
    is_native = choose_backend(args).name == "native"
    return tokenizer.load_tokenizer(args, uses_transformers=False if is_native else None)


def load_executor(args: EngineArgs) -> Executor:
    """Load the model by the backend of the options.

    Raises:
        ConfigError: An option that the backend does not support.
        ImportError: The backend is torch, and a package that it needs is not installed.
    """
    backend = choose_backend(args)
    logger.info("backend: %s, %s", backend.name, backend.reason)
    if backend.name == "native":
        from pagedserve.native.executor import NativeExecutor

        return NativeExecutor(args)
    with extra_needed("pagedserve.LLMEngine", "engine"):
        from pagedserve.executor.choose import make_executor
    return make_executor(args)


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
