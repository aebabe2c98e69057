"""Whole decoder layers in nine launches, for the families whose layers are known.

transformers computes such a layer with 39 launches.  Most of them move a few KiB in a decode step
and take as long as a launch does.  Here everything between two products is one kernel, products of
the same rows are fused, and the down projection accumulates into the residual stream.  If the keys
of few rows are split, attention takes one launch more.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pagedserve.attention.interface import layers_of
from pagedserve.attention.metadata import AttentionOptions
from pagedserve.attention.triton import attend
from pagedserve.kernels.cache import write_cache
from pagedserve.kernels.layer import add_norm, rotate_and_write, swiglu
from pagedserve.kernels.pools import pool_parts
from pagedserve.models.forward import current_adapters, current_step
from pagedserve.models.fused.gpu.norms import GpuRMSNorm
from pagedserve.models.fused.modules import FusedModule, layer_parts
from pagedserve.models.fused.recognize import (
    attention_linears,
    family_of_layer,
    gate_of,
    is_norm,
    layer_norms,
    norm_epsilon,
)
from pagedserve.parallel.modules import Reduced, own_linear


def can_fuse(layer: Any) -> bool:
    """Whether a module is a decoder layer of a known family, with supported parts."""
    family = family_of_layer(layer)
    if family is None or family.has_output_norms or gate_of(layer.mlp) != "silu":
        return False
    linears = attention_linears(layer.self_attn)
    if linears is None or own_linear(layer.mlp.down_proj).bias is not None:
        return False
    has_biases = {linear.bias is not None for linear in linears[:3]}
    norms = layer_norms(layer, family).values()
    return len(has_biases) == 1 and all(is_norm(norm) for norm in norms)


class GpuDecoderLayer(FusedModule):
    """A decoder layer that attends over the KV pool of the step in progress.

    Hidden states are modified in place.
    """

    def __init__(self, layer: Any) -> None:
        """Take the weights of a layer that `can_fuse` accepts; stacked ones are copies."""
        super().__init__()
        attention, mlp, family = layer.self_attn, layer.mlp, family_of_layer(layer)
        self._layers = layers_of(attention)
        if family is None:
            raise TypeError(f"{type(layer).__name__} is no decoder layer of a known family")
        norms = layer_norms(layer, family)
        self.attention_norm = GpuRMSNorm(norms["attention_norm"])
        self.qkv = _stacked(attention.q_proj, attention.k_proj, attention.v_proj)
        self.output = attention.o_proj
        self.mlp_norm = GpuRMSNorm(norms["mlp_norm"])
        self.gate_up = _stacked(mlp.gate_proj, mlp.up_proj)
        self.down = mlp.down_proj
        self.parts = layer_parts(layer, self.qkv, self.output, self.gate_up, self.down)
        query_norm, key_norm = norms.get("query_norm"), norms.get("key_norm")
        self.query_norm: Tensor | None = getattr(query_norm, "weight", None)
        self.key_norm: Tensor | None = getattr(key_norm, "weight", None)
        self._head_epsilon = norm_epsilon(query_norm) if query_norm else 0.0
        self._head_size = int(attention.head_dim)
        self._scale = float(attention.scaling)
        self._rotates = bool(getattr(attention, "use_rope", True))

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        **_: object,
    ) -> Tensor:
        """Run the layer: hidden states ``[1, T, F]``; cosines and sines ``[1, T, rotary size]``."""
        pool, window, metadata = current_step().attend_next(self._layers)
        hidden = hidden_states.contiguous().flatten(0, 1)
        query = self._rotate_and_write(
            self.qkv(self.attention_norm(hidden)),
            position_embeddings,
            pool,
            metadata.slot_mapping,
        )
        attended = attend(
            query,
            pool,
            metadata=metadata,
            options=AttentionOptions(scale=self._scale, window=window),
        )
        norm = self.mlp_norm
        rows = add_norm(self.output(attended.flatten(1)), hidden, norm.weight, norm.epsilon)
        inner = swiglu(self.gate_up(rows))
        if current_adapters() is None and not isinstance(self.down, Reduced):
            hidden.addmm_(inner, self.down.weight.t())
        else:
            hidden.add_(self.down(inner))  # its hook adds adapters, or it is summed over ranks
        return hidden.unsqueeze(0)

    def _rotate_and_write(
        self,
        qkv: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        pool: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        """Rotate queries and keys, write keys and values; return the queries ``[T, H, D]``."""
        cosines, sines = (angles.contiguous().flatten(0, 1) for angles in position_embeddings)
        if not self._rotates:
            cosines, sines = cosines[:, :0], sines[:, :0]
        rotate = partial(
            rotate_and_write,
            qkv,
            cosines,
            sines,
            query_norm=self.query_norm,
            key_norm=self.key_norm,
            epsilon=self._head_epsilon,
        )
        parts, num_tokens = pool_parts(pool, self._head_size), len(qkv)
        if parts.scales is None:
            return rotate(parts.keys, parts.values, slot_mapping)
        # The scale of a row needs all of it: rotated rows are written to a block per token first.
        keys, values = qkv.new_empty(2, num_tokens, 1, pool.shape[2], self._head_size)
        query = rotate(keys, values, torch.arange(num_tokens, device=qkv.device))
        write_cache(
            keys[:, 0],
            values[:, 0],
            parts.keys,
            parts.values,
            slot_mapping,
            cache_scales=parts.scales,
        )
        return query


def _stacked(*linears: nn.Linear) -> nn.Linear:
    """Stack the features of several layers, all or none of which have a bias."""
    first, num_features = linears[0], sum(linear.out_features for linear in linears)
    has_bias = first.bias is not None
    stacked = nn.Linear(first.in_features, num_features, has_bias, device="meta")
    weights = [linear.weight.detach() for linear in linears]
    stacked.weight = nn.Parameter(torch.cat(weights), requires_grad=False)
    if has_bias:
        biases = [linear.bias.detach() for linear in linears]
        stacked.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return stacked
