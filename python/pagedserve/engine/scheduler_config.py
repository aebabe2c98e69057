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
    if memory is not None and memory.num_state_slots:
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
        options |= {
            "num_state_slots": memory.num_state_slots,
            "num_cpu_state_slots": memory.num_cpu_state_slots,
        }
    return SchedulerConfig(max_model_len=max_model_len, **options)


def step_limits(config: SchedulerConfig, model: ModelInfo, args: EngineArgs) -> StepLimits:
    """Maximum contents of a step of such a scheduler.

    Keys of a sliding window are kept while a query of a step may attend to them, after it has
    written its keys; all keys are kept if prefixes are shared, or if no sequence is longer.  Layers
    with smaller windows than others have separate blocks.
    """
    window = None
    if model.sliding_window is not None and not args.enable_prefix_caching:
        window = model.sliding_window + config.max_num_batched_tokens - 1
    return StepLimits(
        max_num_tokens=config.max_num_batched_tokens,
        max_num_rows=config.max_num_seqs,
        max_model_len=config.max_model_len,
        window=None if window is None or window >= config.max_model_len else window,
        group_window=None if args.disable_hybrid_kv_cache_manager else model.group_window,
        num_lookahead_slots=args.num_drafts,
    )
