"""Comparison of a module with its replacement, on the same random rows."""

from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn

from pagedserve.attention.backend import AttentionBackend
from pagedserve.attention.interface import PagedAttention, layers_of
from pagedserve.attention.metadata import AttentionMetadata, BatchLayout
from pagedserve.models.forward import ForwardContext, forwarding

_NUM_TOKENS: Final = 5
_BLOCK_SIZE: Final = 16


def layers_agree(layer: Any, fused: nn.Module, backend: AttentionBackend) -> bool:
    """Whether two decoder layers differ by rounding only; both attend over a pool of one block.

    Args:
        layer: layer of a known family, with its original modules.
        fused: its replacement.
        backend: attention backend of ``layer``.
    """
    attention = layer.self_attn
    weight, head_size = attention.q_proj.weight, attention.head_dim
    num_features = attention.q_proj.in_features
    hidden = random_numbers(1, _NUM_TOKENS, num_features).to(weight.device, weight.dtype)
    angles = random_numbers(1, _NUM_TOKENS, head_size // 2).repeat(1, 1, 2)
    cosines = angles.cos().to(weight.device, weight.dtype)
    sines = angles.sin().to(weight.device, weight.dtype)
    pool = hidden.new_zeros(
        1, _BLOCK_SIZE, attention.k_proj.out_features // head_size, 2 * head_size
    )
    num_layers = 1 + max(layers_of(attention))  # only the last of these attends

    def run(module: nn.Module) -> Tensor:
        step = _metadata(weight.device)
        attend = PagedAttention(step, [pool] * num_layers, [None] * num_layers, backend)
        with forwarding(ForwardContext(attention=attend)):
            output = module(
                hidden.clone(), attention_mask=None, position_embeddings=(cosines, sines)
            )
        return cast(Tensor, output[0] if isinstance(output, tuple) else output)

    return is_close(run(fused), run(layer), num_terms=num_features, num_parts=4)


def random_numbers(*shape: int) -> Tensor:
    """Normal random numbers, the same every time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def is_close(found: Tensor, expected: Tensor, *, num_terms: int, num_parts: int) -> bool:
    """Whether results differ by rounding only: of float32 sums, and of each part's output."""
    error = torch.finfo(torch.float32).eps * num_terms**0.5
    if expected.dtype != torch.float32:
        error += torch.finfo(expected.dtype).eps
    largest = float(expected.float().abs().max())
    difference = float((found.float() - expected.float()).abs().max())
    return bool(difference <= 4 * num_parts * error * max(largest, 1e-3))


def _metadata(device: torch.device) -> AttentionMetadata:
    layout = BatchLayout(
        query_start=np.array([0, _NUM_TOKENS], dtype=np.int32),
        seq_lens=np.array([_NUM_TOKENS], dtype=np.int32),
        block_tables=np.zeros((1, 1), dtype=np.int32),
        block_size=_BLOCK_SIZE,
    )
    return AttentionMetadata(layout, torch.arange(_NUM_TOKENS, device=device))
