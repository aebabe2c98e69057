"""Whole decoder layers in one call of Rust, for the families whose layers are known."""

from typing import Any, Literal

import torch
from torch import Tensor

from pagedserve._core.cpu import DecoderLayer
from pagedserve.attention.interface import layers_of
from pagedserve.config.precision import Quantization
from pagedserve.host_ops.capabilities import DTYPE_NAMES, cache_dtype_of
from pagedserve.models.forward import current_step
from pagedserve.models.fused.cpu.modules import CpuRMSNorm, adapter_arrays, packable_gate_of
from pagedserve.models.fused.cpu.packing import can_pack, float32_vector, pack, pack_gated
from pagedserve.models.fused.modules import FusedModule, layer_parts
from pagedserve.models.fused.recognize import (
    attention_linears,
    family_of_layer,
    gate_of,
    layer_norms,
    norm_epsilon,
    norm_factor,
)
from pagedserve.parallel.modules import group_of, own_linear
from pagedserve.parallel.shards import peaks_of


def can_fuse(layer: Any) -> bool:
    """Whether a module is a decoder layer of a known family, with packable parts."""
    if family_of_layer(layer) is None or packable_gate_of(layer.mlp) is None:
        return False
    attention = layer.self_attn
    linears = attention_linears(attention)
    return (
        linears is not None
        and all(can_pack(linear.weight) for linear in linears)
        and (attention.head_dim * attention.q_proj.weight.element_size() % 4 == 0)
    )


class CpuDecoderLayer(FusedModule):
    """A decoder layer that attends over the KV pool of the step in progress.

    Hidden states are modified in place.
    """

    def __init__(self, layer: Any, quantization: Quantization | None = None) -> None:
        """Pack the weights of a layer that `can_fuse` accepts."""
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        family, gate = family_of_layer(layer), gate_of(mlp)
        if family is None or gate is None:
            raise TypeError(f"{type(layer).__name__} is no decoder layer of a known family")
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        output, down = own_linear(attention.o_proj), own_linear(mlp.down_proj)
        self._group = group_of(attention.o_proj)
        self._layers = layers_of(attention)
        has_bias = qkv[0].bias is not None
        self._head_size = int(attention.head_dim)
        self._rotates = bool(getattr(attention, "use_rope", True))
        self.packed = (
            pack(
                torch.cat([linear.weight for linear in qkv]),
                torch.cat([linear.bias for linear in qkv]) if has_bias else None,
                quantization=quantization,
            ),
            pack(output.weight, output.bias, quantization=quantization, peaks=peaks_of(output)),
            pack_gated(mlp.gate_proj.weight, mlp.up_proj.weight, gate, quantization),
            pack(down.weight, down.bias, quantization=quantization, peaks=peaks_of(down)),
        )
        self.parts = layer_parts(layer, *self.packed)
        norms = layer_norms(layer, family)
        # Sums over ranks are normalized outside of the Rust layer.
        self._output_norms = [
            CpuRMSNorm(norms[part]) if part in norms else None
            for part in ("attention_output_norm", "mlp_output_norm")
        ]
        weights: dict[str, Any] = {
            part: float32_vector(norm_factor(norm)) for part, norm in norms.items()
        }
        weights |= zip(("qkv", "output", "gate_up", "down"), self.packed, strict=True)
        self._layer = DecoderLayer(
            dtype=DTYPE_NAMES[qkv[0].weight.dtype],
            num_heads=attention.q_proj.out_features // self._head_size,
            num_kv_heads=attention.k_proj.out_features // self._head_size,
            head_size=self._head_size,
            epsilon=norm_epsilon(norms["attention_norm"]),
            scale=float(attention.scaling),
            softcap=getattr(attention, "attn_logit_softcapping", None),
            **weights,
        )

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        **_: object,
    ) -> Tensor:
        """Run the layer: hidden states ``[1, T, F]``; cosines and sines ``[1, T, rotary size]``."""
        pool, window, metadata = current_step().attend_next(self._layers)
        layout = metadata.layout
        cosines, sines = (angles.contiguous() for angles in position_embeddings)
        hidden_states = hidden_states.contiguous()
        step = (
            hidden_states.data_ptr(),
            cosines.data_ptr(),
            sines.data_ptr(),
            cosines.shape[-1] if self._rotates else 0,
            pool.data_ptr(),
            pool.shape[0],
            pool.shape[1],
            layout.block_tables.reshape(-1),
            layout.query_start,
            layout.seq_lens,
            metadata.slot_mapping.numpy(),
            window,
            adapter_arrays(),
        )
        cache_dtype, num_threads = cache_dtype_of(pool), torch.get_num_threads()
        if self._group is None:
            self._layer.forward(*step, cache_dtype=cache_dtype, num_threads=num_threads)
            return hidden_states
        sums = torch.empty_like(hidden_states)
        parts: tuple[Literal["attention", "mlp"], ...] = ("attention", "mlp")
        for part, norm in zip(parts, self._output_norms, strict=True):
            address = sums.data_ptr()
            self._layer.forward(
                *step, part=part, sums=address, cache_dtype=cache_dtype, num_threads=num_threads
            )
            self._group.all_reduce(sums)
            hidden_states.add_(sums if norm is None else norm(sums))
        return hidden_states
