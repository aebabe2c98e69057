"""``SamplingArgs``: options of random numbers, log-probabilities and default parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pagedserve.checks as checks
from pagedserve.config.options import option, parse_mapping
from pagedserve.config.reasoning import ReasoningFormat

# Options for default sampling parameters, without effect in a command that sets all parameters.
DEFAULT_PARAMS: Final = frozenset({"generation_config", "override_generation_config"})


def _processor(name: str, value: object) -> str | type:
    """A class, or its name."""
    return value if isinstance(value, type) else checks.text(name, value)


@dataclass(kw_only=True)
class SamplingArgs:
    """The options of ``EngineArgs`` for sampling."""

    seed: int = option(
        0,
        checks.integer("at least 0", low=0),
        "Seed of the random numbers of requests without a seed.",
        concern="sampling",
    )
    max_logprobs: int = option(
        -1,
        checks.integer("at least 0, or -1 for the whole vocabulary", low=-1),
        "Maximum logprobs and prompt_logprobs of a request; -1 is the whole vocabulary.",
        concern="sampling",
    )
    generation_config: str = option(
        "auto",
        checks.text,
        "Source of the default sampling parameters: auto is the model's generation_config.json, "
        "vllm is SamplingParams(), anything else is a directory with such a file.",
        concern="sampling",
    )
    override_generation_config: Mapping[str, Any] | None = option(
        None,
        checks.optional(checks.mapping),
        "Values that override those of generation_config; JSON on the command line.",
        concern="sampling",
        unset="none",
        parse=parse_mapping,
    )
    logits_processors: tuple[str, ...] = option(
        (),
        checks.each(_processor, "a list of module:Class or classes"),
        "Classes whose method new_req_logits_processor gives a request its logits processor, or "
        "None: module:Class, an entry point of pagedserve.logits_processors, or the class itself.",
        concern="sampling",
        unset="none",
        converts=Sequence[str | type],
    )
    reasoning_config: ReasoningFormat | None = option(
        None,
        checks.optional(ReasoningFormat.of),
        "Tags around the model's reasoning, for thinking_token_budget and for structured_outputs, "
        'which then hold only the text after it, as {"reasoning_start_str": "[THINK]", '
        '"reasoning_end_str": "[/THINK]"}; JSON on the command line.',
        concern="sampling",
        unset="those of a server's --reasoning-parser, else of the chat template",
        parse=parse_mapping,
        converts=Mapping[str, Any],
    )
