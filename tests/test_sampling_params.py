import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from pagedserve import RequestError, SamplingParams


def test_defaults_are_those_of_the_field() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, -1, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed) == (16, 0, None)
    assert (params.ignore_eos, params.stop_token_ids) == (False, ())


@pytest.mark.parametrize(
    ("given", "accepted"),
    [
        ({"temperature": -1}, "at least 0"),
        ({"temperature": math.nan}, "finite"),
        ({"temperature": math.inf}, "finite"),
        ({"temperature": "hot"}, "a finite number"),
        ({"temperature": True}, "a finite number"),
        ({"temperature": None}, "a finite number"),
        ({"top_p": 0}, "above 0 and at most 1"),
        ({"top_p": 2}, "above 0 and at most 1"),
        ({"top_p": math.nan}, "above 0 and at most 1"),
        ({"top_k": -2}, "-1 or 0"),
        ({"top_k": 1.5}, "an integer"),
        ({"min_p": -0.1}, "from 0 to 1"),
        ({"min_p": 1.1}, "from 0 to 1"),
        ({"seed": -1}, "None or at least 0"),
        ({"seed": "x"}, "an integer"),
        ({"max_tokens": 0}, "at least 1"),
        ({"max_tokens": 2.0}, "an integer"),
        ({"max_tokens": None}, "an integer"),
        ({"min_tokens": -1}, "from 0 to max_tokens"),
        ({"min_tokens": 17}, "from 0 to max_tokens, 16"),
        ({"ignore_eos": 1}, "True or False"),
        ({"stop_token_ids": 5}, "a list of token ids"),
        ({"stop_token_ids": "ab"}, "a list of token ids"),
        ({"stop_token_ids": [3, -1]}, "at least 0"),
        ({"stop_token_ids": [3.0]}, "an integer"),
    ],
)
def test_a_bad_value_is_named_with_what_is_accepted(given: dict[str, Any], accepted: str) -> None:
    (name, value) = next(iter(given.items()))
    with pytest.raises(RequestError) as caught:
        SamplingParams(**given)
    assert name in str(caught.value)
    assert accepted in str(caught.value)
    assert repr(value) in str(caught.value) or name == "stop_token_ids"


@pytest.mark.parametrize(
    "later",
    [{"n": 2}, {"best_of": 3}, {"stop": ["\n"]}, {"logprobs": 5}, {"presence_penalty": 0.5}],
)
def test_a_later_parameter_is_refused_by_name(later: dict[str, Any]) -> None:
    (name, value) = next(iter(later.items()))
    with pytest.raises(RequestError, match="not supported yet") as caught:
        SamplingParams(**later)
    assert f"{name}={value!r}" in str(caught.value)


def test_a_later_parameter_that_asks_for_nothing_is_accepted() -> None:
    asked = SamplingParams(n=1, stop=None, logprobs=None, repetition_penalty=1.0)
    assert asked == SamplingParams()


def test_a_misspelt_parameter_is_named_with_the_known_ones() -> None:
    with pytest.raises(RequestError, match=r"tempature=0\.5.*temperature, top_p"):
        SamplingParams(tempature=0.5)


def test_numpy_numbers_become_pythons_own() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),
        max_tokens=np.int64(3),
        stop_token_ids=np.array([1, 2]),
    )
    assert params.stop_token_ids == (1, 2)
    assert [type(one) for one in dataclasses.astuple(params)[:3]] == [float, float, int]
    assert type(params.max_tokens) is int


def test_params_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().max_tokens = 3  # type: ignore[misc]  # what is being shown
