"""Packed linear layers against float64, on every instruction set of this CPU."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from pagedserve import _core
from pagedserve.config.precision import Quantization
from pagedserve.errors import StepError
from pagedserve.host_ops.capabilities import DTYPE_NAMES
from pagedserve.models.fused.cpu.modules import PackedEmbedding, PackedLinear, multiply, unpack
from pagedserve.models.fused.cpu.packing import can_pack, pack, pack_gated, quantize
from tests.support.packed import (
    DTYPES,
    INSTRUCTIONS,
    POISON,
    QUANTIZATIONS,
    held,
    is_near,
    product,
)

INT8 = {"panels": np.zeros(128, dtype=np.int8), "scales": np.ones(64, dtype=np.float32)}


@dataclass(frozen=True, kw_only=True)
class Case:
    num_rows: int
    half_depth: int
    num_features: int
    dtype: torch.dtype
    numbers: torch.dtype
    quantization: Quantization | None
    gives_float32: bool
    has_bias: bool
    adds: bool
    gap: int
    instructions: Any
    num_threads: int


CASES = st.builds(
    Case,
    num_rows=st.integers(1, 70) | st.sampled_from([200, 600]),
    half_depth=st.integers(1, 40) | st.sampled_from([288, 1100]),
    num_features=st.integers(1, 200),
    dtype=st.sampled_from(DTYPES),
    numbers=st.sampled_from(DTYPES),
    quantization=st.sampled_from(QUANTIZATIONS),
    gives_float32=st.booleans(),
    has_bias=st.booleans(),
    adds=st.booleans(),
    gap=st.sampled_from([0, 6]),
    instructions=st.sampled_from(INSTRUCTIONS),
    num_threads=st.sampled_from([1, 2, 5]),
)


def random_weight(
    num_features: int, depth: int, dtype: torch.dtype, numbers: torch.dtype
) -> torch.Tensor:
    """Random numbers of one dtype, of which a float32 layer packs those of 16 bits, in another."""
    return torch.randn(num_features, depth).to(numbers).to(dtype)


@settings(max_examples=200)
@given(CASES)
def test_products_are_right_and_nothing_else_is_written(case: Case) -> None:
    torch.manual_seed(case.num_rows)
    output_dtype = torch.float32 if case.gives_float32 else case.dtype
    depth, num_features = 2 * case.half_depth, case.num_features
    weight = random_weight(num_features, depth, case.dtype, case.numbers)
    bias = torch.randn(num_features) if case.has_bias else None
    x = torch.randn(case.num_rows, depth).to(case.dtype)
    before = torch.randn(case.num_rows, num_features).to(output_dtype)
    output = product(
        pack(weight, bias, quantization=case.quantization),
        x,
        num_features=num_features,
        output_dtype=output_dtype,
        gap=case.gap,
        added=before if case.adds else None,
        num_threads=case.num_threads,
        instructions=case.instructions,
    )
    exact = x.double() @ held(weight, case.quantization).T
    exact += 0.0 if bias is None else bias.double()
    exact += before.double() if case.adds else 0.0
    assert is_near(output, exact, output_dtype)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numbers", DTYPES)
def test_long_sums_lose_little(numbers: torch.dtype, dtype: torch.dtype, instructions: Any) -> None:
    torch.manual_seed(5)
    weight = random_weight(64, 4096, dtype, numbers)
    x = torch.randn(8, 4096).to(dtype)
    output = torch.empty(8, 64)
    pack(weight).multiply(
        num_rows=8,
        x=x.data_ptr(),
        x_stride=4096,
        output=output.data_ptr(),
        output_stride=64,
        output_dtype="float32",
        num_threads=1,
        instructions=instructions,
    )
    exact = x.double() @ weight.double().T
    # One chain of 4,096 additions loses more than three times as much.
    assert (output - exact).norm() < 5e-7 * exact.norm()


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_gated_layers(
    quantization: Quantization | None, gate: Any, dtype: torch.dtype, instructions: Any
) -> None:
    torch.manual_seed(3)
    gates, ups = (torch.randn(96, 64).to(dtype) for _ in range(2))
    x = torch.randn(9, 64).to(dtype)
    # Where the exponential would overflow, and where it vanishes.
    x[0], x[1] = 3 * gates[0], -3 * gates[0]
    output = torch.full((9, 96), POISON, dtype=dtype)
    pack_gated(gates, ups, gate, quantization).multiply(
        num_rows=9,
        x=x.data_ptr(),
        x_stride=64,
        output=output.data_ptr(),
        output_stride=96,
        output_dtype=DTYPE_NAMES[dtype],
        num_threads=2,
        instructions=instructions,
    )
    gated, up = (x.double() @ held(weight, quantization).T for weight in (gates, ups))
    activated = (
        functional.silu(gated) if gate == "silu" else functional.gelu(gated, approximate="tanh")
    )
    assert is_near(output[2:], (activated * up)[2:], dtype)
    assert is_near(output[:2], (activated * up)[:2], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numbers", DTYPES)
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_row_is_the_same_in_any_batch_to_the_last_bit(
    quantization: Quantization | None, numbers: torch.dtype, dtype: torch.dtype
) -> None:
    torch.manual_seed(5)
    weight = random_weight(130, 1500, dtype, numbers)
    weights = pack(weight, quantization=quantization)
    x = torch.randn(600, 1500).to(dtype)
    whole = multiply(x, weights, torch.empty(600, 130, dtype=dtype), dtype)
    for first, last in [(0, 1), (3, 10), (17, 64), (100, 300), (500, 530)]:
        part = multiply(x[first:last], weights, torch.empty(last - first, 130, dtype=dtype), dtype)
        assert part.equal(whole[first:last])


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("numbers", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_take_half_of_float32_s_memory_and_lose_nothing(
    numbers: torch.dtype, instructions: Any
) -> None:
    torch.manual_seed(6)
    weight = random_weight(70, 402, torch.float32, numbers)
    narrow = pack(weight)
    weight[-1, -1] = torch.nextafter(weight[-1, -1], torch.tensor(9.0))
    wide = pack(weight)
    assert 2 * narrow.nbytes == wide.nbytes
    x = torch.randn(30, 402)
    x[:, -1] = 0
    left, right = (
        product(
            weights,
            x,
            num_features=70,
            output_dtype=torch.float32,
            gap=0,
            added=None,
            num_threads=1,
            instructions=instructions,
        )
        for weights in (narrow, wide)
    )
    if instructions == "amx" and numbers is torch.bfloat16:  # sums in another order
        assert is_near(left, right.double(), torch.float32)
    else:
        assert left.equal(right)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_the_module_computes_what_the_layer_does(dtype: torch.dtype, *, bias: bool) -> None:
    linear = nn.Linear(64, 48, bias=bias).to(dtype)
    packed = PackedLinear(linear)
    for shape in [(0,), (1,), (9,), (2, 3), (1, 70)]:
        x = torch.randn(*shape, 64).to(dtype)
        with torch.inference_mode():
            found, expected = packed(x), linear(x)
        assert found.shape == expected.shape
        assert found.dtype == dtype
        if found.numel():
            assert is_near(found, expected.double(), dtype)


def test_a_view_with_gaps_is_read_right() -> None:
    linear = nn.Linear(32, 16)
    x = torch.randn(5, 64)[:, ::2]
    with torch.inference_mode():
        assert torch.allclose(PackedLinear(linear)(x), linear(x), atol=1e-5)


def test_what_cannot_be_packed() -> None:
    assert can_pack(torch.zeros(3, 4))
    assert not can_pack(torch.zeros(3, 4, dtype=torch.float64))
    assert not can_pack(torch.zeros(3, 5, dtype=torch.bfloat16))
    assert not can_pack(torch.zeros(0, 4))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"panels": np.zeros(63, dtype=np.uint32)}, "64 in 2 .* must have 128 units; got 63"),
        ({"panels": np.zeros(128, dtype=np.int32)}, "panels must be"),
        ({"panels": np.zeros(128, dtype=np.int8)}, "panels must be .* uint32 array; got int8"),
        ({"scales": np.ones(64, dtype=np.float32)}, "panels must be .* int8 array; got uint32"),
        (
            INT8 | {"panels": np.zeros(127, dtype=np.int8)},
            "64 in 2 .* must have 128 int8; got 127",
        ),
        (INT8 | {"scales": np.ones(63, dtype=np.float32)}, "scales must have 64 numbers; got 63"),
        (INT8 | {"scales": np.ones(64, dtype=np.float64)}, "scales must be"),
        ({"dtype": "int8"}, 'dtype is "int8"'),
        ({"in_features": 0, "panels": np.zeros(0, dtype=np.uint32)}, "must have features"),
        ({"bias": np.zeros(3, dtype=np.float32)}, "bias must have 64 numbers; got 3"),
        ({"gate": "relu"}, 'gate is "relu"'),
        ({"dtype": "bfloat16", "in_features": 3}, "in_features must be a multiple of 2"),
        ({"weight_dtype": "bfloat16", "in_features": 3}, "in_features must be a multiple of 2"),
        ({"weight_dtype": "bfloat16"}, "64 in 2 .* must have 64 units; got 128"),
        (
            {"dtype": "float16", "weight_dtype": "bfloat16"},
            "weight_dtype must be Float16, that of the rows; got BFloat16",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(changes: dict[str, Any], text: str) -> None:
    arguments: dict[str, Any] = {"dtype": "float32", "in_features": 2, "out_features": 64}
    arguments |= {"panels": np.zeros(128, dtype=np.uint32)} | changes
    with pytest.raises(StepError, match=text):
        _core.cpu.PackedWeights(arguments.pop("panels"), **arguments)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"x": 0}, "x must be|input must be"),
        ({"output": 3}, "output must be an address"),
        ({"x_stride": 1}, "input must be at least 2 elements apart"),
        ({"output_stride": 63}, "output must be at least 64 elements apart"),
        ({"num_rows": -1}, "num_rows is -1"),
        ({"output_dtype": "bfloat16"}, "output_dtype must be Float32"),
        ({"instructions": "mmx"}, 'instructions is "mmx"'),
    ],
)
def test_calls_that_do_not_fit_are_refused(changes: dict[str, Any], text: str) -> None:
    weights = pack(torch.zeros(64, 2))
    x, output = torch.zeros(3, 2), torch.full((3, 64), POISON)
    arguments: dict[str, Any] = {
        "num_rows": 3,
        "x": x.data_ptr(),
        "x_stride": 2,
        "output": output.data_ptr(),
        "output_stride": 64,
        "output_dtype": "float32",
    }
    with pytest.raises(StepError, match=text):
        weights.multiply(**(arguments | changes))
    assert (output == POISON).all()
    weights.multiply(**arguments)
    assert (output == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_lie_anywhere_in_memory(dtype: torch.dtype) -> None:
    linear = PackedLinear(nn.Linear(36, 70, dtype=dtype))
    numbers = torch.randn(5 * 37 + 1, dtype=dtype)
    for x in (
        numbers[:36].expand(3, 36),
        numbers[:-1].view(5, 37)[:, :36],
        numbers[1:].view(5, 37)[:, 1:],
        numbers[1:145].view(4, 36),
        numbers[:180].view(36, 5).T,
    ):
        assert linear(x).equal(linear(x.clone(memory_format=torch.contiguous_format)))


def test_rows_of_another_dtype_are_refused() -> None:
    named = "the input is of torch.float16; this layer's weights are of torch.float32"
    with pytest.raises(StepError, match=named):
        PackedLinear(nn.Linear(36, 70))(torch.zeros(2, 36, dtype=torch.float16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numbers", DTYPES)
def test_an_embedding_reads_the_weights_of_its_head(
    numbers: torch.dtype, dtype: torch.dtype
) -> None:
    head = nn.Linear(36, 130, bias=False, dtype=dtype)
    head.weight.data = random_weight(130, 36, dtype, numbers)
    embedding = PackedEmbedding(PackedLinear(head), dtype)
    ids = torch.tensor([[0, 129, 64, 63, 64]], dtype=torch.int32)
    assert embedding(ids).equal(head.weight[ids.long()])
    assert PackedEmbedding(PackedLinear(head), dtype, 6.0)(ids).equal(6.0 * head.weight[ids.long()])
    for wrong in (-1, 130):
        with pytest.raises(StepError, match=f"one of 130 features; got {wrong}"):
            embedding(torch.tensor([1, wrong]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_modules_give_their_weights_to_a_model_that_reads_them(dtype: torch.dtype) -> None:
    linear = nn.Linear(36, 130, dtype=dtype)
    packed = PackedLinear(linear)
    assert packed.weight.equal(linear.weight)
    assert PackedEmbedding(packed, dtype, 6.0).weight.equal(linear.weight)
    assert PackedLinear(linear, quantization="int8").weight.equal(
        quantize(linear.weight).dequantize(dtype)
    )


def test_weights_are_unpacked_once_and_only_where_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[torch.dtype] = []

    def counting(weights: Any, dtype: torch.dtype) -> torch.Tensor:
        calls.append(dtype)
        return unpack(weights, dtype)

    monkeypatch.setattr("pagedserve.models.fused.cpu.modules.unpack", counting)
    linear = nn.Linear(36, 130)
    packed, x = PackedLinear(linear), torch.randn(2, 36)
    assert isinstance(packed.weight, torch.Tensor)
    assert (packed.weight.dtype, packed.weight.shape) == (torch.float32, (130, 36))
    assert not calls
    with torch.inference_mode():
        for _ in range(2):
            found = functional.linear(x, packed.weight.float())
            assert found.equal(functional.linear(x, linear.weight))
    assert calls == [torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_embedding_reads_the_int8_weights_of_its_head(dtype: torch.dtype) -> None:
    head = nn.Linear(36, 130, bias=False, dtype=dtype)
    embedding = PackedEmbedding(PackedLinear(head, quantization="int8"), dtype)
    ids = torch.tensor([[0, 129, 64, 63, 64]])
    assert embedding(ids).equal(quantize(head.weight).dequantize(dtype)[ids])


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_weights_are_the_nearest_multiples_of_a_scale(dtype: torch.dtype) -> None:
    torch.manual_seed(11)
    weight = torch.randn(50, 300).mul_(torch.logspace(-3, 1, 50)[:, None]).to(dtype)
    values, scales = quantize(weight)
    assert values.abs().amax(dim=1).eq(127).all()
    assert scales.equal(weight.float().abs().amax(dim=1) / 127)
    moved = (values.double() * scales.double()[:, None] - weight.double()).abs()
    assert (moved <= 0.5 * (1 + 1e-5) * scales.double()[:, None]).all()


def test_halves_become_even_and_nothing_becomes_something() -> None:
    values, scales = quantize(
        torch.tensor([[127.0, 0.5, 1.5, -2.5], [0.0, 0.0, 0.0, 0.0], [1e-45, -1e-45, 0.0, 0.0]])
    )
    assert values.tolist() == [[127, 0, 2, -2], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert scales.tolist() == [1, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 9, 70])
def test_the_error_of_an_int8_product_is_what_moving_its_weights_can_do(
    num_rows: int, dtype: torch.dtype
) -> None:
    """At most half a scale for each input feature, times the feature."""
    torch.manual_seed(num_rows)
    weight = torch.randn(190, 576).to(dtype)
    x = torch.randn(num_rows, 576).to(dtype)
    packed = pack(weight, quantization="int8")
    found = multiply(x, packed, torch.empty(num_rows, 190), x.dtype).double()
    exact = x.double() @ weight.double().T
    most = 0.5 * x.double().abs().sum(dim=1)[:, None] * quantize(weight).scales.double()
    assert ((found - exact).abs() <= most + 1e-5 * exact.abs().max()).all()
    assert packed.nbytes == 192 * 576 + 190 * 4
    # The signs of roundings differ, so what is seen is a fraction of that, but not nothing.
    assert 1e-3 < float((found - exact).norm() / exact.norm()) < 2e-2
