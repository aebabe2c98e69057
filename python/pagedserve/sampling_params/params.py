"""``SamplingParams``: the sampling parameters of one request."""

import inspect
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any, Final, Self

from pagedserve.config.options import describe
from pagedserve.errors import RequestError
from pagedserve.sampling_params.checks import biases_of_json, structured_outputs
from pagedserve.sampling_params.options import PARAMETERS, SamplingOptions, unknown_parameter
from pagedserve.sampling_params.processors import with_prompt
from pagedserve.vllm_names import ABSENT_PARAMS, is_neutral, takes_names

# None is a value of its parameter: no limit.
_LEN: Final = "max_tokens"
# Its name here, and until vLLM 0.9.
_FORMAT: Final = ("structured_outputs", "guided_decoding")
# Names of arguments.
_OWN_NAMES: Final = SamplingOptions.__dataclass_fields__.keys()


def _own_names(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments by our names, without those of vLLM that are not supported and change nothing."""
    if given.keys() <= _OWN_NAMES:
        return given
    if "guided_decoding" in given:
        given = _with_format(given)
    for name, value in given.items():
        if name not in _OWN_NAMES and name not in ABSENT_PARAMS:
            raise unknown_parameter(name, value)
        if name in ABSENT_PARAMS and not is_neutral(value, ABSENT_PARAMS[name]):
            raise RequestError(f"not supported yet: {name}={value!r}; leave it out")
    return {name: value for name, value in given.items() if name in _OWN_NAMES}


def _with_format(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments with ``guided_decoding`` under its name here."""
    named = [structured_outputs(name, given.get(name)) for name in _FORMAT]
    if None not in named and named[0] != named[1]:
        raise RequestError(
            f"{' and '.join(_FORMAT)} are the same option, and differ: give one of them",
            param="guided_decoding",
        )
    rest = {name: value for name, value in given.items() if name not in _FORMAT}
    return rest | {"structured_outputs": named[0] or named[1]}


@takes_names(_own_names)
class SamplingParams(SamplingOptions):
    """The sampling parameters of one request.

    Each value is checked when it is set, by the constructor or by assignment.  Combinations of
    values are checked by the constructor and again when a request is created, which keeps a copy.

    Raises:
        RequestError: A value out of range (the message lists what is accepted), two parameters that
            contradict each other, or one that does not exist or is not supported yet, by name.
    """

    __slots__ = ()
    # Names of the fields, as vLLM's class has them: a struct of msgspec.
    __struct_fields__ = tuple(PARAMETERS)

    def __post_init__(self) -> None:
        self.check()

    @classmethod
    def from_optional(cls, **given: Any) -> Self:
        """Construct from arguments where None is the default, except for ``max_tokens``.

        Keys of ``logit_bias`` may be strings of digits, as in JSON.
        """
        given = {name: value for name, value in given.items() if value is not None or name == _LEN}
        if "logit_bias" in given:
            given["logit_bias"] = biases_of_json(given["logit_bias"])
        return cls(**given)

    def clone(self) -> Self:
        """Return a copy that shares no mutable state."""
        copied = object.__new__(type(self))
        for name in PARAMETERS:
            object.__setattr__(copied, name, getattr(self, name))
        copied.extra_args = deepcopy(self.extra_args)
        return copied

    def check(self) -> None:
        """Check the combination of the values.

        Raises:
            RequestError: Two values contradict each other.
        """
        error = next(_contradictions(self), None)
        if error is not None:
            raise error

    def resolved(self, *, max_model_len: int, vocab_size: int) -> Self:
        """Return a checked copy for one engine, with -1 replaced by numbers.

        Args:
            max_model_len: Maximum tokens of a sequence.
            vocab_size: Vocabulary size of the model.

        Raises:
            RequestError: As ``check``.
        """
        self.check()
        params = self.clone()
        if params.logprobs == -1:
            params.logprobs = vocab_size
        if params.prompt_logprobs == -1:
            params.prompt_logprobs = vocab_size
        if params.truncate_prompt_tokens == -1:
            params.truncate_prompt_tokens = max(1, max_model_len - 1)
        return params

    def with_prompt(self, token_ids: Sequence[int]) -> Self:
        """Bind the prompt to the logits processors that take it."""
        bound = with_prompt(self.logits_processors, token_ids)
        if bound is self.logits_processors:
            return self
        params = self.clone()
        params.logits_processors = bound
        return params

    @property
    def chooses_best(self) -> bool:
        """Whether more sequences are sampled than are returned."""
        return not self.use_beam_search and self.max_num_running_seqs > self.n

    @property
    def keeps_logprobs(self) -> bool:
        """Whether the log-probability of each sampled token is needed, to return or to rank."""
        return not self.use_beam_search and (self.logprobs is not None or self.chooses_best)


SamplingParams.__doc__ = f"{inspect.getdoc(SamplingParams)}\n\n{describe(SamplingParams)}"
# A class does not inherit annotations, and programs select parameters by them.
SamplingParams.__annotations__ = SamplingOptions.__annotations__


def _contradictions(params: SamplingOptions) -> Iterator[RequestError]:
    """Errors for parameters that contradict each other."""
    if params.max_num_running_seqs < params.n:
        yield RequestError(
            f"best_of is {params.best_of}; it must be at least n, {params.n}", param="best_of"
        )
    most = params.max_tokens
    if most is not None and params.min_tokens > most:
        yield RequestError(
            f"min_tokens is {params.min_tokens}; it must be from 0 to max_tokens, {most}",
            param="min_tokens",
        )
    if params.stop and not params.detokenize:
        yield RequestError(
            f"stop is {list(params.stop)} with detokenize=False; stop strings are found in the "
            "text: leave detokenize True or give stop_token_ids",
            param="stop",
        )
    if params.max_num_running_seqs > 1 and params.is_greedy:
        yield RequestError(
            f"{_named_width(params)} with greedy sampling (temperature={params.temperature}, "
            f"top_k={params.top_k}): all would be equal; give 1, sample at random or give "
            "use_beam_search=True",
            param=_width_name(params),
        )
    yield from _against_beams(params) if params.use_beam_search else _for_beams_only(params)


def _width_name(params: SamplingOptions) -> str:
    return "n" if params.best_of is None else "best_of"


def _named_width(params: SamplingOptions) -> str:
    return f"{_width_name(params)} is {params.max_num_running_seqs}"


def _against_beams(params: SamplingOptions) -> Iterator[RequestError]:
    if params.max_num_running_seqs == 1:
        yield RequestError(
            f"{_named_width(params)} with use_beam_search; best_of, or n without it, is the width "
            "and must be at least 2",
            param=_width_name(params),
        )
    for name, known in PARAMETERS.items():
        value = getattr(params, name)
        if known.off and value not in known.off:
            yield RequestError(
                f"{name} is {value} with use_beam_search; beam search chooses by "
                f"log-probability; give {name}={known.off[0]}",
                param=name,
            )
    if params.thinking_token_budget is not None:
        yield RequestError(
            f"thinking_token_budget is {params.thinking_token_budget} with use_beam_search, which "
            "compares beams of any tokens: leave one of them out",
            param="thinking_token_budget",
        )


def _for_beams_only(params: SamplingOptions) -> Iterator[RequestError]:
    for name, neutral in {"early_stopping": False, "length_penalty": 1.0}.items():
        value = getattr(params, name)
        if value != neutral:
            yield RequestError(
                f"{name} is {value!r} without use_beam_search; it is for beams alone: leave it out "
                "or give use_beam_search=True",
                param=name,
            )
