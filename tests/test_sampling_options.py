"""A sampling parameter is defined once: fields of requests, options of commands and docs follow."""

import inspect
from typing import Any

import pytest

from pagedserve import SamplingParams
from pagedserve.cli.main import make_parser
from pagedserve.cli.sampling import sampling_fields, sampling_params
from pagedserve.sampling_params.options import PARAMETERS
from pagedserve.server.chat.protocol import ChatBody
from pagedserve.server.completions.protocol import CompletionBody

PYTHON_ALONE = {"detokenize", "extra_args", "logits_processors", "output_kind"}
# An option of each command and its value; stop may be repeated.
COMMON: dict[str, Any] = {
    "max_tokens": 5,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.25,
    "top_n_sigma": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
}
ONLY_GENERATE: dict[str, Any] = {"n": 2, "best_of": 3, "logprobs": 4}


def argv(given: dict[str, Any]) -> list[str]:
    return [
        word
        for name, value in given.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]


@pytest.mark.parametrize("body", [CompletionBody, ChatBody])
def test_requests_have_all_but_what_is_pythons_as_fields(
    body: type[CompletionBody | ChatBody],
) -> None:
    assert {*PARAMETERS} & {*body.model_fields} == {*PARAMETERS} - PYTHON_ALONE
    for name, field in body.model_fields.items():
        if name in PARAMETERS and name != "logprobs":  # its type depends on the route
            assert field.description == PARAMETERS[name].text
            assert field.default is None


def test_every_option_of_a_command_reaches_the_parameters() -> None:
    stops = ["--stop", "a", "--stop", "b"]
    online = make_parser().parse_args(["complete", *argv(COMMON | {"seed": 3}), *stops])
    assert sampling_fields(online) == COMMON | {"seed": 3, "stop": ["a", "b"]}
    offline = ["generate", "--model", "smollm2", *argv(COMMON | ONLY_GENERATE), *stops]
    expected = SamplingParams(**COMMON, **ONLY_GENERATE, stop=["a", "b"])
    assert sampling_params(make_parser().parse_args(offline)) == expected
    beams = ["generate", "--beam-width", "3", "--length-penalty", "0.5"]
    assert sampling_params(make_parser().parse_args(beams)) == SamplingParams(
        use_beam_search=True, best_of=3, temperature=0, length_penalty=0.5, max_tokens=128
    )
    flags = {name for name, known in PARAMETERS.items() if known.flag is not None}
    assert flags == {*COMMON, *ONLY_GENERATE, "seed", "stop", "length_penalty"}


def test_a_constructor_shows_names_and_defaults() -> None:
    shown = inspect.signature(SamplingParams).parameters
    assert {*shown} == {*PARAMETERS}
    assert (shown["top_p"].default, shown["top_p"].annotation) == (1.0, float)
    assert shown["stop"].annotation == str | list[str]
    documented = inspect.getdoc(SamplingParams) or ""
    assert all(f"    {name}: {known.text[:20]}" in documented for name, known in PARAMETERS.items())
    assert all(known.text.endswith(".") for known in PARAMETERS.values())
