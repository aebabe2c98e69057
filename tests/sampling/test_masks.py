"""Rows that may take only the tokens of a mask, against masks that are applied by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedserve.sampling.on_host import HOST
from pagedserve.sampling.rows import LogitsEdits, RowSampling
from pagedserve.sampling.sampler import Sampler
from tests.support.masks import dead_state, packed, state_of

GREEDY = RowSampling(temperature=0)


@settings(max_examples=60)
@given(
    vocab_size=st.sampled_from([1, 31, 32, 33, 127, 128, 129, 300, 1000]),
    share=st.sampled_from([0.0, 0.002, 0.5, 1.0]),
    seed=st.integers(0, 1000),
)
def test_the_largest_of_those_that_may_come(vocab_size: int, share: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    # Few different values, so that some are equal.
    logits = random.integers(-9, 9, (5, vocab_size)).astype(np.float32)
    logits[random.random(logits.shape) < 0.1] = -np.inf
    allowed = random.random(logits.shape) < share
    values, ids = HOST.argmax(logits, packed(allowed))
    hidden = np.where(allowed, logits, -np.inf)
    assert values.tolist() == hidden.max(axis=1).tolist()
    for row, (value, found) in enumerate(zip(values.tolist(), ids.tolist(), strict=True)):
        if value > -np.inf:
            assert found == hidden[row].argmax()


def test_the_largest_of_some_rows() -> None:
    random = np.random.default_rng(0)
    logits = random.standard_normal((6, 300)).astype(np.float32)
    allowed = random.random((3, 300)) < 0.1
    rows = np.array([4, 0, 5])
    assert HOST.argmax(logits, rows=rows)[1].tolist() == logits[rows].argmax(axis=1).tolist()
    hidden = np.where(allowed, logits[rows], -np.inf)
    values, ids = HOST.argmax(logits, packed(allowed), rows)
    assert values.tolist() == hidden.max(axis=1).tolist()
    assert ids.tolist() == hidden.argmax(axis=1).tolist()


@pytest.mark.parametrize(
    "row",
    [
        GREEDY,
        RowSampling(temperature=0, num_logprobs=2),
        RowSampling(temperature=0.9, uniforms=(0.3,), top_p=0.5),
        RowSampling(temperature=0.9, uniforms=(0.3,), min_p=0.5),
        RowSampling(temperature=0.9, uniforms=(0.3, 0.1, 0.8), num_logprobs=0),
        RowSampling(temperature=0, num_candidates=3),
    ],
)
def test_grammars_let_come_what_lists_of_tokens_do(row: RowSampling) -> None:
    random = np.random.default_rng(0)
    logits = random.standard_normal((4, 300)).astype(np.float32)
    allowed = random.random((4, 300)) < 0.1
    changes: list[dict[str, Any] | None] = [
        {"presence_penalty": 1.5, "output_token_ids": tuple(range(0, 300, 3))},
        None,
        {"banned_token_ids": (int(np.flatnonzero(allowed[2])[0]),)},
    ]
    lists = [tuple(np.flatnonzero(mask).tolist()) for mask in allowed[:3]]
    by_grammar, by_list = [row], [row]
    for tokens, change in zip(lists, changes, strict=True):
        edits = None if change is None else LogitsEdits(**change)
        by_grammar.append(replace(row, grammar=state_of(tokens, 300), edits=edits))
        listed = LogitsEdits(**(change or {}), allowed_token_ids=tokens)
        by_list.append(replace(row, edits=listed))
    sampled = [Sampler().sample(logits, rows) for rows in (by_grammar, by_list)]
    assert np.array_equal(sampled[0].tokens, sampled[1].tokens)
    for name in ("logprobs", "candidates"):
        found, wanted = (getattr(rows, name) for rows in sampled)
        assert (found is None) == (wanted is None)
        if name == "candidates" and found is not None:
            assert np.array_equal(found.token_ids, wanted.token_ids)
        elif found is not None:
            assert np.array_equal(found.token_logprobs, wanted.token_logprobs)


def test_what_is_drawn_is_as_likely_as_among_what_may_come() -> None:
    chances = np.array([0.3, 0.25, 0.2, 0.15, 0.07, 0.03])
    logits = np.full((20_000, 300), -np.inf, np.float32)
    logits[:, :6] = np.log(chances)
    grammar = state_of([1, 3, 4, 200], 300)
    random = np.random.default_rng(0)
    rows = [
        RowSampling(temperature=1.0, uniforms=(first,), second_uniform=second, grammar=grammar)
        for first, second in random.random((20_000, 2)).tolist()
    ]
    sampled = Sampler().sample(logits, rows)
    assert not sampled.errors
    found = np.bincount(sampled.tokens, minlength=300)
    wanted = np.zeros(300)
    wanted[[1, 3, 4]] = chances[[1, 3, 4]] / chances[[1, 3, 4]].sum()
    assert not found[wanted == 0].any()
    assert np.allclose(found / 20_000, wanted, atol=0.012)  # 3.5 standard deviations


def test_a_row_that_nothing_may_follow_fails_alone() -> None:
    logits = np.zeros((3, 300), np.float32)
    logits[0, 7] = -np.inf
    nothing, fault = state_of([7], 300), dead_state(300)
    for row in (GREEDY, RowSampling(uniforms=(0.5,)), replace(GREEDY, num_candidates=2)):
        sampled = Sampler().sample(
            logits, [replace(row, grammar=nothing), row, replace(row, grammar=fault)]
        )
        assert set(sampled.errors) == {0, 2}
        assert "no token is left" in sampled.errors[0]
        assert "the grammar cannot continue" in sampled.errors[2]
