"""Options that the Rust core takes by its names; it also defines their defaults.

The defaults are read from it, so that help and documentation show those of the core.
"""

from typing import Any, Final, Literal, TypeAlias

import pagedserve.checks as checks
from pagedserve._core import CacheConfig, SchedulerConfig
from pagedserve.config.options import Concern, option, options_of

# A configuration of the core.
Part: TypeAlias = Literal["scheduler", "cache"]

# Hold the core's defaults.
_CORE: Final = {
    "scheduler": SchedulerConfig(max_model_len=1),
    "cache": CacheConfig(block_size=1, num_gpu_blocks=1),
}


def core_option(
    part: Part,
    core_name: str,
    check: checks.Check[object],
    text: str,
    *,
    concern: Concern,
    unset: str | None = None,
) -> Any:
    """An option of the core, whose default is defined there; ``unset`` overrides its text."""
    shown = str(getattr(_CORE[part], core_name)) if unset is None else unset
    return option(None, check, text, concern=concern, unset=shown, part=part, core_name=core_name)


def by_chunks(core_name: str, more: str = "", chunked: int | None = None) -> str:
    """The default of an option that depends on ``enable_chunked_prefill``.

    Args:
        core_name: Name in the core.
        more: What follows.
        chunked: Default with chunked prefill, if it is not the core's.
    """
    config = SchedulerConfig(max_model_len=1, enable_chunked_prefill=True)
    return (
        f"{chunked or getattr(config, core_name)} with chunked prefill, else "
        f"{getattr(_CORE['scheduler'], core_name)}{more}"
    )


def core_options(arguments: Any, part: Part) -> dict[str, Any]:
    """Arguments of one configuration of the core, without those at the core's default."""
    values = {
        known.core_name or argument.name: getattr(arguments, argument.name)
        for argument, known in options_of(arguments)
        if known.part == part
    }
    return {name: value for name, value in values.items() if value is not None}
