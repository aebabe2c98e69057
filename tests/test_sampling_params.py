import copy
import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest

from pagedserve import (
    RequestError,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

DEFAULTS = {
    "n": 1,
    "best_of": None,  # n, where it is not given
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "seed": None,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "early_stopping": False,
    "stop": (),
    "stop_token_ids": (),
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "logits_processors": (),
    "truncate_prompt_tokens": None,
    "output_kind": RequestOutputKind.CUMULATIVE,
    "bad_words": (),
    "logit_bias": (),
    "allowed_token_ids": None,
    "structured_outputs": None,
    "top_n_sigma": -1.0,
    "thinking_token_budget": None,
    "prediction": None,
    "extra_args": None,
}
BEAMS: dict[str, Any] = {"use_beam_search": True, "n": 2, "temperature": 0}


def processor(token_ids: list[int], logits: Any) -> Any:
    return logits


# Every parameter with another value than its default, none contradicting another.
SAMPLED: dict[str, Any] = {
    "n": 2,
    "best_of": 3,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.2,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.1,
    "seed": 7,
    "stop": ("\n", "end"),
    "stop_token_ids": (3, 4),
    "bad_words": ("no",),
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "max_tokens": 20,
    "min_tokens": 20,
    "logprobs": 0,
    "prompt_logprobs": 5,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "logit_bias": ((2, -1.0), (9, 0.5)),
    "allowed_token_ids": (2, 9),
    "logits_processors": (processor,),
    "truncate_prompt_tokens": 100,
    "structured_outputs": StructuredOutputsParams(regex="a"),
    "output_kind": RequestOutputKind.DELTA,
    "top_n_sigma": 1.5,
    "thinking_token_budget": 100,
    "prediction": "Yes.",
    "extra_args": {"target_token": 5},
}


def refusal(**given: Any) -> str:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**given)
    return str(caught.value)


def test_defaults_are_those_of_the_field() -> None:
    assert dataclasses.asdict(SamplingParams()) == DEFAULTS


def test_programs_can_list_the_parameters() -> None:
    assert SamplingParams.__struct_fields__ == tuple(DEFAULTS)
    assert DEFAULTS.keys() <= SamplingParams.__annotations__.keys()
    copied = {name: getattr(SamplingParams(), name) for name in SamplingParams.__struct_fields__}
    assert SamplingParams(**copied) == SamplingParams()


def test_what_is_given_is_held() -> None:
    params = SamplingParams(**SAMPLED)
    assert {name: getattr(params, name) for name in SAMPLED} == SAMPLED
    assert SAMPLED.items().isdisjoint(DEFAULTS.items())


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1, 0, 2.5])
def test_a_beam_search_is_held(early_stopping: Any, length_penalty: float) -> None:
    params = SamplingParams(
        **BEAMS, early_stopping=early_stopping, length_penalty=length_penalty, seed=1, top_k=0
    )
    assert (params.early_stopping, params.length_penalty) == (early_stopping, length_penalty)
    assert params.max_num_running_seqs == 2
    assert not params.is_greedy


PENALTY = "from -2 to 2"
TRUTH = "True or False"
IDS = "a list of token ids"


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("n", 0, "an integer, from 1 to 2147483647"),
        ("n", None, "an integer, from 1 to 2147483647"),
        ("n", 2.0, "an integer"),
        ("n", True, "an integer"),
        ("best_of", 0, "an integer, from 1 to 2147483647, or None"),
        ("best_of", "2", "an integer"),
        ("presence_penalty", -2.1, PENALTY),
        ("presence_penalty", 2.1, PENALTY),
        ("presence_penalty", None, PENALTY),
        ("frequency_penalty", -2.1, PENALTY),
        ("frequency_penalty", math.nan, PENALTY),
        ("repetition_penalty", 0, "a number from 1e-30 to 1e30"),
        ("repetition_penalty", -1, "a number from 1e-30 to 1e30"),
        ("repetition_penalty", 1e-50, "a number from 1e-30 to 1e30"),
        ("repetition_penalty", 1e300, "a number from 1e-30 to 1e30"),
        ("repetition_penalty", math.inf, "a number from 1e-30 to 1e30"),
        ("temperature", -1, "at least 0"),
        ("temperature", math.nan, "finite"),
        ("temperature", math.inf, "finite"),
        ("temperature", 10**400, "finite"),
        ("temperature", "hot", "a finite number"),
        ("temperature", True, "a finite number"),
        ("temperature", None, "a finite number"),
        ("temperature", np.array([0.5, 0.5]), "a finite number"),
        ("top_p", 0, "above 0 and at most 1"),
        ("top_p", 2, "above 0 and at most 1"),
        ("top_p", math.nan, "above 0 and at most 1"),
        ("top_k", -2, "-1 or 0"),
        ("top_k", 1.5, "an integer"),
        ("top_k", np.array([1, 2]), "an integer"),
        ("min_p", -0.1, "from 0 to 1"),
        ("min_p", 1.1, "from 0 to 1"),
        ("top_n_sigma", -1.5, "a number, at least -1; 0 or less keeps all tokens"),
        ("top_n_sigma", math.inf, "a number, at least -1"),
        ("thinking_token_budget", -2, "an integer, at least 0, or -1 or None for none"),
        ("thinking_token_budget", 1.5, "an integer"),
        ("seed", -2, "at least 0, or -1 or None for none"),
        ("seed", "x", "an integer"),
        ("use_beam_search", 1, TRUTH),
        ("length_penalty", 11, "from -10 to 10"),
        ("length_penalty", "long", "from -10 to 10"),
        ("early_stopping", "always", 'True, False or "never"'),
        ("early_stopping", 1, 'True, False or "never"'),
        ("early_stopping", None, 'True, False or "never"'),
        ("stop", 5, "a string or a list of strings"),
        ("stop", b"ab", "a string or a list of strings"),
        ("stop", {"a": 1}, "a string or a list of strings"),
        ("stop_token_ids", 5, IDS),
        ("stop_token_ids", "ab", IDS),
        ("stop_token_ids", np.array(3), IDS),
        ("bad_words", "ab", "a list of strings"),
        ("bad_words", 5, "a list of strings"),
        ("include_stop_str_in_output", None, TRUTH),
        ("ignore_eos", 1, TRUTH),
        ("max_tokens", 0, "from 1 to 2147483647"),
        ("max_tokens", 10**400, "from 1 to 2147483647, or None for no limit"),
        ("max_tokens", 2.0, "an integer"),
        ("max_tokens", -1, "from 1 to 2147483647, or None for no limit"),
        ("min_tokens", -1, "from 0 to 2147483647, and at most max_tokens"),
        ("min_tokens", 2**31, "from 0 to 2147483647, and at most max_tokens"),
        ("n", 2**31, "from 1 to 2147483647"),
        ("best_of", 2**31, "from 1 to 2147483647, or None for n"),
        ("logprobs", -2, "an integer, at least 0, -1 for the whole vocabulary, or None"),
        ("logprobs", False, "an integer, at least 0, -1 for the whole vocabulary, or None"),
        ("prompt_logprobs", -2, "an integer, at least 0, -1 for the whole vocabulary, or None"),
        ("prompt_logprobs", 1.0, "an integer, at least 0, -1 for the whole vocabulary, or None"),
        ("detokenize", 0, TRUTH),
        ("skip_special_tokens", "no", TRUTH),
        ("spaces_between_special_tokens", None, TRUTH),
        ("logit_bias", 5, "a mapping of token ids to numbers"),
        ("logit_bias", 0, "a mapping of token ids to numbers"),
        ("logit_bias", [5], "a mapping of token ids to numbers"),
        ("allowed_token_ids", [], "None or a list of token ids, at least one"),
        ("allowed_token_ids", 5, "None or a list of token ids, at least one"),
        ("logits_processors", processor, "a list of callables"),
        ("extra_args", [5], "a mapping with names for keys"),
        ("truncate_prompt_tokens", 0, "an integer, at least 1, -1 for as many as the model"),
        ("truncate_prompt_tokens", -2, "an integer, at least 1, -1 for as many as the model"),
        ("output_kind", 1, "a RequestOutputKind: CUMULATIVE, DELTA or FINAL_ONLY"),
        ("output_kind", None, "a RequestOutputKind: CUMULATIVE, DELTA or FINAL_ONLY"),
    ],
)
def test_a_bad_value_is_named_with_what_is_accepted(name: str, value: Any, accepted: str) -> None:
    message = refusal(**{name: value})
    assert message.startswith(f"{name} is {value!r}; it must be ")
    assert accepted in message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stop": ""}, "stop[0] is ''; it must be a non-empty string"),
        ({"stop": ["a", ""]}, "stop[1] is ''; it must be a non-empty string"),
        ({"stop": ["a", 5]}, "stop[1] is 5; it must be a non-empty string"),
        ({"stop": ["\ud800"]}, r"stop[0] is '\ud800'; it must be a non-empty string of valid"),
        ({"stop_token_ids": [3, -1]}, "stop_token_ids[1] is -1; it must be an integer, at least 0"),
        ({"stop_token_ids": [3.0]}, "stop_token_ids[0] is 3.0; it must be an integer"),
        ({"bad_words": [""]}, "bad_words[0] is ''; it must be a non-empty string"),
        ({"bad_words": [["a"]]}, "bad_words[0] is ['a']; it must be a non-empty string"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids[0] is -1; it must be an integer"),
        ({"logits_processors": [None]}, "logits_processors[0] is None; it must be callable"),
        (
            {"logit_bias": {"5": 1.0}},
            "a key of logit_bias is '5'; it must be an integer, at least 0; a string of digits",
        ),
        ({"logit_bias": {-5: 1.0}}, "a key of logit_bias is -5; it must be an integer"),
        ({"logit_bias": {5: math.inf}}, "logit_bias[5] is inf; it must be a number from -1e30 to"),
        ({"logit_bias": {5: -1e300}}, "logit_bias[5] is -1e+300; it must be a number from -1e30"),
        ({"logit_bias": {5: None}}, "logit_bias[5] is None; it must be a number from -1e30 to"),
    ],
)
def test_a_bad_element_is_named_with_its_place(given: dict[str, Any], message: str) -> None:
    assert refusal(**given).startswith(message)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n": 3, "best_of": 2}, r"best_of is 2; it must be at least n, 3"),
        ({"min_tokens": 17}, "min_tokens is 17; it must be from 0 to max_tokens, 16"),
        ({"stop": "a", "detokenize": False}, r"stop is ['a'] with detokenize=False"),
        ({"n": 2, "temperature": 0}, "n is 2 with greedy sampling"),
        ({"best_of": 2, "temperature": 1e-6}, "best_of is 2 with greedy sampling"),
        ({"best_of": 2, "top_k": 1}, "best_of is 2 with greedy sampling"),
        ({"early_stopping": True}, "early_stopping is True without use_beam_search"),
        ({"early_stopping": "never"}, "early_stopping is 'never' without use_beam_search"),
        ({"length_penalty": 0.5}, "length_penalty is 0.5 without use_beam_search"),
        ({"use_beam_search": True, "temperature": 0}, "n is 1 with use_beam_search"),
        ({"use_beam_search": True, "n": 2}, "temperature is 1.0 with use_beam_search"),
        (BEAMS | {"top_p": 0.9}, "top_p is 0.9 with use_beam_search"),
        (BEAMS | {"top_k": 1}, "top_k is 1 with use_beam_search"),
        (BEAMS | {"min_p": 0.1}, "min_p is 0.1 with use_beam_search"),
        (BEAMS | {"top_n_sigma": 1}, "top_n_sigma is 1.0 with use_beam_search"),
        (BEAMS | {"thinking_token_budget": 9}, "thinking_token_budget is 9 with use_beam_search"),
    ],
)
def test_a_contradiction_is_named(given: dict[str, Any], message: str) -> None:
    assert refusal(**given).startswith(message)


def test_a_beam_search_says_which_temperature_it_takes() -> None:
    message = refusal(use_beam_search=True, best_of=4)
    assert message.endswith("beam search chooses by log-probability; give temperature=0")


@pytest.mark.parametrize(
    "harmless",
    [
        {"include_stop_str_in_output": True},
        {"stop_token_ids": [1], "detokenize": False},
        {"bad_words": ["no"], "detokenize": False},
        BEAMS | {"prompt_logprobs": 1, "bad_words": ["no"], "best_of": 4},
    ],
)
def test_what_does_not_contradict_is_taken(harmless: dict[str, Any]) -> None:
    SamplingParams(**harmless)


def test_log_probabilities_that_are_true_are_of_one_token() -> None:
    params = SamplingParams(logprobs=True, prompt_logprobs=True)
    assert (params.logprobs, params.prompt_logprobs) == (1, 1)
    assert type(params.logprobs) is int


def test_how_vllm_copies_parameters_has_no_effect() -> None:
    options: dict[str, Any] = {"skip_clone": True}
    assert SamplingParams(**options) == SamplingParams()


@pytest.mark.parametrize("name", ["repetition_detection", "flat_logprobs"])
def test_a_later_parameter_is_refused_by_name_unless_it_asks_for_nothing(name: str) -> None:
    assert refusal(**{name: {"a": 1}}) == f"not supported yet: {name}={{'a': 1}}; leave it out"
    nothing: dict[str, Any] = {name: None}
    assert SamplingParams(**nothing) == SamplingParams()


def test_a_misspelt_parameter_is_named_with_the_known_ones() -> None:
    said = "unknown sampling parameter: tempature=0.5; did you mean temperature?"
    assert refusal(tempature=0.5) == said
    message = refusal(xyz=1)
    assert message.startswith("unknown sampling parameter: xyz=1; accepted: ")
    assert message.split("accepted: ")[1].split(", ") == list(DEFAULTS)


def test_a_copy_has_its_own_extra_args() -> None:
    params = SamplingParams(extra_args={"a": 1})
    copied = params.clone()
    params.extra_args["a"] = 2  # type: ignore[index]
    assert copied.extra_args == {"a": 1}


def test_best_of_is_n_where_it_is_not_given() -> None:
    assert SamplingParams(n=3).max_num_running_seqs == 3
    assert SamplingParams(n=3, best_of=None).max_num_running_seqs == 3
    assert SamplingParams(n=3, best_of=5).max_num_running_seqs == 5
    assert dataclasses.replace(SamplingParams(), n=4).max_num_running_seqs == 4


@pytest.mark.parametrize(
    ("given", "is_greedy"),
    [
        ({}, False),
        ({"temperature": 0}, True),
        ({"temperature": 0.99e-5}, True),
        ({"temperature": 1e-5}, False),
        ({"top_k": 1}, True),
        ({"top_k": 0}, False),
        (BEAMS, False),
    ],
)
def test_greedy_has_one_definition(given: dict[str, Any], is_greedy: bool) -> None:
    assert SamplingParams(**given).is_greedy is is_greedy


def test_a_temperature_that_is_as_good_as_0_is_0() -> None:
    assert str(SamplingParams(temperature=-0.0).temperature) == "0.0"
    assert SamplingParams(temperature=1e-9) == SamplingParams(temperature=0)


def test_one_stop_string_is_a_list_of_it() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stop == ("ab", "c")


def test_the_order_of_biases_does_not_matter() -> None:
    params, other = (
        SamplingParams(logit_bias={9: 1, 2: -1}),
        SamplingParams(logit_bias={2: -1, 9: 1}),
    )
    assert params == other
    assert params.logit_bias == ((2, -1.0), (9, 1.0))


def test_numpy_numbers_become_pythons_own() -> None:
    bias: Any = {np.int64(4): np.float32(0.5)}
    params = SamplingParams(
        temperature=np.float32(0.5),
        max_tokens=np.int64(3),
        stop_token_ids=np.array([1, 2]),
        allowed_token_ids=np.array([3]),
        logit_bias=bias,
    )
    assert params.stop_token_ids == (1, 2)
    assert params.logit_bias == ((4, 0.5),)
    numbers = (params.max_tokens, *params.stop_token_ids, *(params.allowed_token_ids or ()))
    assert {type(number) for number in (*numbers, params.logit_bias[0][0])} == {int}
    assert {type(number) for number in (params.temperature, params.logit_bias[0][1])} == {float}


@pytest.mark.parametrize("name", SAMPLED)
def test_a_value_that_is_assigned_is_checked_and_held(name: str) -> None:
    params = SamplingParams()
    setattr(params, name, SAMPLED[name])
    assert getattr(params, name) == SAMPLED[name]
    with pytest.raises(RequestError, match=f"{name} is .*; it must be"):
        setattr(params, name, object())
    assert getattr(params, name) == SAMPLED[name]


def test_changing_what_was_given_changes_nothing() -> None:
    stop, bias = ["a"], {1: 1.0}
    params = SamplingParams(stop=stop, logit_bias=bias)
    stop.append("b")
    bias[2] = 2.0
    assert params == SamplingParams(stop="a", logit_bias={1: 1.0})


@pytest.mark.parametrize("given", [{}, SAMPLED, BEAMS])
def test_every_copy_is_equal(given: dict[str, Any]) -> None:
    params = SamplingParams(**given)
    copies = [
        SamplingParams(**given),
        dataclasses.replace(params),
        copy.deepcopy(params),
        pickle.loads(pickle.dumps(params)),  # noqa: S301  # made on the line itself
    ]
    assert all(copied == params for copied in copies)


@pytest.mark.parametrize("name", SAMPLED)
def test_params_that_differ_in_one_value_differ(name: str) -> None:
    # What the one value contradicts otherwise.
    needed: dict[str, Any] = {"n": {"best_of": 2}, "min_tokens": {"max_tokens": 20}}.get(name, {})
    assert SamplingParams(**needed, **{name: SAMPLED[name]}) != SamplingParams(**needed)
