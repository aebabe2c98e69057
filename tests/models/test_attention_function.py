"""The function that transformers calls: what it hands on, and what it refuses."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pagedserve.attention.backends import get_backend
from pagedserve.attention.interface import AttentionCall, PagedAttention
from pagedserve.attention.metadata import AttentionMetadata, BatchLayout
from pagedserve.errors import StepError, UnsupportedModelError
from pagedserve.models.attention_function import paged_attention_forward
from pagedserve.models.forward import ForwardContext, current_context, forwarding

QUERY, KEY, VALUE = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 5)
NOTHING = np.zeros(0, np.int32)
STEP = AttentionMetadata(
    BatchLayout(np.zeros(1, np.int32), NOTHING, NOTHING.reshape(0, 1), 4),
    torch.zeros(0, dtype=torch.int64),
)


class Keeper:
    """Keeps the call it is given."""

    def answer(self, call: AttentionCall) -> Tensor:
        self.call = call
        return torch.zeros(3, 4, 5)


def test_options_reach_the_handler() -> None:
    keeper, sinks, slopes = Keeper(), torch.zeros(4), torch.ones(4)
    with forwarding(ForwardContext(attention=keeper)):
        output, weights = paged_attention_forward(
            nn.Identity(),
            QUERY,
            KEY,
            VALUE,
            scaling=0.5,
            sliding_window=7,
            softcap=2.0,
            s_aux=sinks,
            alibi_slopes=slopes,
        )
    assert output.shape == (1, 3, 4, 5)
    assert weights is None
    options = keeper.call.options
    assert (options.scale, options.window, options.softcap) == (0.5, 7, 2.0)
    assert options.sinks is sinks
    assert options.alibi is slopes
    assert keeper.call.has_window


def test_a_window_of_none_is_told_from_no_window() -> None:
    keeper = Keeper()
    with forwarding(ForwardContext(attention=keeper)):
        paged_attention_forward(nn.Identity(), QUERY, KEY, VALUE, scaling=1.0, sliding_window=None)
        assert keeper.call.has_window
        paged_attention_forward(nn.Identity(), QUERY, KEY, VALUE, scaling=1.0)
        assert not keeper.call.has_window


def test_scale_defaults_to_that_of_the_head_size() -> None:
    keeper = Keeper()
    with forwarding(ForwardContext(attention=keeper)):
        paged_attention_forward(nn.Identity(), QUERY, KEY, VALUE)
    assert keeper.call.options.scale == 8**-0.5


def test_biases_by_distance_are_an_option_and_others_are_for_whoever_sees_all() -> None:
    keeper, listed, whole = Keeper(), torch.ones(4, 9), torch.zeros(1, 4, 3, 3)
    with forwarding(ForwardContext(attention=keeper)):
        paged_attention_forward(nn.Identity(), QUERY, KEY, VALUE, position_bias=listed)
        assert keeper.call.options.position_bias is listed
        assert keeper.call.position_bias is None
        paged_attention_forward(nn.Identity(), QUERY, KEY, VALUE, position_bias=whole)
        assert keeper.call.options.position_bias is None
        assert keeper.call.position_bias is whole
    with pytest.raises(UnsupportedModelError, match="a custom bias to each score"):
        PagedAttention(STEP, [QUERY], [None], get_backend("torch")).answer(keeper.call)


@pytest.mark.parametrize("name", ["indices", "block_indices"])
def test_arguments_it_does_not_know_are_refused_by_name(name: str) -> None:
    unknown: dict[str, Any] = {name: torch.zeros(1)}
    with (
        forwarding(ForwardContext(attention=Keeper())),
        pytest.raises(UnsupportedModelError, match=name),
    ):
        paged_attention_forward(nn.Identity(), QUERY, KEY, VALUE, **unknown)


def test_a_call_outside_of_a_step_is_an_error() -> None:
    with pytest.raises(StepError, match="outside"):
        paged_attention_forward(nn.Identity(), QUERY, KEY, VALUE)


def test_a_context_ends_with_its_forward_pass_and_may_be_left_for_another() -> None:
    outer, inner = (ForwardContext(attention=Keeper()) for _ in range(2))
    with forwarding(outer):
        with forwarding(inner):
            assert current_context() is inner
        with forwarding(None):
            assert current_context() is None
        with pytest.raises(ZeroDivisionError), forwarding(inner):
            _ = 1 / 0
        assert current_context() is outer
    assert current_context() is None
