"""Triton's kernels of a decoder layer against the reference in float64, over poisoned memory."""

import os
from inspect import signature
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagedserve.kernels import reference

pytest.importorskip("triton", reason="triton is not installed")

from pagedserve.kernels.layer import add_norm, rotate_and_write, swiglu

# The interpreter rounds to bfloat16 towards zero.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = [torch.float32, torch.float16, *([] if INTERPRETED else [torch.bfloat16])]
NUM_BLOCKS, BLOCK_SIZE = 3, 16
NUM_SLOTS = NUM_BLOCKS * BLOCK_SIZE
# Slots in any order, and tokens without one.
slot_mappings = st.lists(st.integers(-NUM_SLOTS // 3, NUM_SLOTS - 1), max_size=9, unique=True).map(
    lambda slots: [max(slot, -1) for slot in slots]
)

quick = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not written shows: new tensors hold NaN."""

    def empty_like(like: Tensor) -> Tensor:
        return torch.full_like(like, torch.nan)

    def new_empty(self: Tensor, *shape: int, **options: Any) -> Tensor:
        return self.new_full(shape, torch.nan if self.is_floating_point() else -1, **options)

    monkeypatch.setattr(torch, "empty_like", empty_like)
    monkeypatch.setattr(Tensor, "new_empty", new_empty)


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def assert_rounded(found: Tensor, exact: Tensor) -> None:
    """Equal to float64 but for float32's sums and one rounding; NaN where NaN is."""
    eps = max(torch.finfo(found.dtype).eps, 1e-6)
    torch.testing.assert_close(
        found.cpu().double(), exact.double(), rtol=2 * eps, atol=2 * eps, equal_nan=True
    )


@quick
@given(
    dtype=st.sampled_from(DTYPES),
    num_rows=st.integers(0, 5),
    size=st.sampled_from([1, 17, 64, 576, 1024]),
    scale=st.sampled_from([1e-3, 1.0, 50.0]),
)
def test_add_norm(
    device: torch.device, *, dtype: torch.dtype, num_rows: int, size: int, scale: float
) -> None:
    x = numbers(num_rows, size, dtype=dtype, seed=1, scale=scale)
    residual = numbers(num_rows, size, dtype=dtype, seed=2, scale=scale)
    weight = numbers(size, dtype=dtype, seed=3)
    stream = residual.clone().to(device)
    normed = add_norm(x.to(device), stream, weight.to(device), 1e-5)
    # A half's sum is exact in float32, so both round it alike.
    residual = (residual.float() + x.float()).to(dtype)
    assert torch.equal(stream.cpu(), residual)
    nothing = torch.zeros(num_rows, size, dtype=torch.float64)
    exact = reference.add_norm(nothing, residual.double(), weight.double(), 1e-5)
    assert normed.dtype == dtype
    assert_rounded(normed, exact)


@quick
@given(
    dtype=st.sampled_from(DTYPES),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 3, 4, 7]),
    size=st.sampled_from([16, 64, 80, 96, 128]),
    rotated=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    has_norm=st.booleans(),
    heads_first=st.booleans(),
    slots=slot_mappings,
)
def test_rotate_and_write(
    device: torch.device,
    *,
    dtype: torch.dtype,
    kv_heads: int,
    group: int,
    size: int,
    rotated: float,
    has_norm: bool,
    heads_first: bool,
    slots: list[int],
) -> None:
    num_tokens, rotary_size = len(slots), 2 * int(rotated * size / 2)
    heads = kv_heads * group
    qkv = numbers(num_tokens, (heads + 2 * kv_heads) * size, dtype=dtype)
    # All different: a real embedding repeats the angles of the first half in the second.
    angles = numbers(num_tokens, rotary_size, dtype=torch.float32, seed=1, scale=3.0)
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    norms = {}
    if has_norm:
        norms = {
            "query_norm": numbers(size, dtype=dtype, seed=2),
            "key_norm": numbers(size, dtype=dtype, seed=3),
        }
    pool = torch.full((NUM_BLOCKS, BLOCK_SIZE, kv_heads, 2 * size), torch.nan, dtype=dtype)
    exact_pool = pool.double()
    if heads_first:
        pool = pool.transpose(1, 2).contiguous().transpose(1, 2)
    pool, mapping = pool.to(device), torch.tensor(slots, dtype=torch.int64)
    query = rotate_and_write(
        qkv.to(device),
        cosines.to(device),
        sines.to(device),
        pool[..., :size],
        pool[..., size:],
        mapping.to(device),
        epsilon=1e-5,
        **{name: norm.to(device) for name, norm in norms.items()},
    )
    exact_query = reference.rotate_and_write(
        qkv.double(),
        cosines.double(),
        sines.double(),
        exact_pool[..., :size],
        exact_pool[..., size:],
        mapping,
        epsilon=1e-5,
        **{name: norm.double() for name, norm in norms.items()},
    )
    assert query.shape == (num_tokens, heads, size)
    assert_rounded(query, exact_query)
    assert_rounded(pool, exact_pool)
    values, exact_values = pool[..., size:].cpu(), exact_pool[..., size:].to(dtype)
    assert torch.equal(values.isnan(), exact_values.isnan())
    assert torch.equal(values.nan_to_num(), exact_values.nan_to_num())


@quick
@given(
    dtype=st.sampled_from(DTYPES),
    num_rows=st.integers(0, 4),
    size=st.sampled_from([1, 48, 1024, 1030]),
)
def test_swiglu(device: torch.device, *, dtype: torch.dtype, num_rows: int, size: int) -> None:
    gate_up = numbers(num_rows, 2 * size, dtype=dtype, scale=4.0)
    found = swiglu(gate_up.to(device))
    assert found.dtype == dtype
    assert_rounded(found, reference.swiglu(gate_up.double()))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_a_gate_far_below_zero_is_shut(device: torch.device) -> None:
    gates = torch.tensor([[-1e4, -200.0, 200.0, torch.nan, 3.0, 3.0, 3.0, 3.0]], device=device)
    assert swiglu(gates).nan_to_num(7.0).tolist() == [[0.0, 0.0, 600.0, 7.0]]


def test_every_kernel_has_the_signature_of_its_reference() -> None:
    for ours in (add_norm, rotate_and_write, swiglu):
        assert signature(ours) == signature(getattr(reference, ours.__name__))


def test_what_would_be_read_wrongly_is_named(device: torch.device) -> None:
    rows = torch.zeros(4, 8, device=device)
    with pytest.raises(ValueError, match="x must be contiguous"):
        add_norm(rows.t(), torch.zeros(8, 4, device=device), rows[0, :4], 1e-5)
    with pytest.raises(ValueError, match="gate_up must be contiguous"):
        swiglu(rows[:, ::2])
    cache = torch.zeros(1, BLOCK_SIZE, 2, 16, device=device)
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    angles = torch.zeros(1, 16, device=device)
    for width in (64 + 8, 64, 64 + 16):  # a part of a head, no query, one for two KV heads
        with pytest.raises(ValueError, match=f"rows of {width} elements"):
            rotate_and_write(
                torch.zeros(1, width, device=device), angles, angles, cache, cache, slots
            )
    qkv = torch.zeros(1, 96, device=device)
    for wrong in (torch.zeros(1, 18, device=device), torch.zeros(1, 7, device=device)):
        with pytest.raises(ValueError, match="even number of elements, at most 16"):
            rotate_and_write(qkv, wrong, wrong, cache, cache, slots)
    with pytest.raises(ValueError, match="both be given"):
        rotate_and_write(qkv, angles, angles, cache, cache, slots, query_norm=angles[0])
    with pytest.raises(ValueError, match="contiguous last dimension"):
        rotate_and_write(qkv, angles, angles, cache, cache.transpose(1, 3)[:, :, :, :16], slots)
