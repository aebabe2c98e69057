"""Packed linear layers against the layers they take the place of."""

import pytest
import torch
from torch import nn

from pagedserve.models.linears import PackedLinear, pack_linears

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN"
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [(64, 48), (576, 1536), (33, 7), (1, 1)])
def test_the_product_is_that_of_the_layer(
    sizes: tuple[int, int], dtype: torch.dtype, *, bias: bool
) -> None:
    torch.manual_seed(3)
    linear = nn.Linear(*sizes, bias=bias).to(dtype)
    packed = PackedLinear(linear)
    exact = nn.Linear(*sizes, bias=bias, dtype=torch.float64)
    exact.load_state_dict({name: value.double() for name, value in linear.state_dict().items()})
    for shape in [(0,), (1,), (9,), (130,), (2, 3), (1, 70)]:
        x = torch.randn(*shape, sizes[0]).to(dtype)
        with torch.inference_mode():
            found, expected = packed(x), exact(x.double())
        assert found.shape == expected.shape
        assert found.dtype == dtype
        bound = 8 * torch.finfo(dtype).eps * sizes[0] ** 0.5
        assert torch.allclose(found.double(), expected, rtol=bound, atol=bound)


def test_a_view_with_gaps_is_read_right() -> None:
    linear = nn.Linear(32, 16)
    x = torch.randn(5, 64)[:, ::2]
    with torch.inference_mode():
        assert torch.allclose(PackedLinear(linear)(x), linear(x), atol=1e-5)


def test_all_layers_of_a_model_are_packed_and_others_left() -> None:
    model = nn.Sequential(
        nn.Embedding(5, 8), nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), nn.Linear(8, 5)
    )
    half = nn.Linear(8, 8).half()
    model.append(half)
    ids = torch.arange(5)
    with torch.inference_mode():
        expected = model[:3](ids)
        assert pack_linears(model) == 2
        assert torch.allclose(model[:3](ids), expected, atol=1e-5)
    assert model[3] is half
    assert pack_linears(model) == 0


def test_a_kernel_that_gives_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    linear = model[0]
    monkeypatch.setattr(PackedLinear, "forward", lambda _, x: linear(x) * 1.01)
    assert pack_linears(model) == 0
    assert model[0] is linear
