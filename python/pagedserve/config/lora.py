"""``LoRAArgs``: options of LoRA adapters."""

from dataclasses import dataclass

import pagedserve.checks as checks
from pagedserve.config.options import option


@dataclass(kw_only=True)
class LoRAArgs:
    """The options of ``EngineArgs`` for LoRA adapters."""

    enable_lora: bool = option(
        False, checks.flag, "Accept requests with LoRA adapters.", concern="LoRA"
    )
    max_loras: int = option(
        4,
        checks.count(0),
        "Maximum number of adapters per step, all of which are kept on the device; at least 1 with "
        "enable_lora.",
        concern="LoRA",
    )
    max_lora_rank: int = option(16, checks.count(), "Maximum rank of an adapter.", concern="LoRA")
    max_cpu_loras: int | None = option(
        None,
        checks.optional_count(),
        "Maximum number of adapters kept in host memory, at least max_loras.",
        concern="LoRA",
        unset="max_loras",
    )
