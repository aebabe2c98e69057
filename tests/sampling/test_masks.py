"""Rows that may take only the tokens of a mask, against masks that are applied by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedserve.sampling.rows import LogitsEdits, RowSampling
from pagedserve.sampling.sampler import Sampler
from pagedserve.sampling.top_k import argmax
from tests.support.masks import packed

GREEDY = RowSampling(temperature=0)


@settings(max_examples=60, deadline=None)
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
    values, ids = argmax(torch.from_numpy(logits), torch.from_numpy(packed(allowed)))
    hidden = np.where(allowed, logits, -np.inf)
    assert values.tolist() == hidden.max(axis=1).tolist()
    for row, (value, found) in enumerate(zip(values.tolist(), ids.tolist(), strict=True)):
        if value > -np.inf:
            assert found == hidden[row].argmax()


@pytest.mark.parametrize(
    "row",
    [
        GREEDY,
        RowSampling(temperature=0, num_logprobs=2),
        RowSampling(temperature=0.9, uniforms=(0.3,)),
        RowSampling(temperature=0, num_candidates=3),
    ],
)
def test_masks_are_those_of_lists_of_tokens(row: RowSampling) -> None:
    random = np.random.default_rng(0)
    logits = torch.from_numpy(random.standard_normal((4, 200)).astype(np.float32))
    allowed = random.random((4, 200)) < 0.1
    changes: list[dict[str, Any]] = [
        {"presence_penalty": 1.5, "output_token_ids": tuple(range(0, 200, 3))},
        {},
        {"banned_token_ids": (int(np.flatnonzero(allowed[2])[0]),)},
    ]
    by_mask = [
        LogitsEdits(allowed_mask=mask, **change)
        for mask, change in zip(packed(allowed), changes, strict=False)
    ]
    by_list = [
        LogitsEdits(allowed_token_ids=tuple(np.flatnonzero(mask).tolist()), **change)
        for mask, change in zip(allowed, changes, strict=False)
    ]
    sampled = [
        Sampler().sample(logits, [*(replace(row, edits=edits) for edits in given_edits), row])
        for given_edits in (by_mask, by_list)
    ]
    assert np.array_equal(sampled[0].tokens, sampled[1].tokens)
    for name in ("logprobs", "candidates"):
        found, wanted = (getattr(rows, name) for rows in sampled)
        assert (found is None) == (wanted is None)
        if name == "candidates" and found is not None:
            assert np.array_equal(found.token_ids, wanted.token_ids)
        elif found is not None:
            assert np.array_equal(found.token_logprobs, wanted.token_logprobs)


def test_a_row_that_nothing_may_follow_fails_alone() -> None:
    logits = torch.zeros(3, 40)
    nothing = LogitsEdits(allowed_mask=np.zeros(2, np.int32))
    fault = LogitsEdits(allowed_mask=np.full(2, -1, np.int32), fault="its grammar cannot go on")
    sampled = Sampler().sample(
        logits, [replace(GREEDY, edits=nothing), GREEDY, replace(GREEDY, edits=fault)]
    )
    assert set(sampled.errors) == {0, 2}
    assert "no token is left" in sampled.errors[0]
    assert sampled.errors[2] == "its grammar cannot go on"
