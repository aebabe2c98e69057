"""Configuration of the core's scheduler from the arguments, the model and its memory."""

from pagedserve._core import SchedulerConfig
from pagedserve.config import EngineArgs
from pagedserve.errors import ConfigError
from pagedserve.executor.memory import MemoryPlan
from pagedserve.executor.protocol import ModelInfo, StepLimits


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
