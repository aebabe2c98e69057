from typing import Any

from pagedserve.output.stop import Finish, StopRule
from pagedserve.sampling_params import SamplingParams

EOS = (2, 7)


def rule(
    max_new_tokens: int = 100, hidden_tokens: dict[str, int] | None = None, **params: Any
) -> StopRule:
    return StopRule.from_params(
        SamplingParams(**params),
        eos_token_ids=EOS,
        max_new_tokens=max_new_tokens,
        hidden_tokens=hidden_tokens,
    )


def test_an_end_of_sequence_token_stops_without_a_stop_reason() -> None:
    assert rule().check(2, 1) == Finish("stop", None)
    assert rule().check(7, 1) == Finish("stop", None)
    assert rule().check(3, 1) is None


def test_a_stop_token_is_the_stop_reason() -> None:
    assert rule(stop_token_ids=[9]).check(9, 1) == Finish("stop", 9)


def test_ignore_eos_leaves_stop_tokens() -> None:
    ignoring = rule(ignore_eos=True, stop_token_ids=[9])
    assert ignoring.check(2, 1) is None
    assert ignoring.check(9, 1) == Finish("stop", 9)


def test_an_end_of_sequence_token_named_as_stop_token_stops_under_ignore_eos() -> None:
    assert rule(ignore_eos=True, stop_token_ids=[2]).check(2, 1) == Finish("stop", 2)


def test_length_ends_at_max_tokens_or_at_what_the_model_leaves() -> None:
    assert rule(max_tokens=3).check(5, 2) is None
    assert rule(max_tokens=3).check(5, 3) == Finish("length")
    assert rule(max_tokens=3, max_new_tokens=2).check(5, 2) == Finish("length")


def test_a_stop_at_the_last_token_is_a_stop() -> None:
    assert rule(max_tokens=3).check(2, 3) == Finish("stop")


def test_ending_tokens_are_banned_before_min_tokens() -> None:
    longer = rule(min_tokens=2, stop_token_ids=[9])
    assert set(longer.banned_at_first) == {2, 7, 9}
    assert rule().banned_at_first == ()
    assert longer.check(9, 2) is None
    assert longer.check(9, 3) == Finish("stop", 9)


def test_a_stop_string_that_names_a_hidden_token_is_that_token() -> None:
    found = rule(stop=["<|end|>", "no"], hidden_tokens={"<|end|>": 11, "<s>": 12}, ignore_eos=True)
    assert found.check(11, 1) == Finish("stop", "<|end|>")
    assert found.check(12, 1) is None


def test_a_stop_string_that_names_an_end_of_sequence_token_has_no_stop_reason() -> None:
    assert rule(stop=["<|end|>"], hidden_tokens={"<|end|>": 2}).check(2, 1) == Finish("stop", None)


def test_a_hidden_token_among_the_first_does_not_count() -> None:
    found = rule(stop=["<|end|>"], hidden_tokens={"<|end|>": 11}, min_tokens=2)
    assert set(found.banned_at_first) == {2, 7}
    assert found.check(11, 2) is None
    assert found.check(11, 3) == Finish("stop", "<|end|>")
