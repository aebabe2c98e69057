"""The Rust kernels that sample, against the operations of torch that GPUs use, and float64."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from pagedserve._core import cpu
from pagedserve.errors import StepError
from pagedserve.sampling.gpu_draw import RandomRows, draw_on_device
from pagedserve.sampling.on_gpu import unpack_masks
from pagedserve.sampling.on_host import HOST
from pagedserve.sampling.rows import RowSampling
from pagedserve.sampling.sampler import top_logprobs

SIZES = (1, 2, 31, 64, 65, 700, 5000)
samplings = st.builds(
    RowSampling,
    temperature=st.sampled_from([1e-5, 0.3, 1.0, 2.5, 1e5]),
    top_k=st.sampled_from([-1, 2, 3, 50, 1000]),
    top_p=st.sampled_from([1e-9, 0.113, 0.5117, 0.913, 1.0]),
    min_p=st.sampled_from([0.0, 0.0123, 0.317, 1.0]),
    uniforms=st.lists(st.floats(1e-6, 1, exclude_max=True), min_size=1, max_size=3).map(tuple),
)


@pytest.fixture(params=cpu.instruction_sets())
def instructions(request: pytest.FixtureRequest) -> Any:
    return request.param


def random_logits(num_rows: int, vocab_size: int, seed: int, spread: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * spread
    logits[:, ::7] = logits[:, :1].clone()  # equal ones
    logits[:, 3::11] = -torch.inf
    return logits


def drawn_by_torch(
    logits: Tensor,
    rows: list[RowSampling],
    peaks: NDArray[np.float32],
    masks: NDArray[np.int32] | None = None,
) -> list[int]:
    parameters = RandomRows.of(rows, vocab_size=logits.shape[1])
    allowed = None
    if masks is not None:
        allowed = unpack_masks(torch.from_numpy(masks), logits.shape[1])
    tokens: list[int] = draw_on_device(
        logits, parameters, torch.from_numpy(peaks), allowed
    ).tolist()
    return tokens


@settings(max_examples=300)
@given(
    rows=st.lists(samplings, min_size=1, max_size=6),
    vocab_size=st.sampled_from(SIZES),
    spread=st.sampled_from([0.0, 1e-4, 1.0, 30.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_tokens_are_those_of_torch(
    rows: list[RowSampling], vocab_size: int, spread: float, seed: int
) -> None:
    logits = random_logits(len(rows), vocab_size, seed, spread)
    peaks, _ = HOST.argmax(logits.numpy())
    found = HOST.draw(logits.numpy(), rows, np.arange(len(rows)), peaks)
    assert found.tolist() == drawn_by_torch(logits, rows, peaks)


@settings(max_examples=200)
@given(
    share=st.sampled_from([0.0, 0.01, 0.5, 0.99]),
    vocab_size=st.sampled_from(SIZES),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_tokens_of_masks_are_those_of_torch(share: float, vocab_size: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    allowed = generator.random((5, -(-vocab_size // 32) * 32)) < share
    allowed[:, 0] = True
    masks = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    logits = random_logits(5, vocab_size, seed)
    rows = [RowSampling(uniforms=(float(generator.random()),)) for _ in range(5)]
    peaks, _ = HOST.argmax(logits.numpy(), masks)
    index = np.array([0, 1, 3])
    some = [rows[row] for row in index]
    found = HOST.draw(logits.numpy(), some, index, peaks[index], masks[index]).tolist()
    everything = drawn_by_torch(logits, rows, peaks, masks)
    assert found == [everything[row] for row in index]
    assert all(allowed[row, token] for row, token in zip(index, found, strict=True))


def kernel_arguments(logits: Tensor, rows: list[RowSampling]) -> dict[str, Any]:
    """Arguments of the kernel for rows without filters, of one token each."""
    parameters = [(row.temperature, logits.shape[1], row.top_p, row.min_p) for row in rows]
    return {
        "logits": logits.data_ptr(),
        "vocab_size": logits.shape[1],
        "peaks": logits.amax(dim=1).numpy(),
        "parameters": np.array(parameters, np.float64).reshape(-1),
        "uniforms": np.array([row.uniforms[0] for row in rows]),
        "starts": list(range(len(rows) + 1)),
        "tokens": np.zeros(len(rows), np.int32),
    }


def test_the_tokens_do_not_depend_on_instructions_or_threads(instructions: Any) -> None:
    logits = random_logits(40, 5000, seed=1)
    rows = [RowSampling(uniforms=(row / 40,), top_p=(1.0, 0.9)[row % 2]) for row in range(40)]
    found: list[NDArray[np.int32]] = []
    for name, num_threads in (("portable", 1), (instructions, 1), (instructions, 3)):
        given = kernel_arguments(logits, rows)
        cpu.draw(**given | {"num_threads": num_threads, "instructions": name})
        found.append(given["tokens"])
    assert (found[0] == found[1]).all()
    assert (found[0] == found[2]).all()


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("peaks", np.zeros(2, np.float32), "parameters must have 2 entries; got 3"),
        ("parameters", np.zeros(12), "top_k must be at least 1; got 0"),
        ("uniforms", np.zeros(2), "uniforms must have 3 entries; got 2"),
        ("starts", [0, 2, 1, 3], "starts must ascend from 0 to the number of tokens"),
        ("starts", [0, 1, 2], "starts must have 4 entries; got 3"),
        ("rows", [0, 1], "rows must have 3 entries; got 2"),
        ("masks", np.zeros(3, np.int32), "masks must have 6 entries; got 3"),
        ("vocab_size", 0, "vocab_size must be 1 to"),
        ("logits", 0, "logits must be the address"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(name: str, value: Any, reason: str) -> None:
    logits = random_logits(3, 40, seed=1)
    given = kernel_arguments(logits, [RowSampling(uniforms=(0.5,))] * 3)
    with pytest.raises(StepError, match=reason):
        cpu.draw(**given | {name: value})


def test_rows_that_cannot_be_sampled_end_nothing() -> None:
    logits = random_logits(4, 700, seed=1)
    logits[0] = -torch.inf
    logits[1, 5] = torch.nan
    logits[2, 5] = torch.inf
    row = RowSampling(uniforms=(0.5,))
    for more in ({}, {"top_k": 3}, {"top_p": 0.5}):
        rows = [replace(row, **more)] * 4
        peaks, _ = HOST.argmax(logits.numpy())
        found = HOST.draw(logits.numpy(), rows, np.arange(4), peaks).tolist()
        assert found[3] == drawn_by_torch(logits[3:], rows[3:], peaks[3:])[0]
        assert all(0 <= token < 700 for token in found)


@pytest.mark.parametrize("vocab_size", [1, 31, 700, 49_152])
def test_logprobs_are_those_of_float64(vocab_size: int, instructions: Any) -> None:
    logits = random_logits(9, vocab_size, seed=2)
    targets = torch.arange(9) * 491 % vocab_size
    before = cpu.instructions_in_use()
    cpu.use_instructions(instructions)
    try:
        found = top_logprobs(logits.numpy(), targets.numpy(), 3)
    finally:
        cpu.use_instructions(before)
    exact = logits.double().log_softmax(dim=-1)
    wanted = exact.gather(1, targets[:, None])
    assert np.allclose(found.logprobs, wanted[:, 0], atol=2e-6, rtol=0)
    assert found.ranks.tolist() == (1 + (exact > wanted).sum(dim=-1)).tolist()
    num_top = min(3, vocab_size)
    assert np.allclose(found.top_logprobs, exact.topk(num_top).values, atol=2e-6, rtol=0)
