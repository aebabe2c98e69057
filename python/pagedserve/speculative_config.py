"""Who guesses the next tokens of requests, and how many: vLLM's ``speculative_config``.

Guesses are checked by sampling behind each, so they change how long a text takes, never the text.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, Self, TypeAlias, get_args

import pagedserve.checks as checks
from pagedserve.errors import ConfigError, RequestError
from pagedserve.options import check_options, option

DraftMethod: TypeAlias = Literal["ngram", "suffix", "draft_model"]

# Of a row in one step: a sampler keeps the random numbers of so many tokens before the newest.
MAX_DRAFTS: Final = 32


def _num_drafts(name: str, value: object) -> int:
    number = checks.integer(f"from 1 to {MAX_DRAFTS}", low=1)(name, value)
    if number > MAX_DRAFTS:
        checks.refuse(name, value, f"an integer, from 1 to {MAX_DRAFTS}")
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are guessed; checked when made.

    Raises:
        ConfigError: A value that cannot be, or options that contradict each other.
    """

    method: DraftMethod | None = option(
        None,
        checks.choice((*get_args(DraftMethod), None)),
        "Who guesses: ngram looks up what followed the newest tokens when they came before in the "
        "prompt or the output, suffix also in earlier outputs of the engine, draft_model asks a "
        "smaller model.",
        unset="draft_model where there is a model, else ngram",
    )
    num_speculative_tokens: int = option(
        8, _num_drafts, "Tokens that are guessed of a sequence in a step, at most."
    )
    prompt_lookup_min: int | None = option(
        None,
        checks.optional_count(),
        "Tokens that must have come before, at least.",
        unset="2, or prompt_lookup_max where that is less",
    )
    prompt_lookup_max: int | None = option(
        None,
        checks.optional_count(),
        "Tokens that are compared, at most; of several places the one where most agree is taken.",
        unset="16, or prompt_lookup_min where that is more",
    )
    model: str | None = option(
        None,
        checks.optional(checks.text),
        "The smaller model, with the tokens of the large one; by name or directory.",
    )
    kv_cache_memory: int | None = option(
        None,
        checks.optional_count(),
        "Bytes of the smaller model's KV cache.",
        unset="as of an engine",
    )

    def __post_init__(self) -> None:
        check_options(self)
        method = self.method or ("ngram" if self.model is None else "draft_model")
        object.__setattr__(self, "method", method)
        if (method == "draft_model") != (self.model is not None):
            raise ConfigError(
                f"speculative_config has method {method!r} and model {self.model!r}: a model is "
                "given with method 'draft_model' and with no other"
            )
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        object.__setattr__(self, "prompt_lookup_min", least or min(2, most or 2))
        object.__setattr__(self, "prompt_lookup_max", most or max(16, least or 16))
        if self.match_lengths[0] > self.match_lengths[1]:
            raise ConfigError(
                f"prompt_lookup_min is {least}; it must be at most prompt_lookup_max, {most}"
            )

    @property
    def match_lengths(self) -> tuple[int, int]:
        """Tokens of a match at least, and those that are compared at most."""
        assert self.prompt_lookup_min and self.prompt_lookup_max  # noqa: S101, PT018  # set when made
        return self.prompt_lookup_min, self.prompt_lookup_max

    @classmethod
    def of(cls, name: str, value: object) -> Self:
        """What a caller gave: one of these, or a mapping as vLLM takes it; a check of an option.

        Raises:
            RequestError: Another, an unknown key, or a value that cannot be.
        """
        if isinstance(value, cls):
            return value
        given = checks.mapping(name, value)
        known = [field.name for field in fields(cls)]
        for key in given:
            if key not in known:
                close = difflib.get_close_matches(key, known, 1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise RequestError(
                    f"{name} has {key!r}; accepted are {', '.join(known)}{hint}", param=name
                )
        try:
            return cls(**_without_brackets(given))
        except ConfigError as error:
            raise RequestError(f"{name}: {error}", param=name) from None


def _without_brackets(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options without vLLM's older way to say n-gram: a model of the name ``[ngram]``."""
    if given.get("model") not in ("[ngram]", "ngram"):
        return dict(given)
    return {key: value for key, value in given.items() if key != "model"} | {"method": "ngram"}
