"""What the core's scheduler is told, of the arguments, the model and its memory."""

from pagedserve._core import SchedulerConfig
from pagedserve.config import EngineArgs
from pagedserve.errors import ConfigError
from pagedserve.executor.memory import MemoryPlan
from pagedserve.executor.protocol import ModelInfo, StepLimits


def scheduler_config(
    args: EngineArgs, max_model_len: int, memory: MemoryPlan | None = None
) -> SchedulerConfig:
    """The limits and options of the scheduler.

    Args:
        args: The user's.
        max_model_len: Tokens of a sequence of the model.
        memory: Where the memory goes; None while that is not known, and only limits are wanted.

    Raises:
        ConfigError: Prefixes are to be cached of a model that keeps states.
    """
    options = args.scheduler_options
    if memory is not None and memory.num_state_slots:
        if args.num_drafts:
            raise ConfigError(
                f"speculative_config is {args.speculative_config}, and layers of this model keep a "
                "state of the whole sequence, which cannot go back behind a wrong guess: leave it "
                "out"
            )
        if args.enable_prefix_caching:
            raise ConfigError(
                "enable_prefix_caching is True, and layers of this model keep a state of the whole "
                "sequence, which no block of a prefix has: leave it out"
            )
        options |= {
            "num_state_slots": memory.num_state_slots,
            "num_cpu_state_slots": memory.num_cpu_state_slots,
        }
    return SchedulerConfig(max_model_len=max_model_len, **options)


def step_limits(config: SchedulerConfig, model: ModelInfo, args: EngineArgs) -> StepLimits:
    """The most that a step of such a scheduler may hold.

    A window's keys are kept for as long as a query of a step may see them, which writes its own
    first; all keys where prefixes are shared, or no sequence gets so long.  Where some layers see
    less than others, those have blocks of their own.
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
