"""Packed layers with adapters against float64, on every instruction set of this CPU."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from pagedserve.config.precision import Quantization
from pagedserve.errors import StepError
from pagedserve.host_ops.capabilities import DTYPE_NAMES
from pagedserve.models.adapter_groups import AdapterArrays, AdapterGroups
from pagedserve.models.fused.cpu.packing import pack, pack_gated
from tests.support.packed import (
    DTYPES,
    INSTRUCTIONS,
    POISON,
    QUANTIZATIONS,
    held,
    is_near,
    product,
)

NUM_SLOTS = 3


def arrays(slots: Tensor) -> AdapterArrays:
    return AdapterGroups(slots.int().numpy()).arrays


def flat(tensor: Tensor) -> NDArray[np.float32]:
    return tensor.contiguous().reshape(-1).numpy()


@dataclass(frozen=True, kw_only=True)
class Case:
    num_rows: int
    half_depth: int
    # Of each of the layers that are packed together.
    features: list[int]
    # Of each slot, for each of them; 0 is no adapter.
    ranks: list[tuple[int, int, int]]
    dtype: torch.dtype
    quantization: Quantization | None
    gives_float32: bool
    adds: bool
    gap: int
    instructions: Any
    num_threads: int


RANKS = st.sampled_from([0, 1, 4, 15, 16, 17, 33, 64])
CASES = st.builds(
    Case,
    num_rows=st.integers(1, 70) | st.sampled_from([200, 600]),
    half_depth=st.integers(1, 40) | st.sampled_from([288, 700]),
    features=st.lists(st.integers(1, 100) | st.just(64), min_size=1, max_size=3),
    ranks=st.lists(st.tuples(RANKS, RANKS, RANKS), min_size=NUM_SLOTS, max_size=NUM_SLOTS),
    dtype=st.sampled_from(DTYPES),
    quantization=st.sampled_from(QUANTIZATIONS),
    gives_float32=st.booleans(),
    adds=st.booleans(),
    gap=st.sampled_from([0, 6]),
    instructions=st.sampled_from(INSTRUCTIONS),
    num_threads=st.sampled_from([1, 2, 5]),
)


@settings(max_examples=200)
@given(CASES)
def test_rows_get_their_adapters_and_nothing_else_is_written(case: Case) -> None:
    torch.manual_seed(case.num_rows)
    depth, num_features = 2 * case.half_depth, sum(case.features)
    output_dtype = torch.float32 if case.gives_float32 else case.dtype
    weight = torch.randn(num_features, depth).to(case.dtype)
    packed = pack(weight, torch.ones(num_features), quantization=case.quantization)
    changes = torch.zeros(NUM_SLOTS + 1, num_features, depth, dtype=torch.float64)
    for slot, ranks in enumerate(case.ranks):
        slices, first = [], 0
        for size, rank in zip(case.features, ranks, strict=False):
            if rank:
                a, b = torch.randn(rank, depth), torch.randn(size, rank) / rank
                changes[slot, first : first + size] = b.double() @ a.double()
                slices.append((first, rank, flat(a), flat(b)))
            first += size
        packed.load_adapter(slot, slices)
    slots = torch.randint(-1, NUM_SLOTS, (case.num_rows,))
    x = torch.randn(case.num_rows, depth).to(case.dtype)
    before = torch.randn(case.num_rows, num_features).to(output_dtype)
    output = product(
        packed,
        x,
        num_features=num_features,
        output_dtype=output_dtype,
        gap=case.gap,
        added=before if case.adds else None,
        adapters=arrays(slots),
        num_threads=case.num_threads,
        instructions=case.instructions,
    )
    rows = x.double()
    exact = rows @ held(weight, case.quantization).T + 1.0
    for slot in range(NUM_SLOTS):
        exact[slots == slot] += rows[slots == slot] @ changes[slot].T
    exact += before.double() if case.adds else 0.0
    assert is_near(output, exact, output_dtype)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("changed", [(True, True), (True, False), (False, True)])
def test_gated_layers_are_changed_before_the_activation(
    changed: tuple[bool, bool],
    quantization: Quantization | None,
    gate: Any,
    dtype: torch.dtype,
    instructions: Any,
) -> None:
    torch.manual_seed(3)
    gates, ups = (torch.randn(96, 64).to(dtype) for _ in range(2))
    packed = pack_gated(gates, ups, gate, quantization)
    pairs = [(torch.randn(rank, 64), torch.randn(96, rank) / rank) for rank in (5, 16)]
    packed.load_adapter(
        1,
        [
            (96 * half, len(a), flat(a), flat(b))
            for half, (a, b) in enumerate(pairs)
            if changed[half]
        ],
    )
    x = torch.randn(9, 64).to(dtype)
    slots = torch.tensor([1, -1, 1, 1, 0, -1, -1, 1, 1])
    output = torch.full((9, 96), POISON, dtype=dtype)
    packed.multiply(
        num_rows=9,
        x=x.data_ptr(),
        x_stride=64,
        output=output.data_ptr(),
        output_stride=96,
        output_dtype=DTYPE_NAMES[dtype],
        adapters=arrays(slots),
        num_threads=2,
        instructions=instructions,
    )
    products = [x.double() @ held(weight, quantization).T for weight in (gates, ups)]
    for half, (a, b) in enumerate(pairs):
        if changed[half]:
            products[half][slots == 1] += x[slots == 1].double() @ (b.double() @ a.double()).T
    gated, up = products
    silu = functional.silu(gated)
    activated = silu if gate == "silu" else functional.gelu(gated, approximate="tanh")
    assert is_near(output, activated * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_row_is_the_same_in_any_batch_to_the_last_bit(
    quantization: Quantization | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(5)
    packed = pack(torch.randn(130, 1500).to(dtype), quantization=quantization)
    for slot, rank in enumerate((4, 40)):
        a, b = torch.randn(rank, 1500), torch.randn(130, rank)
        packed.load_adapter(slot, [(0, rank, flat(a), flat(b))])
    x, slots = torch.randn(600, 1500).to(dtype), torch.randint(-1, 2, (600,))

    def products(rows: slice) -> Tensor:
        output = torch.empty(len(x[rows]), 130, dtype=dtype)
        packed.multiply(
            num_rows=len(output),
            x=x[rows].data_ptr(),
            x_stride=1500,
            output=output.data_ptr(),
            output_stride=130,
            output_dtype=DTYPE_NAMES[dtype],
            adapters=arrays(slots[rows]),
            num_threads=2,
        )
        return output

    whole = products(slice(0, 600))
    for first, last in [(0, 1), (3, 10), (17, 64), (100, 300), (500, 530)]:
        assert products(slice(first, last)).equal(whole[first:last])


A = np.zeros(8, dtype=np.float32)
B = np.zeros(128, dtype=np.float32)


@pytest.mark.parametrize(
    ("slices", "text"),
    [
        ([(0, 0, A, B)], "a rank above 0; got rank 0"),
        ([(0, 3, A, B)], "got rank 3, 8 and 128 numbers"),
        ([(0, 2, A, B[:-1])], "got rank 2, 8 and 127 numbers"),
        ([(1, 2, A, B)], "within 64 features; got 1 to 65 after 0"),
        ([(0, 2, A, B[:64]), (31, 2, A, B[:64])], "ascending .* got 31 to 63 after 32"),
        ([(0, 2, A.astype(np.float64), B)], "a must be .* float32 array; got float64"),
        ([(-1, 2, A, B)], "first_feature is -1"),
    ],
)
def test_slices_that_do_not_fit_are_refused(slices: Any, text: str) -> None:
    with pytest.raises(StepError, match=text):
        pack(torch.zeros(64, 4)).load_adapter(0, slices)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ((4, [0], [0, 1], [0]), "adapters are of 4 rows; got 3"),
        ((3, [0], [0], [0]), "starts of adapters must be one more than 1 slots; got 1"),
        ((3, [0], [0, 2], [0]), "starts must be ascending, within the rows"),
        ((3, [0], [1, 0], [0]), "starts must be ascending, within the rows"),
        ((3, [0], [0, 2], [1, 0]), "rows of an adapter must be ascending"),
        ((3, [0], [0, 1], [-1]), "rows of an adapter must be ascending, from 0 on"),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows: Any, text: str) -> None:
    packed = pack(torch.zeros(64, 4))
    packed.load_adapter(0, [(0, 2, A, B)])
    x, output = torch.zeros(3, 4), torch.full((3, 64), POISON)
    num_rows, *lists = rows
    with pytest.raises(StepError, match=text):
        packed.multiply(
            num_rows=3,
            x=x.data_ptr(),
            x_stride=4,
            output=output.data_ptr(),
            output_stride=64,
            output_dtype="float32",
            adapters=(num_rows, *(np.array(numbers, dtype=np.int32) for numbers in lists)),
        )
    assert (output == POISON).all()
