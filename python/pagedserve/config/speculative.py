"""Speculative decoding: the proposer of draft tokens, and how many; vLLM's ``speculative_config``.

Draft tokens are verified by sampling after each, so they change the time of an output, never the
output.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, Self, TypeAlias, get_args

import pagedserve.checks as checks
from pagedserve.config.options import check_options, option, parse_mapping
from pagedserve.errors import ConfigError, RequestError

DraftMethod: TypeAlias = Literal["ngram", "suffix", "draft_model"]

# Draft tokens of a row per step: a sampler keeps the random numbers of as many earlier tokens.
MAX_DRAFTS: Final = 32


def _num_drafts(name: str, value: object) -> int:
    number = checks.integer(f"from 1 to {MAX_DRAFTS}", low=1)(name, value)
    if number > MAX_DRAFTS:
        checks.refuse(name, value, f"an integer, from 1 to {MAX_DRAFTS}")
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How draft tokens are proposed; checked when made.

    Raises:
        ConfigError: An invalid value, or options that contradict each other.
    """

    method: DraftMethod | None = option(
        None,
        checks.choice((*get_args(DraftMethod), None)),
        "Proposer of draft tokens: ngram looks up what followed the newest tokens earlier in the "
        "prompt or the output, suffix also in earlier outputs of the engine, draft_model runs a "
        "smaller model.",
        concern="speculative decoding",
        unset="draft_model if model is given, else ngram",
    )
    num_speculative_tokens: int = option(
        8,
        _num_drafts,
        f"Maximum number of draft tokens of a sequence per step, from 1 to {MAX_DRAFTS}.",
        concern="speculative decoding",
    )
    prompt_lookup_min: int | None = option(
        None,
        checks.optional_count(),
        "Minimum number of matching tokens.",
        concern="speculative decoding",
        unset="2, or prompt_lookup_max if less",
    )
    prompt_lookup_max: int | None = option(
        None,
        checks.optional_count(),
        "Maximum number of tokens compared; the longest match is used.",
        concern="speculative decoding",
        unset="16, or prompt_lookup_min if more",
    )
    model: str | None = option(
        None,
        checks.optional(checks.text),
        "Name or directory of the draft model, which must have the same vocabulary.",
        concern="speculative decoding",
        unset="none",
    )
    kv_cache_memory: int | None = option(
        None,
        checks.optional_count(),
        "Size of the draft model's KV cache, in bytes.",
        concern="speculative decoding",
        unset="that of an engine",
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
        """Minimum number of matching tokens, and maximum number compared."""
        assert self.prompt_lookup_min and self.prompt_lookup_max  # noqa: S101, PT018  # set when made
        return self.prompt_lookup_min, self.prompt_lookup_max

    @classmethod
    def of(cls, name: str, value: object) -> Self:
        """Check an option: a ``SpeculativeConfig``, or a mapping as vLLM accepts it.

        Raises:
            RequestError: Another type, an unknown key, or an invalid value.
        """
        if isinstance(value, cls):
            return value
        given = checks.mapping(name, value)
        known = [field.name for field in fields(cls)]
        for key in given:
            if key not in known:
                hint = checks.did_you_mean(key, known)
                raise RequestError(
                    f"{name} has {key!r}; accepted are {', '.join(known)}{hint}", param=name
                )
        try:
            return cls(**_without_brackets(given))
        except ConfigError as error:
            raise RequestError(f"{name}: {error}", param=name) from None


def _without_brackets(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options with vLLM's older spelling of n-gram, the model ``[ngram]``, as ``method``."""
    if given.get("model") not in ("[ngram]", "ngram"):
        return dict(given)
    return {key: value for key, value in given.items() if key != "model"} | {"method": "ngram"}


@dataclass(kw_only=True)
class SpeculativeArgs:
    """The option of ``EngineArgs`` for speculative decoding."""

    speculative_config: SpeculativeConfig | None = option(
        None,
        checks.optional(SpeculativeConfig.of),
        'Propose several draft tokens and verify them in one step, as {"method": "ngram"}; JSON on '
        "the command line. docs/speculation.md lists its options.",
        concern="speculative decoding",
        unset="one token per step",
        parse=parse_mapping,
        converts=Mapping[str, Any],
    )

    @property
    def num_drafts(self) -> int:
        """Maximum number of draft tokens of a sequence per step."""
        drafts = self.speculative_config
        return 0 if drafts is None else drafts.num_speculative_tokens
