"""Which pool an attention call reads: that of the layer that its module learned at load."""

import numpy as np
import pytest
import torch
from torch import nn

from pagedserve.attention.backends import get_backend
from pagedserve.attention.interface import PagedAttention, layers_of, number_layers
from pagedserve.attention.metadata import AttentionMetadata, BatchLayout
from pagedserve.errors import StepError

NOTHING = np.zeros(0, np.int32)
STEP = AttentionMetadata(
    BatchLayout(np.zeros(1, np.int32), NOTHING, NOTHING.reshape(0, 1), 4),
    torch.zeros(0, dtype=torch.int64),
)


def attention_of(num_layers: int) -> PagedAttention:
    """A step of nothing over pools that are told apart by their first number."""
    pools = [torch.full((1,), float(layer)) for layer in range(num_layers)]
    return PagedAttention(STEP, pools, [None] * num_layers, get_backend("torch"))


def test_a_module_reads_the_pools_of_its_layers_in_whatever_order_modules_attend() -> None:
    first, shared, last = (nn.Identity() for _ in range(3))
    model = nn.ModuleDict({"first": first, "shared": shared, "last": last})
    number_layers(model, ["shared", "first", "shared", "last"])
    assert layers_of(shared) == (0, 2)
    attention = attention_of(4)
    order = [last, shared, first, shared]
    found = [float(attention.attend_next(layers_of(module)).pool[0]) for module in order]
    assert found == [3.0, 0.0, 1.0, 2.0]
    assert attention.num_calls == 4
    with pytest.raises(StepError, match="more attention calls than the 2 that it made"):
        attention.attend_next(layers_of(shared))


def test_a_module_that_did_not_attend_at_load_is_an_error() -> None:
    with pytest.raises(StepError, match="more attention calls than the 0 that it made"):
        attention_of(1).attend_next(layers_of(nn.Identity()))
