"""Sampling options: those of every command that generates, and those of ``generate`` alone.

None stands for an option that was not given: who runs the model has the defaults.
"""

import argparse
from collections.abc import Iterator
from typing import Any, Final

from pagedserve.errors import RequestError
from pagedserve.sampling_checks import UNDRAWN
from pagedserve.sampling_params import SamplingParams

# Name, type, what it is, and what ``generate`` does without it.
_COMMON: Final = (
    ("max-tokens", int, "new tokens", "128"),
    ("temperature", float, "0 is greedy", "0; 1 with top-p, top-k, min-p or several outputs"),
    ("top-p", float, "above 0, to 1", "1.0"),
    ("top-k", int, "-1 is all", "-1"),
    ("min-p", float, "0 to 1", "0.0"),
    ("presence-penalty", float, "-2 to 2", "0.0"),
    ("frequency-penalty", float, "-2 to 2", "0.0"),
    ("repetition-penalty", float, "above 1 against repetition, below 1 for it", "1.0"),
)
_OFFLINE: Final = (
    ("n", int, "outputs a prompt", "1"),
    ("best-of", int, "sampled sequences, of which the likeliest --n are kept", "--n"),
    ("beam-width", int, "search with so many beams, of which the best --n are kept", None),
    ("length-penalty", float, "a beam's score is its log-probability / length ** this", "1.0"),
    ("logprobs", int, "show so many likeliest tokens of each position", None),
)
_MAX_TOKENS: Final = 128


def add_sampling(group: argparse._ArgumentGroup) -> None:
    """Add the options that a server is told of."""
    for name, kind, text, _ in _COMMON:
        group.add_argument(f"--{name}", type=kind, help=text)
    group.add_argument("--seed", type=int, help="for the same random numbers again")
    _add_stop(group)


def sampling_fields(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of a request that the options of ``add_sampling`` ask for."""
    names = [name.replace("-", "_") for name, *_ in _COMMON] + ["seed", "stop"]
    given = {name: getattr(options, name) for name in names}
    return {name: value for name, value in given.items() if value is not None}


def add_generation(group: argparse._ArgumentGroup) -> None:
    """Add the options of ``generate``."""
    for name, kind, text, default in (*_COMMON, *_OFFLINE):
        shown = text if default is None else f"{text} ({default})"
        group.add_argument(f"--{name}", type=kind, help=shown)
    _add_stop(group)


def _add_stop(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--stop", action="append", help="a text that ends it; may be given again")


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    """What the options of ``add_generation`` say.

    Raises:
        RequestError: Options that contradict each other, or a value out of range.
    """
    for reason in _contradictions(options):
        raise RequestError(reason)
    same_names = (
        "top_p top_k min_p n length_penalty presence_penalty frequency_penalty "
        "repetition_penalty logprobs stop"
    )
    has_beams = options.beam_width is not None
    temperature = options.temperature
    if temperature is None:
        temperature = 1.0 if _asks_to_draw(options) and not has_beams else 0.0
    return SamplingParams.from_optional(
        **{name: getattr(options, name) for name in same_names.split()},
        max_tokens=_MAX_TOKENS if options.max_tokens is None else options.max_tokens,
        best_of=options.beam_width if has_beams else options.best_of,
        use_beam_search=has_beams,
        temperature=temperature,
    )


def _num_sampled(options: argparse.Namespace) -> int:
    return max(options.n or 1, options.best_of or 1)


def _asks_to_draw(options: argparse.Namespace) -> bool:
    drawn = any(_is_drawn(options, name) for name in ("top_p", "top_k", "min_p"))
    return drawn or _num_sampled(options) > 1


def _is_drawn(options: argparse.Namespace, name: str) -> bool:
    return getattr(options, name) not in (None, *UNDRAWN[name])


def _contradictions(options: argparse.Namespace) -> Iterator[str]:
    """What is wrong between options, in their own names."""
    width, n = options.beam_width, options.n or 1
    if width is None:
        if _num_sampled(options) > 1 and (options.temperature == 0 or options.top_k == 1):
            yield (
                "several outputs are wanted, and with --temperature 0 or --top-k 1 they would all "
                "be equal: give others, or --beam-width"
            )
        if options.length_penalty not in (None, 1):
            yield "--length-penalty is given without --beam-width; it is for beams alone"
        return
    if options.best_of is not None:
        yield "--beam-width and --best-of are both given; give one of them"
    if width < max(2, n):
        yield f"--beam-width is {width}; it must be at least 2 and at least --n, {n}"
    for name in UNDRAWN:
        if _is_drawn(options, name):
            option = f"--{name.replace('_', '-')}"
            yield f"{option} and --beam-width are both given, and a search draws nothing: give one"
