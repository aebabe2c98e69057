"""Norms in one launch give what the model's own give, and what is no such norm stays."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from pagedserve.models.fused.gpu.norms import GpuRMSNorm
from pagedserve.models.fused.gpu.replace import replace_for_gpu


class CenteredRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


def norm_of(kind: type[nn.Module], dtype: torch.dtype) -> Any:
    norm: Any = kind(96, eps=1e-5).to(dtype)
    nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(1))
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_norm_is_replaced_by_one_that_gives_the_same(dtype: torch.dtype) -> None:
    norm = norm_of(LlamaRMSNorm, dtype)
    model: Any = nn.Sequential(nn.Sequential(norm), nn.Linear(96, 96))
    weights = dict(model.named_parameters())
    assert replace_for_gpu(model, "modules") == "norms 1"
    assert isinstance(model[0][0], GpuRMSNorm)
    x = torch.randn(5, 7, 96, generator=torch.Generator().manual_seed(2)).to(dtype) * 30
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(model[0](x), norm(x), rtol=tolerance, atol=tolerance)
    after = dict(model.named_parameters())
    assert after.keys() == weights.keys()
    assert all(after[name] is weights[name] for name in weights)


@pytest.mark.parametrize("kind", [GemmaRMSNorm, CenteredRMSNorm])
def test_what_computes_something_else_stays(kind: type[nn.Module]) -> None:
    model = nn.Sequential(norm_of(kind, torch.float32))
    assert replace_for_gpu(model, "modules") == "none"
    assert type(model[0]) is kind
