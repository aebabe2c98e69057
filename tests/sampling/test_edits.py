"""Edits of logits against an obvious implementation, and what fails a row."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagedserve.sampling.edits import edit_logits
from pagedserve.sampling.results import SampledRows
from pagedserve.sampling.rows import LogitsEdits, RowSampling
from pagedserve.sampling.sampler import Sampler
from pagedserve.sampling.tensors import ops_for

VOCAB_SIZE = 12
# Of an executor with torch, whose processors receive tensors.
OPS = ops_for(None)


def naive_edit(logits: list[float], edits: LogitsEdits) -> list[float]:
    """One token after the other."""
    values = torch.tensor(logits)
    processor: Any
    for processor in edits.logits_processors:
        values = processor(list(edits.output_token_ids), values.clone())
    edited = values.tolist()
    prompt, output = list(edits.prompt_token_ids), list(edits.output_token_ids)
    for token in range(VOCAB_SIZE):
        edited[token] += sum(value for place, value in edits.logit_bias if place == token)
        if token in prompt or token in output:
            penalty = edits.repetition_penalty
            edited[token] = (
                edited[token] / penalty if edited[token] > 0 else edited[token] * penalty
            )
        if token in output:
            edited[token] -= edits.presence_penalty
            edited[token] -= edits.frequency_penalty * output.count(token)
        if edits.allowed_token_ids is not None and token not in edits.allowed_token_ids:
            edited[token] = -math.inf
        if token in edits.banned_token_ids:
            edited[token] = -math.inf
    return edited


def favour_length(token_ids: list[int], logits: Tensor) -> Tensor:
    """In place, and dependent on the output."""
    logits[len(token_ids) % VOCAB_SIZE] += 3.0
    token_ids.clear()
    return logits


def halve(_: list[int], logits: Tensor) -> Tensor:
    return logits.double() / 2


token = st.integers(0, VOCAB_SIZE - 1)
ids = st.lists(token, max_size=20)
some_ids = ids | ids.map(lambda values: np.array(values, dtype=np.int32))
ONE_BY_ONE: dict[str, st.SearchStrategy[Any]] = {
    "presence_penalty": st.sampled_from([-1.5, 0.0, 0.7]),
    "frequency_penalty": st.sampled_from([-0.5, 0.0, 0.3]),
    "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3]),
    "logit_bias": st.lists(st.tuples(token, st.floats(-5, 5, width=32)), max_size=5).map(tuple),
    "allowed_token_ids": st.none() | ids.map(tuple),
    "banned_token_ids": ids.map(tuple),
    "logits_processors": st.lists(st.sampled_from([favour_length, halve]), max_size=3).map(tuple),
}
logits_of_a_row = st.lists(st.floats(-10, 10, width=32), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE)


def check(batch: list[tuple[list[float], LogitsEdits | None]]) -> None:
    logits = np.array([row for row, _ in batch], np.float32)
    assert edit_logits(logits, [RowSampling(edits=edits) for _, edits in batch], OPS) == {}
    for edited, (row, edits) in zip(logits.tolist(), batch, strict=True):
        expected = row if edits is None else naive_edit(row, edits)
        assert edited == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", ONE_BY_ONE)
@settings(max_examples=60)
@given(data=st.data())
def test_each_edit_equals_the_naive_one(name: str, data: st.DataObject) -> None:
    edits = st.builds(
        LogitsEdits,
        prompt_token_ids=some_ids,
        output_token_ids=some_ids,
        **{name: ONE_BY_ONE[name]},
    )
    check(
        data.draw(st.lists(st.tuples(logits_of_a_row, st.none() | edits), min_size=1, max_size=4))
    )


@settings(max_examples=200)
@given(data=st.data())
def test_all_edits_together_equal_the_naive_ones(data: st.DataObject) -> None:
    edits = st.builds(
        LogitsEdits, prompt_token_ids=some_ids, output_token_ids=some_ids, **ONE_BY_ONE
    )
    check(
        data.draw(st.lists(st.tuples(logits_of_a_row, st.none() | edits), min_size=1, max_size=4))
    )


def sample(logits: Tensor, edits: list[LogitsEdits | None]) -> SampledRows:
    rows = [RowSampling(temperature=0.0, edits=edit) for edit in edits]
    return Sampler(OPS).sample(logits.numpy(), rows)


def test_banned_tokens_never_come_and_the_logits_are_left_alone() -> None:
    logits = torch.tensor([[5.0, 1.0, 4.0]] * 4)
    edits = [
        LogitsEdits(banned_token_ids=(0,)),
        LogitsEdits(banned_token_ids=(0, 2)),
        None,
        LogitsEdits(allowed_token_ids=(0, 1), banned_token_ids=(0,), logit_bias=((0, 99.0),)),
    ]
    assert sample(logits, edits).tokens.tolist() == [2, 1, 0, 1]
    assert logits.tolist() == [[5.0, 1.0, 4.0]] * 4


def test_processors_may_do_what_they_like_with_their_copies() -> None:
    kept: list[Tensor] = []

    def spoil(token_ids: list[int], logits: Tensor) -> Tensor:
        kept.append(logits)
        assert all(type(token) is int for token in token_ids)
        token_ids.append(7)
        logits[0] = 50.0
        return logits

    output = np.array([1, 2], dtype=np.int32)
    logits = torch.tensor([[1.0, 2.0, 3.0]] * 2)
    edits = LogitsEdits(output_token_ids=output, logits_processors=(spoil,), banned_token_ids=(0,))
    assert sample(logits, [edits, None]).tokens.tolist() == [2, 2]
    assert output.tolist() == [1, 2]
    assert kept[0].tolist() == [50.0, 2.0, 3.0]
    assert logits.tolist() == [[1.0, 2.0, 3.0]] * 2


def explode(_: list[int], __: Tensor) -> Tensor:
    raise ValueError("bad\nvery bad")


class SilentError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def stay_silent(_: list[int], __: Tensor) -> Tensor:
    raise SilentError


class Nameless:
    def __getattr__(self, name: str) -> str:
        raise RuntimeError(name)

    def __call__(self, _: list[int], __: Tensor) -> Any:
        return None


WANTED = "expected a dense float tensor of shape [3]"


def returning(value: object) -> Callable[[list[int], Tensor], Any]:
    def give(_: list[int], __: Tensor) -> object:
        return value

    return give


@pytest.mark.parametrize(
    ("edits", "reason"),
    [
        (
            LogitsEdits(logits_processors=(favour_length, explode)),
            "logits processor explode raised ValueError: bad very bad",
        ),
        (
            LogitsEdits(logits_processors=(partial(explode),)),
            "logits processor partial raised ValueError: bad very bad",
        ),
        (
            LogitsEdits(logits_processors=(returning(None),)),
            "logits processor give returned NoneType, " + WANTED,
        ),
        (
            LogitsEdits(logits_processors=(returning(torch.zeros(1, 3)),)),
            "logits processor give returned float32 [1, 3], " + WANTED,
        ),
        (
            LogitsEdits(logits_processors=(returning(torch.zeros(3, dtype=torch.int64)),)),
            "logits processor give returned int64 [3], " + WANTED,
        ),
        (
            LogitsEdits(logits_processors=(returning(torch.zeros(3).to_sparse()),)),
            "logits processor give returned torch.sparse_coo float32 [3], " + WANTED,
        ),
        (
            LogitsEdits(logits_processors=(returning(torch.zeros(3, device="meta")),)),
            "logits processor give returned meta float32 [3], " + WANTED,
        ),
        (
            LogitsEdits(logits_processors=(Nameless(),)),
            "logits processor Nameless returned NoneType, " + WANTED,
        ),
        (
            LogitsEdits(logits_processors=(stay_silent,)),
            "logits processor stay_silent raised SilentError",
        ),
        (
            LogitsEdits(logits_processors=(returning(torch.tensor([0.0, math.nan, 0.0])),)),
            "logits processor give returned NaN",
        ),
        (
            LogitsEdits(logits_processors=(returning(torch.tensor([0.0, math.inf, 0.0])),)),
            "the edited logits hold infinity",
        ),
        (
            LogitsEdits(logits_processors=(returning(torch.full((3,), -math.inf)),)),
            "no token is left to sample: the edited logits are all -inf",
        ),
        (
            LogitsEdits(banned_token_ids=(0, 1, 2)),
            "no token is left to sample: the edited logits are all -inf",
        ),
        (
            LogitsEdits(allowed_token_ids=()),
            "no token is left to sample: the edited logits are all -inf",
        ),
    ],
)
def test_a_failure_stays_in_its_row(edits: LogitsEdits, reason: str) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]] * 5)
    others = LogitsEdits(banned_token_ids=(1,))
    rows = [
        RowSampling(uniforms=(0.999,), edits=others),
        RowSampling(uniforms=(0.2, 0.999), edits=edits),
        RowSampling(temperature=0.0),
        RowSampling(temperature=0.0, edits=edits),
        RowSampling(num_candidates=2, edits=edits),
    ]
    sampled = Sampler(OPS).sample(logits.numpy(), rows)
    assert sampled.errors == {1: reason, 3: reason, 4: reason}
    assert sampled.tokens.tolist() == [2, 0, 0, 1, 0]
    assert logits.tolist() == [[1.0, 3.0, 2.0]] * 5


@pytest.mark.parametrize("token_id", [-1, 3])
@pytest.mark.parametrize(
    "edits",
    [
        lambda token_id: LogitsEdits(logit_bias=((token_id, 1.0),)),
        lambda token_id: LogitsEdits(banned_token_ids=(token_id,)),
        lambda token_id: LogitsEdits(output_token_ids=[token_id], presence_penalty=1.0),
    ],
)
def test_token_ids_of_other_rows_are_refused(
    token_id: int, edits: Callable[[int], LogitsEdits]
) -> None:
    with pytest.raises(IndexError, match=r"token ids must be in \[0, 3\)"):
        sample(torch.zeros(3, 3), [None, edits(token_id), None])
