"""``top_n_sigma`` against numpy in float64."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pagedserve.sampling.edits import edit_logits
from pagedserve.sampling.on_host import HOST, HostOps
from pagedserve.sampling.results import SampledRows
from pagedserve.sampling.rows import LogitsEdits, RowSampling
from pagedserve.sampling.sampler import Sampler
from tests.support.masks import state_of


def kept(logits: NDArray[np.float32], num_deviations: float) -> NDArray[np.bool_]:
    """Tokens of one row within so many standard deviations of the largest logit."""
    exact = logits.astype(np.float64)
    deviation = np.std(exact[np.isfinite(exact)])
    threshold = exact.max() - num_deviations * deviation
    distances = np.abs(exact - threshold)[exact < exact.max()]
    assert distances.min(initial=np.inf) > 1e-10 * deviation  # no rounding decides
    found: NDArray[np.bool_] = exact >= threshold
    return found


def edited(logits: NDArray[np.float32], rows: list[RowSampling]) -> NDArray[np.float32]:
    found = logits.copy()
    assert edit_logits(found, rows, HOST) == {}
    return found


def row_of(num_deviations: float, **more: Any) -> RowSampling:
    return RowSampling(edits=LogitsEdits(top_n_sigma=num_deviations, **more))


def sampled(logits: NDArray[np.float32], rows: list[RowSampling]) -> SampledRows:
    return Sampler().sample(logits, rows)


@settings(max_examples=200)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab_size=st.sampled_from([1, 2, 3, 300, 1001]),
    spread=st.sampled_from([1e-6, 0.3, 4.0, 1e20]),
    shift=st.sampled_from([-30.0, 0.0, 1e4]),
    numbers=st.lists(st.sampled_from([0.05, 0.317, 1.0, 2.5, 40.0]), min_size=1, max_size=4),
)
def test_tokens_are_those_of_numpy(
    seed: int, vocab_size: int, spread: float, shift: float, numbers: list[float]
) -> None:
    random = np.random.default_rng(seed)
    logits = (random.normal(size=(len(numbers), vocab_size)) * spread + shift).astype(np.float32)
    logits[:, 1:][random.random(logits[:, 1:].shape) < 0.2] = -np.inf
    found = edited(logits, [row_of(number) for number in numbers])
    for row, number in enumerate(numbers):
        assert np.array_equal(found[row], np.where(kept(logits[row], number), logits[row], -np.inf))


def test_it_follows_every_other_edit() -> None:
    random = np.random.default_rng(3)
    logits = random.normal(size=(1, 500)).astype(np.float32) * 3
    others: dict[str, Any] = {
        "output_token_ids": tuple(range(0, 500, 3)),
        "presence_penalty": 1.5,
        "repetition_penalty": 1.3,
        "logit_bias": ((7, 2.0), (8, -50.0)),
        "banned_token_ids": tuple(np.argsort(logits[0])[-5:].tolist()),
        "logits_processors": (lambda _, row: row * 2,),
    }
    before = edited(logits, [RowSampling(edits=LogitsEdits(**others))])[0]
    found = edited(logits, [row_of(0.9, **others)])[0]
    assert np.array_equal(found, np.where(kept(before, 0.9), before, -np.inf))
    assert 1 < np.isfinite(found).sum() < np.isfinite(before).sum()


def test_rows_do_not_depend_on_their_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostOps, "max_elements", 3 * 49_152)
    random = np.random.default_rng(4)
    logits = random.normal(size=(7, 49_152)).astype(np.float32)
    alone = [edited(logits[index][None], [row_of(1.7)])[0] for index in range(7)]
    together = edited(logits, [row_of(1.7)] * 7)
    assert np.array_equal(together, np.stack(alone))
    rows = [
        RowSampling(uniforms=(uniform,), edits=LogitsEdits(top_n_sigma=1.7))
        for uniform in random.random(7)
    ]
    tokens = [sampled(logits[i][None], [row]).tokens[0] for i, row in enumerate(rows)]
    assert sampled(logits, rows).tokens.tolist() == tokens


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 50.0])
def test_the_temperature_does_not_matter(temperature: float) -> None:
    logits = np.random.default_rng(5).normal(size=(1, 60)).astype(np.float32)
    uniforms = tuple(np.linspace(0, 1, 4000, endpoint=False).tolist())
    row = RowSampling(
        temperature=temperature, uniforms=uniforms, edits=LogitsEdits(top_n_sigma=1.1)
    )
    tokens = set(sampled(logits, [row]).tokens.tolist())
    expected = set(np.flatnonzero(kept(logits[0], 1.1)).tolist())
    assert len(expected) > 1
    assert tokens == (expected if temperature else {int(logits.argmax())})


def test_a_grammar_comes_first() -> None:
    logits = np.random.default_rng(6).normal(size=(1, 300)).astype(np.float32)
    allowed = np.argsort(logits[0])[:40]  # all of them far from the most likely token
    masked = np.full(300, -np.inf, np.float32)
    masked[allowed] = logits[0, allowed]
    row = RowSampling(
        uniforms=tuple(np.linspace(0, 1, 2000, endpoint=False).tolist()),
        edits=LogitsEdits(top_n_sigma=0.8),
        grammar=state_of(allowed.tolist(), 300),
    )
    found = sampled(logits, [row])
    assert not found.errors
    expected = set(np.flatnonzero(kept(masked, 0.8)).tolist())
    assert 1 < len(expected) < 40
    assert set(found.tokens.tolist()) == expected


def test_log_probabilities_are_the_models() -> None:
    logits = np.random.default_rng(7).normal(size=(1, 60)).astype(np.float32)
    row = RowSampling(num_logprobs=60, uniforms=(0.4,), edits=LogitsEdits(top_n_sigma=0.5))
    found = sampled(logits, [row]).logprobs
    assert found is not None
    exact = logits[0].astype(np.float64)
    expected = np.sort(exact - np.log(np.exp(exact).sum()))[::-1]
    assert found.top_logprobs[0] == pytest.approx(expected, abs=1e-5)


def test_a_row_without_a_token_fails_as_before() -> None:
    logits = np.zeros((2, 5), np.float32)
    nothing = LogitsEdits(top_n_sigma=1.0, banned_token_ids=(0, 1, 2, 3, 4))
    found = sampled(logits, [RowSampling(edits=nothing), row_of(1.0)])
    assert found.errors == {0: "no token is left to sample: the edited logits are all -inf"}
