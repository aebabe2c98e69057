"""Norms against float64, on every instruction set of this CPU."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from pagedserve import _core
from pagedserve.errors import StepError
from pagedserve.host_ops.capabilities import DTYPE_NAMES
from pagedserve.models.fused.cpu.modules import CpuRMSNorm


@pytest.mark.parametrize("instructions", _core.cpu.instruction_sets())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 16), (5, 37), (700, 64), (9, 576)])
def test_rows_are_normalised(shape: tuple[int, int], dtype: torch.dtype, instructions: Any) -> None:
    torch.manual_seed(1)
    x = (30 * torch.randn(shape)).to(dtype)
    weight = torch.randn(shape[1])
    output = torch.full((shape[0] + 1, shape[1]), 7.0, dtype=dtype)
    _core.cpu.rms_norm(
        dtype=DTYPE_NAMES[dtype],
        num_rows=shape[0],
        x=x.data_ptr(),
        output=output.data_ptr(),
        weight=weight.numpy(),
        epsilon=1e-5,
        num_threads=2,
        instructions=instructions,
    )
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    error = (output[:-1].double() - exact).abs() / (exact.abs() + 1e-3)
    assert float(error.max()) <= max(2e-6, torch.finfo(dtype).eps)
    assert (output[-1] == 7).all()


@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm])
def test_the_module_computes_what_the_models_does(kind: type) -> None:
    norm = kind(48, eps=1e-3)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 48)
    with torch.inference_mode():
        fast, turned = CpuRMSNorm(norm), x.transpose(0, 1)
        assert torch.allclose(fast(x), norm(x), atol=1e-6)
        assert torch.allclose(fast(turned), norm(turned), atol=1e-6)


def test_calls_that_do_not_fit_are_refused() -> None:
    x = torch.zeros(2, 4)
    arguments: dict[str, Any] = {
        "dtype": "float32",
        "num_rows": 2,
        "x": x.data_ptr(),
        "output": x.data_ptr(),
        "weight": np.ones(4, dtype=np.float32),
        "epsilon": 1e-5,
    }
    cases: list[tuple[dict[str, Any], str]] = [
        ({"x": 0}, "input must be the address"),
        ({"output": x.data_ptr() + 2}, "output must be the address"),
        ({"weight": np.ones(0, dtype=np.float32)}, "at least 1 weight"),
        ({"weight": np.ones(4)}, "weight must be"),
        ({"num_rows": -2}, "num_rows is -2"),
    ]
    for changes, text in cases:
        with pytest.raises(StepError, match=text):
            _core.cpu.rms_norm(**(arguments | changes))


def test_a_norm_keeps_no_part_of_the_weights_it_was_made_of() -> None:
    # Weights are views of one mapped file, which stays in memory as long as one of them lives.
    norm = LlamaRMSNorm(64)
    fast = CpuRMSNorm(norm)
    x = torch.randn(3, 64)
    before = fast(x)
    with torch.no_grad():
        norm.weight.fill_(torch.nan)
    assert torch.equal(fast(x), before)
