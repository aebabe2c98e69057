"""Sampling options: those of every command that generates, and those of ``generate`` only.

None is an option that was not given; its default is that of ``generate`` or of the server.
"""

import argparse
from collections.abc import Iterator
from dataclasses import Field
from typing import Any, Final

from pagedserve.config.options import argument_of, by_concern, flag_of
from pagedserve.errors import RequestError
from pagedserve.sampling_params import SamplingParams
from pagedserve.sampling_params.options import PARAMETERS, SamplingOptions

# Sampling parameters with an option, in the order of help.
_FLAGS: Final[dict[str, Field[Any]]] = {
    field.name: field
    for _, found in by_concern(SamplingOptions)
    for field, _ in found
    if PARAMETERS[field.name].flag is not None
}
# Those of requests: one text without log-probabilities is shown of a response.
_ONLINE: Final = [
    name for name in _FLAGS if name not in {"n", "best_of", "length_penalty", "logprobs"}
]
# Those of ``generate``, whose seed is the engine's.
_OFFLINE: Final = [name for name in _FLAGS if name != "seed"]
# Parameters that request random sampling.
_FILTERS: Final = [
    name for name, known in PARAMETERS.items() if known.off and name != "temperature"
]

_MAX_TOKENS: Final = 128
# Defaults of ``generate`` that are not those of the parameters.
_DEFAULTS: Final = {
    "max_tokens": str(_MAX_TOKENS),
    "temperature": (
        f"0; 1 with {', '.join(name.replace('_', '-') for name in _FILTERS)} or several outputs"
    ),
    "best_of": "--n",
}


def add_sampling(group: argparse._ArgumentGroup) -> None:
    """Add the options that are fields of requests to a server."""
    for name in _ONLINE:
        _add(group, name, PARAMETERS[name].flag)


def sampling_fields(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of a request for the options of ``add_sampling``."""
    given = {name: getattr(options, name) for name in _ONLINE}
    return {name: value for name, value in given.items() if value is not None}


def add_generation(group: argparse._ArgumentGroup) -> None:
    """Add the options of ``generate``."""
    for name in _OFFLINE:
        if name == "length_penalty":
            text = "number of beams of a search; the best --n are returned"
            group.add_argument("--beam-width", type=int, help=text)
        default = _DEFAULTS.get(name, _FLAGS[name].default)
        shown = "" if default is None else f" ({default})"
        _add(group, name, f"{PARAMETERS[name].flag}{shown}")


def _add(group: argparse._ArgumentGroup, name: str, text: str | None) -> None:
    kind = argument_of(_FLAGS[name].type, PARAMETERS[name])
    group.add_argument(flag_of(name), help=text, **kind)


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    """The sampling parameters for the options of ``add_generation``.

    Raises:
        RequestError: Options that contradict each other, or a value out of range.
    """
    for reason in _contradictions(options):
        raise RequestError(reason)
    given = {name: getattr(options, name) for name in _OFFLINE}
    has_beams = options.beam_width is not None
    if has_beams:
        given |= {"use_beam_search": True, "best_of": options.beam_width}
    if options.temperature is None:
        given["temperature"] = 1.0 if _asks_to_draw(options) and not has_beams else 0.0
    if options.max_tokens is None:
        given["max_tokens"] = _MAX_TOKENS
    return SamplingParams.from_optional(**given)


def _num_sampled(options: argparse.Namespace) -> int:
    return max(options.n or 1, options.best_of or 1)


def _asks_to_draw(options: argparse.Namespace) -> bool:
    drawn = any(_is_drawn(options, name) for name in _FILTERS)
    return drawn or _num_sampled(options) > 1


def _is_drawn(options: argparse.Namespace, name: str) -> bool:
    return getattr(options, name) not in (None, *PARAMETERS[name].off)


def _contradictions(options: argparse.Namespace) -> Iterator[str]:
    """Why options contradict each other, by their own names."""
    width, n = options.beam_width, options.n or 1
    if width is None:
        if _num_sampled(options) > 1 and (options.temperature == 0 or options.top_k == 1):
            yield (
                "several outputs are requested, and with --temperature 0 or --top-k 1 they would "
                "all be equal: give other values, or --beam-width"
            )
        if options.length_penalty not in (None, 1):
            yield "--length-penalty is given without --beam-width; it applies to beams alone"
        return
    if options.best_of is not None:
        yield "--beam-width and --best-of are both given; give one of them"
    if width < max(2, n):
        yield f"--beam-width is {width}; it must be at least 2 and at least --n, {n}"
    for name in ("temperature", *_FILTERS):
        if _is_drawn(options, name):
            yield (
                f"{flag_of(name)} and --beam-width are both given; beam search does not sample: "
                "give one"
            )
