"""Whole decoder layers in nine launches, for the families whose layers are built alike.

transformers writes such a layer as 39, of which most move a few KiB in a decode step: each takes as
long as a launch does.  Here what stands between two products is one kernel, products of the same
rows are one, and the second residual sum is made by the product it belongs to.  Where the keys of
few rows are split, attention takes one more.
"""

from typing import Any

import torch
from torch import Tensor, nn

from pagedserve.attention.interface import current_step
from pagedserve.attention.paged import AttentionOptions
from pagedserve.attention.triton import attend
from pagedserve.gpu.norms import FusedNorm
from pagedserve.kernels.layer import add_norm, rotate_and_write, swiglu
from pagedserve.layers.families import attention_linears, gate_of, is_norm, norm_epsilon, norm_names


def can_fuse(layer: Any) -> bool:
    """Whether a module is a decoder layer of a known family, with parts that kernels compute."""
    names = norm_names(layer)
    if names is None or names.attention_output or gate_of(layer.mlp) != "silu":
        return False
    linears = attention_linears(layer.self_attn)
    if linears is None or layer.mlp.down_proj.bias is not None:
        return False
    has_biases = {one.bias is not None for one in linears[:3]}
    norms = [getattr(layer, names.attention), getattr(layer, names.mlp), *_head_norms(layer)]
    return len(has_biases) == 1 and all(is_norm(norm) for norm in norms)


class FusedLayer(nn.Module):
    """Computes what a decoder layer computes, over the KV pool of the step in progress.

    Hidden states are changed in place.
    """

    def __init__(self, layer: Any) -> None:
        """Take the weights of a layer that `can_fuse`; those of the stacked products are copied."""
        super().__init__()
        attention, mlp, names = layer.self_attn, layer.mlp, norm_names(layer)
        if names is None:
            raise TypeError(f"{type(layer).__name__} is no decoder layer of a known family")
        self.attention_norm = FusedNorm(getattr(layer, names.attention))
        self.qkv = _stacked(attention.q_proj, attention.k_proj, attention.v_proj)
        self.output = attention.o_proj
        self.mlp_norm = FusedNorm(getattr(layer, names.mlp))
        self.gate_up = _stacked(mlp.gate_proj, mlp.up_proj)
        self.down = mlp.down_proj
        norms = _head_norms(layer)
        self.query_norm: Tensor | None
        self.key_norm: Tensor | None
        self.query_norm, self.key_norm = (norm.weight for norm in norms) if norms else (None, None)
        self._head_epsilon = norm_epsilon(norms[0]) if norms else 0.0
        self._head_size = int(attention.head_dim)
        self._scale = float(attention.scaling)
        self._rotates = bool(getattr(attention, "use_rope", True))

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        **_: object,
    ) -> Tensor:
        """Hidden states ``[1, T, F]``; cosines and sines ``[1, T, rotary size]``."""
        step = current_step()
        pool, window = step.next_layer()
        hidden = hidden_states.contiguous().flatten(0, 1)
        query = self._rotate_and_write(
            self.qkv(self.attention_norm(hidden)),
            position_embeddings,
            pool,
            step.metadata.slot_mapping,
        )
        attended = attend(
            query,
            pool,
            metadata=step.metadata,
            options=AttentionOptions(scale=self._scale, window=window),
        )
        norm = self.mlp_norm
        rows = add_norm(self.output(attended.flatten(1)), hidden, norm.weight, norm.epsilon)
        hidden.addmm_(swiglu(self.gate_up(rows)), self.down.weight.t())
        return hidden.unsqueeze(0)

    def _rotate_and_write(
        self,
        qkv: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        pool: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        """The queries ``[T, H, D]``."""
        angles = (one.contiguous().flatten(0, 1) for one in position_embeddings)
        cosines, sines = angles if self._rotates else (one[:, :0] for one in angles)
        return rotate_and_write(
            qkv,
            cosines,
            sines,
            pool[..., : self._head_size],
            pool[..., self._head_size :],
            slot_mapping,
            query_norm=self.query_norm,
            key_norm=self.key_norm,
            epsilon=self._head_epsilon,
        )


def _head_norms(layer: Any) -> list[Any]:
    """The norms of queries and of keys, where a family has them."""
    norms = [getattr(layer.self_attn, name, None) for name in ("q_norm", "k_norm")]
    return [norm for norm in norms if norm is not None]


def _stacked(*linears: nn.Linear) -> nn.Linear:
    """One layer with the features of several, all or none of which have a bias."""
    first, num_features = linears[0], sum(one.out_features for one in linears)
    has_bias = first.bias is not None
    stacked = nn.Linear(first.in_features, num_features, has_bias, device="meta")
    weights = [one.weight.detach() for one in linears]
    stacked.weight = nn.Parameter(torch.cat(weights), requires_grad=False)
    if has_bias:
        biases = [one.bias.detach() for one in linears]
        stacked.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return stacked
