"""``PoolingParams``: what is made of a prompt's states."""

from dataclasses import dataclass
from typing import Final

import pagedserve.checks as checks

_SIZE: Final = checks.optional(checks.integer("at least 1, or None", low=1))
_TRUNCATION: Final = checks.optional(
    checks.integer("at least 1, -1 for what the model takes, or None", low=-1)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How a prompt is embedded.

    Attributes:
        dimensions: Only so many numbers of the vector, of models whose config says that they were
            trained for it; None is all of them.
        use_activation: Whether the vector gets length 1; None is the model's own choice.
        truncate_prompt_tokens: Leave out what lies behind so many tokens of a text, -1 for what
            the model takes; None refuses a prompt that is too long.
        prompt_name: Which of the model's own texts comes before a text; None is the one that the
            model names, if any.

    Raises:
        RequestError: A value that cannot be.
    """

    dimensions: int | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_name: str | None = None

    def __post_init__(self) -> None:
        _SIZE("dimensions", self.dimensions)
        checks.optional(checks.flag)("use_activation", self.use_activation)
        checks.optional(checks.text)("prompt_name", self.prompt_name)
        if _TRUNCATION("truncate_prompt_tokens", self.truncate_prompt_tokens) == 0:
            checks.refuse("truncate_prompt_tokens", 0, "at least 1, -1 or None")
