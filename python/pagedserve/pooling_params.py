"""``PoolingParams``: parameters of a pooling request."""

from dataclasses import InitVar, dataclass
from typing import Final, Literal, TypeAlias, get_args

import pagedserve.checks as checks

# Tasks of pooling models.
PoolingTask: TypeAlias = Literal["encode", "embed", "classify", "score"]


_SIZE: Final = checks.optional(checks.integer("at least 1, or None", low=1))
_TRUNCATION: Final = checks.optional(
    checks.integer("at least 1, -1 for what the model takes, or None", low=-1, high=2**31 - 1)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Parameters of a pooling request.

    Attributes:
        dimensions: Number of leading components of the vector to return, for Matryoshka models;
            None is all of them.
        use_activation: Whether the vector is normalized to length 1; None is the model's default.
        truncate_prompt_tokens: Number of first tokens of a text to keep, -1 for the model's
            maximum; None refuses a prompt that is too long.
        prompt_name: Name of the model's prompt that is prepended to a text; None is the model's
            default, if any.
        task: Task, which the model must support; None is the model's default.
        normalize: Older name of ``use_activation``.

    Raises:
        RequestError: A value is invalid.
    """

    dimensions: int | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_name: str | None = None
    task: PoolingTask | None = None
    normalize: InitVar[bool | None] = None

    def __post_init__(self, normalize: bool | None) -> None:
        if normalize is not None:
            if self.use_activation not in (None, normalize):
                checks.refuse("normalize", normalize, "use_activation, of which it is another name")
            object.__setattr__(self, "use_activation", normalize)
        if self.task is not None:
            checks.choice(get_args(PoolingTask))("task", self.task)
        _SIZE("dimensions", self.dimensions)
        checks.optional(checks.flag)("use_activation", self.use_activation)
        checks.optional(checks.text)("prompt_name", self.prompt_name)
        if _TRUNCATION("truncate_prompt_tokens", self.truncate_prompt_tokens) == 0:
            checks.refuse("truncate_prompt_tokens", 0, "at least 1, -1 or None")
