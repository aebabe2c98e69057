"""Triton's kernel of masked rows against masks that are applied by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.masks import packed

pytest.importorskip("triton", reason="triton is not installed")

from pagedserve.kernels.masks import masked_argmax
from pagedserve.sampling.on_gpu import unpack_masks


@settings(max_examples=examples(20, all_of_them=80))
@given(
    num_rows=st.sampled_from([1, 2, 5]),
    vocab_size=st.sampled_from([1, 31, 33, 300, 4096, 4097, 9000, 49152]),
    shares=st.tuples(st.sampled_from([0.0, 0.0005, 0.5, 1.0]), st.sampled_from([0.0, 0.0, 0.0005])),
    seed=st.integers(0, 1000),
)
def test_the_largest_of_those_that_may_come(
    device: torch.device,
    num_rows: int,
    vocab_size: int,
    shares: tuple[float, float],
    seed: int,
) -> None:
    share, share_of_nan = shares
    random = np.random.default_rng(seed)
    # Few different values, so that some are equal, and rows of a wider tensor.
    wide = random.integers(-9, 9, (num_rows, vocab_size + 3)).astype(np.float32)
    wide[random.random(wide.shape) < 0.1] = -np.inf
    wide[random.random(wide.shape) < share_of_nan] = np.nan
    logits = wide[:, :vocab_size]
    allowed = random.random(logits.shape) < share
    there = torch.from_numpy(wide).to(device)[:, :vocab_size]
    found, ids = masked_argmax(there, torch.from_numpy(packed(allowed)).to(device))
    hidden = np.where(allowed, logits, -np.inf)
    assert np.array_equal(found.cpu().numpy(), hidden.max(axis=1), equal_nan=True)
    assert ids.dtype == torch.int64
    for row, token in zip(hidden, ids.tolist(), strict=True):
        assert 0 <= token < vocab_size
        if np.isfinite(row.max()):
            assert token == row.argmax()


def test_no_rows_have_no_largest(device: torch.device) -> None:
    found, ids = masked_argmax(
        torch.zeros(0, 40, device=device), torch.zeros(0, 2, dtype=torch.int32, device=device)
    )
    assert found.shape == ids.shape == (0,)


@pytest.mark.parametrize(
    ("logits", "masks"),
    [
        (torch.zeros(2, 40), torch.zeros(2, 1, dtype=torch.int32)),
        (torch.zeros(2, 40), torch.zeros(2, 2, dtype=torch.int64)),
        (torch.zeros(2, 40).double(), torch.zeros(2, 2, dtype=torch.int32)),
        (torch.zeros(40, 2).T, torch.zeros(2, 2, dtype=torch.int32)),
        (torch.zeros(2, 40), torch.zeros(2, 2, dtype=torch.int32).T),
    ],
)
def test_what_would_be_read_wrongly_is_refused(
    device: torch.device, logits: torch.Tensor, masks: torch.Tensor
) -> None:
    with pytest.raises(ValueError, match=r"must be float32|masks are"):
        masked_argmax(logits.to(device), masks.to(device))


@pytest.mark.parametrize("vocab_size", [1, 33, 300])
def test_masks_are_unpacked_where_they_lie(device: torch.device, vocab_size: int) -> None:
    allowed = np.random.default_rng(0).random((4, vocab_size)) < 0.5
    found = unpack_masks(torch.from_numpy(packed(allowed)).to(device), vocab_size)
    assert found.device.type == device.type
    assert np.array_equal(found.cpu().numpy(), allowed)
