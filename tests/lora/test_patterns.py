"""Patterns of module names match as in ``re``, in a bounded number of steps."""

import random
import re
import warnings
from collections import deque

import pytest

import pagedserve.lora.patterns as patterns
from pagedserve.lora.patterns import NamePatterns

MODULE = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("pattern", "is_match"),
    [
        ("q_proj", True),
        ("proj", False),  # no end after a dot
        ("^q_proj", False),
        ("self_attn.q_proj", True),
        (f"^{MODULE}$", True),
        (r"model\.layers\.\d+\.self_attn\.(q|v)_proj", True),
        (r"layers\.[1-9]\..*", False),
        (r".*\.self_attn\.[^.]+", True),
    ],
)
def test_a_pattern_is_a_whole_name_or_its_end_after_a_dot(pattern: str, is_match: bool) -> None:
    assert NamePatterns({pattern: 5}).find(MODULE, 3) == (5 if is_match else 3)


def test_the_first_pattern_that_matches_counts() -> None:
    found = NamePatterns({"k_proj": 1, ".*_proj": 2, "q_proj": 3})
    assert [found.find(f"model.{name}", 0) for name in ("k_proj", "q_proj", "mlp")] == [1, 2, 0]


def test_a_random_pattern_matches_what_it_matches_in_re() -> None:
    chosen = random.Random(0)
    num_compared = 0
    while num_compared < 2000:
        source = "".join(chosen.choices("ab.()|*+?^$[]{2,3}\\d-", k=chosen.randint(1, 9)))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                oracle = re.compile(rf"(.*\.)?({source})")
            ours = NamePatterns({source: True})
        except (re.error, ValueError):
            continue
        num_compared += 1
        for _ in range(5):
            name = "".join(chosen.choices("ab.1", k=chosen.randint(1, 6)))
            assert ours.find(name, False) == (oracle.fullmatch(name) is not None), (source, name)


@pytest.mark.parametrize(
    "pattern", [r"([\w.]+)+x", "(a|a)" * 100, "((a?){50}){50}a{2000}", "(.*)*(.*)*(.*)*(.*)*x"]
)
def test_a_catastrophic_pattern_is_matched_in_few_steps(pattern: str) -> None:
    found = NamePatterns({pattern: 5})
    assert found.find("a" * 60, 3) == 3
    assert found._num_steps < 100_000  # re would not end


def test_steps_of_all_modules_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "MAX_STEPS", 50_000)
    found = NamePatterns({r"([\w.]+)+x": 5})
    modules = (f"{MODULE}{index}" for index in range(1000))
    with pytest.raises(ValueError, match="takes more than 50000 steps"):
        deque((found.find(module, 3) for module in modules), maxlen=0)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("(", r"has '\(', which is no regular expression: missing \)"),
        (r"(a)\1", "with groupref; accepted is a name, with"),
        ("(?=a)a", "with assert; accepted"),
        ("(?i)a", "with flags; accepted"),
        ("a++", "with possessive_repeat; accepted"),
        ("(" * 40 + ")" * 40, "with more than 32 levels; accepted"),
        ("(" * 500 + ")" * 500, "nested too deep|more than 32 levels"),
        ("a{99999999999999999999}", "no regular expression: the repetition number is too large"),
        ("a" * 2000, r"of 2000 characters; accepted is .* of at most 1024 characters"),
    ],
)
def test_what_is_not_matched_here_is_refused_by_name(pattern: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        NamePatterns({pattern: 1})


def test_the_number_of_patterns_is_bounded() -> None:
    with pytest.raises(ValueError, match="has 10001 patterns; accepted are 10000"):
        NamePatterns({f"m{index}": 1 for index in range(10_001)})
