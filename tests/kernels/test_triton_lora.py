"""Triton's kernels of adapters against the reference in float64, over poisoned memory."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagedserve.kernels import reference
from tests.support.examples import examples

pytest.importorskip("triton", reason="triton is not installed")

from pagedserve.kernels import lora
from pagedserve.kernels.lora import add_adapters, add_embedding_adapters

# The interpreter rounds to bfloat16 towards zero.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = [torch.float32, torch.float16, *([] if INTERPRETED else [torch.bfloat16])]
NUM_TOKENS = 50


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not written shows: new tensors hold NaN."""

    def new_empty(self: Tensor, *shape: int, **options: Any) -> Tensor:
        dtype = options.pop("dtype", self.dtype)
        poison = torch.nan if dtype.is_floating_point else -1
        options.setdefault("device", self.device)
        return torch.full(shape, poison, dtype=dtype, **options)

    monkeypatch.setattr(Tensor, "new_empty", new_empty)


@dataclass(frozen=True, kw_only=True)
class Case:
    dtype: torch.dtype
    # Of each row, -1 for none.
    slots: list[int]
    depth: int
    # Of the layers that lie side by side.
    features: list[int]
    max_rank: int
    # Shares of the largest rank, of each slot and layer in turn.
    ranks: list[float]
    num_slots: int


CASES = st.builds(
    Case,
    dtype=st.sampled_from(DTYPES),
    slots=st.lists(st.integers(-1, 4), max_size=40)
    | st.sampled_from([[3] * 20, [-1] * 5, [0, 1, 2, 3, 4] * 60]),
    depth=st.sampled_from([1, 16, 100, 576, 1030]),
    features=st.lists(st.sampled_from([1, 16, 96, 130]), min_size=1, max_size=3),
    max_rank=st.sampled_from([1, 8, 16, 20, 64, 100]),
    ranks=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=4, max_size=4),
    num_slots=st.sampled_from([5, 8]),
)
quick = settings(
    max_examples=examples(12, all_of_them=50),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


class Tensors:
    """What a case gives: numbers where something is to be read, elsewhere NaN."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(len(case.slots) + case.depth)
        self.slots = torch.tensor(case.slots, dtype=torch.int32)
        order = self.slots.argsort(stable=True)[int((self.slots < 0).sum()) :].int()
        # What lies past the last start is no row.
        self.order = torch.full_like(self.slots, 1 << 30)
        self.order[: len(order)] = order
        bounds = torch.arange(case.num_slots + 1, dtype=torch.int32)
        self.starts = torch.searchsorted(self.slots[order.long()], bounds).int()
        num_slices = len(case.features)
        shares = torch.tensor(case.ranks).repeat(10)[: case.num_slots * num_slices]
        self.ranks = (shares * case.max_rank).int().view(case.num_slots, num_slices)
        self.features = torch.tensor([0, *case.features]).cumsum(0).int()
        self.b = torch.zeros(case.num_slots, sum(case.features), case.max_rank)
        for slot in range(case.num_slots):
            for piece, rank in enumerate(self.ranks[slot].tolist()):
                begin, end = self.features[piece : piece + 2].tolist()
                self.b[slot, begin:end, :rank] = torch.randn(end - begin, rank) / max(rank, 1)
        self.b = self.b.to(case.dtype)
        self.output = torch.randn(len(case.slots), sum(case.features)).to(case.dtype)


def assert_same(
    ours: Callable[..., None],
    exact: Callable[..., None],
    device: torch.device,
    output: Tensor,
    given: dict[str, Tensor],
) -> None:
    found, expected = output.clone().to(device), output.double()
    ours(found, **{name: tensor.to(device) for name, tensor in given.items()})
    exact(
        expected,
        **{name: t.double() if t.is_floating_point() else t for name, t in given.items()},
    )
    # Hidden numbers are rounded too where products are those of halves.
    eps = max(2 * torch.finfo(output.dtype).eps, 4e-6)
    scale = 1.0 + float(expected.abs().max()) if expected.numel() else 1.0
    torch.testing.assert_close(found.cpu().double(), expected, rtol=0, atol=eps * scale)


@quick
@given(CASES)
def test_rows_get_what_their_adapters_give(device: torch.device, case: Case) -> None:
    made = Tensors(case)
    a = torch.randn(case.num_slots, len(case.features), case.max_rank, case.depth)
    is_beyond = torch.arange(case.max_rank) >= made.ranks[:, :, None]
    a = a.masked_fill(is_beyond[..., None], torch.nan).to(case.dtype)
    x = torch.randn(len(case.slots), case.depth).to(case.dtype)
    given = {"x": x, "a": a, "b": made.b, "ranks": made.ranks, "features": made.features}
    given |= {"starts": made.starts, "order": made.order}
    assert_same(add_adapters, reference.add_adapters, device, made.output, given)


@quick
@given(CASES)
def test_tokens_get_what_their_adapters_give(device: torch.device, case: Case) -> None:
    made = Tensors(replace(case, features=case.features[:1]))
    table = torch.randn(case.num_slots, NUM_TOKENS, case.max_rank).to(case.dtype)
    ids = torch.randint(NUM_TOKENS, (len(case.slots),), dtype=torch.int32)
    given = {"ids": ids, "table": table, "b": made.b, "ranks": made.ranks}
    given |= {"features": made.features, "starts": made.starts, "order": made.order}
    exact = reference.add_embedding_adapters
    assert_same(add_embedding_adapters, exact, device, made.output, given)


def launch(case: Case, device: torch.device, rows: slice = slice(None)) -> Tensor:
    """The output of some rows of a case."""
    made = Tensors(replace(case, slots=case.slots[rows]))
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(
        case.num_slots, len(case.features), case.max_rank, case.depth, generator=generator
    )
    x = torch.randn(len(case.slots), case.depth, generator=generator)[rows]
    torch.manual_seed(1)
    made.b = torch.where(made.b == 0, 0.0, torch.randn(made.b.shape))
    output = torch.zeros(made.output.shape, device=device)
    given = (x, a, made.b, made.ranks, made.features, made.starts, made.order)
    add_adapters(output, *(tensor.to(device) for tensor in given))
    return output.cpu()


WIDE = Case(
    dtype=torch.float32,
    slots=[0, -1, 2, 2, 1, 0, -1, 2] * 5,
    depth=2100,
    features=[40, 8],
    max_rank=12,
    ranks=[1.0, 1.0, 0.5, 0.0],
    num_slots=4,
)


def test_a_split_depth_gives_the_same_every_time(device: torch.device) -> None:
    first = launch(WIDE, device)
    assert all(launch(WIDE, device).equal(first) for _ in range(3))
    # A row's sums do not depend on where in a tile it lies, but for their rounding: fewer rows are
    # summed in more parts.
    few = launch(WIDE, device, slice(16, 40))
    atol = 4e-6 * float(first.abs().max())
    torch.testing.assert_close(few, first[16:40], rtol=0, atol=atol)


def test_the_depth_is_split_where_rows_are_few(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, ...]] = []
    expand = lora._expand

    def noting(output: Tensor, hidden: Tensor, *given: Any) -> None:
        shapes.append(tuple(hidden.shape))
        expand(output, hidden, *given)

    monkeypatch.setattr(lora, "_expand", noting)
    launch(WIDE, device, slice(1))
    assert shapes[0][0] > 1


def test_every_kernel_has_the_signature_of_its_reference() -> None:
    for ours in (add_adapters, add_embedding_adapters):
        assert signature(ours) == signature(getattr(reference, ours.__name__))


def test_what_would_be_read_wrongly_is_named(device: torch.device) -> None:
    def tensors(**changes: Tensor) -> dict[str, Tensor]:
        given = {
            "output": torch.zeros(3, 8),
            "x": torch.zeros(3, 4),
            "a": torch.zeros(2, 1, 5, 4),
            "b": torch.zeros(2, 8, 5),
            "ranks": torch.zeros(2, 1, dtype=torch.int32),
            "features": torch.tensor([0, 8], dtype=torch.int32),
            "starts": torch.zeros(3, dtype=torch.int32),
            "order": torch.zeros(3, dtype=torch.int32),
        }
        return {name: tensor.to(device) for name, tensor in (given | changes).items()}

    add_adapters(**tensors())
    for wrong, said in (
        ({"x": torch.zeros(4, 3).t()}, "x must be contiguous"),
        ({"b": torch.zeros(2, 5, 8).transpose(1, 2)}, "b must be contiguous"),
        ({"output": torch.zeros(2, 8)}, r"output \[2, 8\] must have a row for each of 3"),
        ({"starts": torch.zeros(2, dtype=torch.int32)}, r"starts \[2\] one more than b"),
        ({"a": torch.zeros(2, 1, 5, 3)}, r"a \[2, 1, 5, 3\] .* change no rows of 4"),
    ):
        with pytest.raises(ValueError, match=said):
            add_adapters(**tensors(**wrong))
