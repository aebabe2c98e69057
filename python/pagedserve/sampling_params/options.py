"""``SamplingOptions``: every sampling parameter, each defined once.

The table below feeds ``SamplingParams``, the fields of requests to a server, the command line and
docs/sampling.md.  What a parameter does is in ``pagedserve.sampling`` or ``pagedserve.output``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

import pagedserve.checks as checks
import pagedserve.sampling_params.checks as own_checks
from pagedserve.checks import Check, did_you_mean
from pagedserve.config.options import options_of
from pagedserve.errors import RequestError
from pagedserve.sampling_params.checks import EarlyStopping
from pagedserve.sampling_params.output_kind import RequestOutputKind
from pagedserve.sampling_params.parameter import (
    Biases,
    ExtraArgs,
    Format,
    Integer,
    OptionalInteger,
    OptionalTokenIds,
    Parameter,
    Processors,
    Real,
    StopStrings,
    Strings,
    TokenIds,
    parameter,
)
from pagedserve.sampling_params.structured_outputs import StructuredOutputsParams

_hold: Final = object.__setattr__


@dataclass(slots=True)
class SamplingOptions:
    """The values of all sampling parameters, in vLLM's order, each checked when it is set."""

    n: Integer = parameter(
        1,
        own_checks.count(1),
        "Number of outputs to return, from 1 to 2147483647.",
        concern="parallel sampling",
        request="own",
        flag="number of outputs per prompt",
    )
    best_of: OptionalInteger = parameter(
        None,
        checks.optional(own_checks.count(1, ", or None for n")),
        "Number of sequences to sample, of which the n most likely are returned; the width of a "
        "beam search. At least n.",
        concern="parallel sampling",
        unset="n",
        flag="number of sampled sequences; the most likely --n are returned",
    )
    presence_penalty: Real = parameter(
        0.0,
        own_checks.PENALTY,
        "Subtracted from the logit of each token in the output, from -2 to 2.",
        concern="penalties and allowed tokens",
        flag="penalty on tokens that have occurred, -2 to 2",
    )
    frequency_penalty: Real = parameter(
        0.0,
        own_checks.PENALTY,
        "Subtracted from the logit of each token in the output, multiplied by the token's count "
        "there, from -2 to 2.",
        concern="penalties and allowed tokens",
        flag="penalty per occurrence of a token, -2 to 2",
    )
    repetition_penalty: Real = parameter(
        1.0,
        own_checks.FACTOR,
        "Divides the logit of each token in the prompt or output, or multiplies it where it is "
        "negative; from 1e-30 to 1e30.",
        concern="penalties and allowed tokens",
        recommended_as="repetition_penalty",
        flag="above 1 discourages repetition, below 1 encourages it",
    )
    temperature: Real = parameter(
        1.0,
        own_checks.temperature,
        "Divides the logits; 0 is greedy sampling. Values below 0.00001 become 0.",
        concern="sampling",
        off=(0,),
        recommended_as="temperature",
        flag="randomness of sampling; 0 is greedy",
    )
    top_p: Real = parameter(
        1.0,
        checks.real("above 0 and at most 1", low=0, high=1, open_low=True),
        "Keep the smallest set of tokens whose probability reaches this, in (0, 1].",
        concern="sampling",
        off=(1,),
        recommended_as="top_p",
        flag="cumulative probability of the sampled tokens, above 0, at most 1",
    )
    top_k: Integer = parameter(
        -1,
        checks.integer("at least 1, or -1 or 0 for all tokens", low=-1),
        "Keep the k most likely tokens; -1 or 0 keeps all.",
        concern="sampling",
        off=(-1, 0),
        recommended_as="top_k",
        flag="number of most likely tokens to sample from; -1 is all",
    )
    min_p: Real = parameter(
        0.0,
        checks.real("from 0 to 1", low=0, high=1),
        "Keep tokens with at least this fraction of the highest probability, in [0, 1].",
        concern="sampling",
        off=(0,),
        recommended_as="min_p",
        flag="minimum probability relative to the most likely token, 0 to 1",
    )
    seed: OptionalInteger = parameter(
        None,
        own_checks.minus_one_is_none,
        "Seed of the request's random numbers, which gives the same tokens in any batch; -1 is "
        "none.",
        concern="parallel sampling",
        request="own",
        unset="derived from the engine's seed and the request's ordinal",
        flag="seed of the random numbers",
    )
    use_beam_search: bool = parameter(
        False,
        checks.flag,
        "Return the n most likely outputs of a beam search with best_of beams, at least 2; "
        "requires temperature 0 and no filter of the tokens to sample from.",
        concern="beam search",
    )
    length_penalty: Real = parameter(
        1.0,
        checks.real("from -10 to 10", low=-10, high=10),
        "The log-probability of a beam is divided by its length to this power, from -10 to 10.",
        concern="beam search",
        flag="exponent of the length that a beam's score is divided by",
    )
    early_stopping: EarlyStopping = parameter(
        False,
        own_checks.early_stopping,
        "When a beam search ends, once best_of beams have ended: True at once, False when a better "
        'one is unlikely, "never" only when a better one is impossible.',
        concern="beam search",
    )
    stop: StopStrings = parameter(
        None,
        own_checks.stop,
        "Strings that end the request; one or a list.",
        concern="text",
        unset="none",
        flag="stop string; may be repeated",
    )
    stop_token_ids: TokenIds = parameter(
        None,
        checks.each(own_checks.TOKEN_ID, "a list of token ids"),
        "Further tokens that end the request; the token is part of token_ids. Its text is omitted, "
        "as for the end-of-sequence token.",
        concern="text",
        unset="none",
    )
    include_stop_str_in_output: bool = parameter(
        False,
        checks.flag,
        "Include in the text the stop string or token that ended it.",
        concern="text",
    )
    ignore_eos: bool = parameter(
        False,
        checks.flag,
        "Continue after the end-of-sequence token; without effect with structured_outputs.",
        concern="length",
    )
    max_tokens: OptionalInteger = parameter(
        16,
        checks.optional(own_checks.count(1, ", or None for no limit")),
        "Maximum number of new tokens, from 1 to 2147483647; None sets no limit. The engine's "
        "max_model_len may end the request earlier.",
        concern="length",
        request="own",
        recommended_as="max_new_tokens",
        flag="maximum number of new tokens",
    )
    min_tokens: Integer = parameter(
        0,
        own_checks.count(0, ", and at most max_tokens"),
        "Minimum number of new tokens before an end-of-sequence or stop token; without effect "
        "with structured_outputs.",
        concern="length",
    )
    logprobs: OptionalInteger = parameter(
        None,
        own_checks.num_logprobs,
        "Number of most likely tokens to return with the log-probability of each new token; -1 is "
        "the whole vocabulary.",
        concern="log-probabilities",
        request="own",
        unset="no log-probabilities",
        flag="number of most likely tokens to print for each position",
    )
    prompt_logprobs: OptionalInteger = parameter(
        None,
        own_checks.num_logprobs,
        "Number of most likely tokens to return with the log-probability of each prompt token. "
        "With max_tokens 1 the prompt may have max_model_len tokens, since the new token is not "
        "computed further.",
        concern="log-probabilities",
        request="own",
        unset="no log-probabilities",
    )
    detokenize: bool = parameter(
        True,
        checks.flag,
        "Produce text; stop requires it.",
        concern="text",
        request="none",
    )
    skip_special_tokens: bool = parameter(
        True,
        checks.flag,
        "Omit special tokens from the text.",
        concern="text",
        request="own",
    )
    spaces_between_special_tokens: bool = parameter(
        True,
        checks.flag,
        "Accepted for compatibility without effect: the tokenizers of transformers 5 add no such "
        "spaces.",
        concern="text",
    )
    logits_processors: Processors = parameter(
        None,
        checks.each(checks.function, "a list of callables"),
        "Called in turn with the output token ids and the logits, [V]; one with three arguments "
        "gets the prompt's token ids first. Each returns the logits for the next.",
        concern="penalties and allowed tokens",
        unset="none",
        request="none",
    )
    truncate_prompt_tokens: OptionalInteger = parameter(
        None,
        own_checks.truncate_prompt_tokens,
        "Number of last prompt tokens to keep, at least 1; -1 keeps as many as leave space for a "
        "new one.",
        concern="length",
        unset="all",
    )
    output_kind: RequestOutputKind = parameter(
        RequestOutputKind.CUMULATIVE,
        own_checks.output_kind,
        "Which outputs are returned before the last. Beam search and best_of above n return only "
        "the last in any case.",
        concern="text",
        request="none",
    )
    bad_words: Strings = parameter(
        None,
        checks.each(checks.text, "a list of strings"),
        "Words that must not be generated, as the tokenizer encodes them.",
        concern="penalties and allowed tokens",
        unset="none",
    )
    logit_bias: Biases = parameter(
        None,
        own_checks.logit_bias,
        "Values added to the logits of tokens: a mapping of token id to a number from -1e30 to "
        "1e30, stored as pairs sorted by id.",
        concern="penalties and allowed tokens",
        request="own",
        unset="none",
    )
    allowed_token_ids: OptionalTokenIds = parameter(
        None,
        own_checks.allowed_token_ids,
        "The only tokens that may be sampled, at least one.",
        concern="penalties and allowed tokens",
        unset="all",
    )
    structured_outputs: Format = parameter(
        None,
        own_checks.structured_outputs,
        "Format that the text must match: StructuredOutputsParams, or a mapping of its names. "
        "Generation ends with the format, or earlier by max_tokens.",
        concern="penalties and allowed tokens",
        request="own",
        unset="any",
    )
    top_n_sigma: Real = parameter(
        -1.0,
        checks.real("a number, at least -1; 0 or less keeps all tokens", low=-1),
        "Keep tokens whose logit is at most this many standard deviations of the logits below the "
        "largest, at any temperature; -1 or 0 keeps all.",
        concern="sampling",
        off=(-1, 0),
        flag="standard deviations of the logits below the most likely token to sample from; -1 is "
        "all",
    )
    thinking_token_budget: OptionalInteger = parameter(
        None,
        own_checks.minus_one_is_none,
        "Maximum number of tokens of the model's reasoning, whose end tag follows then; -1 is "
        "none; structured_outputs hold the text after it. docs/tools.md describes it.",
        concern="length",
        unset="no budget",
    )
    prediction: str | None = parameter(
        None,
        checks.optional(checks.text),
        "Text that the output probably has. With speculative_config its tokens are draft tokens "
        "where the output follows it, which changes the time of the output, never the output; "
        "docs/speculation.md describes it.",
        concern="text",
        request="own",
        unset="none",
    )
    extra_args: ExtraArgs = parameter(
        None,
        checks.optional(checks.mapping),
        "Values by name for the classes of the engine's logits_processors, which read them; "
        "vllm_xargs of requests to a server. docs/plugins.md describes such classes.",
        concern="penalties and allowed tokens",
        request="none",
        unset="none",
    )

    def __post_init__(self) -> None:
        """Check the combination of the values, where a subclass defines it."""

    def __setattr__(self, name: str, value: object) -> None:
        """Check a value and hold what the check returns.

        Raises:
            RequestError: An invalid value, or an unknown parameter.
        """
        try:
            check, default, held = _CHECKED[name]
        except KeyError:
            raise unknown_parameter(name, value) from None
        # Most are at their default, which is checked once.
        _hold(self, name, held if value is default else check(name, value))

    @property
    def guided_decoding(self) -> StructuredOutputsParams | None:
        """``structured_outputs``, under its name until vLLM 0.9."""
        return self.structured_outputs

    @guided_decoding.setter
    def guided_decoding(self, value: StructuredOutputsParams | Mapping[str, Any] | None) -> None:
        self.structured_outputs = value

    @property
    def is_greedy(self) -> bool:
        """Whether sampling is greedy: each token is the most likely one."""
        return not self.use_beam_search and (self.temperature == 0 or self.top_k == 1)

    @property
    def max_num_running_seqs(self) -> int:
        """Maximum number of sequences that run at once: ``best_of``, or ``n``."""
        return self.n if self.best_of is None else self.best_of


PARAMETERS: Final[dict[str, Parameter]] = {
    field.name: field.metadata["option"] for field in fields(SamplingOptions)
}
# The check of each, its default, and what is held of the default.
_CHECKED: Final[dict[str, tuple[Check[object], object, object]]] = {
    field.name: (known.check, field.default, known.check(field.name, field.default))
    for field, known in options_of(SamplingOptions)
}
_CHECKED["guided_decoding"] = _CHECKED["structured_outputs"]  # its property sets the other


def unknown_parameter(name: str, value: object) -> RequestError:
    """The error of a name that no parameter has."""
    accepted = did_you_mean(name, PARAMETERS) or f"; accepted: {', '.join(PARAMETERS)}"
    return RequestError(f"unknown sampling parameter: {name}={value!r}{accepted}")
