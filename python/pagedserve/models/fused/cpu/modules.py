"""Modules that compute in Rust on the CPU: linear layers, embeddings, gated MLPs and norms."""

from functools import cached_property
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pagedserve._core.cpu import PackedWeights, rms_norm
from pagedserve.config.precision import Quantization
from pagedserve.errors import StepError
from pagedserve.host_ops.capabilities import DTYPE_NAMES
from pagedserve.models.adapter_groups import AdapterArrays
from pagedserve.models.families.record import Gate
from pagedserve.models.forward import current_adapters
from pagedserve.models.fused.cpu.packing import (
    PANEL_FEATURES,
    can_pack,
    float32_vector,
    pack,
    pack_gated,
)
from pagedserve.models.fused.modules import FusedModule, mlp_parts
from pagedserve.models.fused.parts import parts_of
from pagedserve.models.fused.recognize import gate_of, mlp_linears, norm_epsilon, norm_factor
from pagedserve.parallel.modules import group_of, own_linear
from pagedserve.parallel.shards import peaks_of

# Rows of an input begin at multiples of this.
_UNIT_BYTES: Final = 4


def multiply(
    x: Tensor, weights: PackedWeights, output: Tensor, weight_dtype: torch.dtype
) -> Tensor:
    """Multiply rows ``[T, K]`` by packed weights into ``[T, N]``, which may have another dtype.

    Adds the adapters of the forward pass in progress that are stored with the weights.

    Raises:
        StepError: The rows are of another dtype than ``weight_dtype``, which was packed.
    """
    if x.dtype != weight_dtype:
        raise StepError(f"the input is of {x.dtype}; this layer's weights are of {weight_dtype}")
    stride, unit = x.stride(0), _UNIT_BYTES // x.element_size()
    is_apart = stride >= x.shape[1] and stride % unit == 0 and x.data_ptr() % _UNIT_BYTES == 0
    if x.stride(1) != 1 or not is_apart:
        x = x.clone(memory_format=torch.contiguous_format)
    weights.multiply(
        num_rows=x.shape[0],
        x=x.data_ptr(),
        x_stride=x.stride(0),
        output=output.data_ptr(),
        output_stride=output.stride(0),
        output_dtype=DTYPE_NAMES[output.dtype],
        adapters=adapter_arrays(),
        num_threads=torch.get_num_threads(),
    )
    return output


def adapter_arrays() -> AdapterArrays | None:
    """Tokens with adapters in the forward pass in progress, for Rust."""
    step = current_adapters()
    return None if step is None else step.tokens.arrays


def gather(weights: PackedWeights, features: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights ``[T, K]`` of features int32 ``[T]``, in the dtype that was packed."""
    rows = torch.empty(len(features), weights.in_features, dtype=dtype)
    weights.gather(features.numpy(), rows.data_ptr(), torch.get_num_threads())
    return rows


def unpack(weights: PackedWeights, dtype: torch.dtype) -> Tensor:
    """Unpack all weights ``[N, K]`` to their dtype; int8 ones are rounded."""
    return gather(weights, torch.arange(weights.out_features, dtype=torch.int32), dtype)


class UnpackedWeights(Tensor):
    """Weights ``[N, K]`` that are unpacked when an operation reads them, and kept from then on.

    Routers read them; other modules look at their dtype or device, which unpacks nothing.
    """

    _packed: PackedWeights

    @staticmethod
    def __new__(cls, weights: PackedWeights, dtype: torch.dtype) -> Self:
        """Make a tensor without storage; ``dtype`` was packed."""
        shape = weights.out_features, weights.in_features
        made: Self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)  # noqa: SLF001  # public
        made._packed = weights
        return made

    @cached_property
    def unpacked(self) -> Tensor:
        """The weights in memory."""
        return unpack(self._packed, self.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a static function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on the weights in memory."""
        given = tree_map_only(cls, lambda weights: weights.unpacked, (args, kwargs or {}))
        return func(*given[0], **given[1])


class PackedLinear(FusedModule):
    """An ``nn.Linear`` with packed weights."""

    def __init__(
        self,
        linear: nn.Linear,
        output_dtype: torch.dtype | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        """Pack a copy of the weights of ``linear``.

        Args:
            linear: the layer.
            output_dtype: dtype of the output; None is that of the weights.
            quantization: see `pack`.
        """
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.output_dtype = output_dtype or linear.weight.dtype
        peaks = peaks_of(linear)
        self.packed = (pack(linear.weight, linear.bias, quantization=quantization, peaks=peaks),)
        self.parts = parts_of(self.packed[0], {"": linear})
        self._weight_dtype = linear.weight.dtype

    @cached_property
    def weight(self) -> Tensor:
        """Weights ``[N, K]`` for a model that reads them directly, as routers do."""
        return UnpackedWeights(self.packed[0], self._weight_dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``."""
        rows = x.reshape(-1, self.in_features)
        output = torch.empty(len(rows), self.out_features, dtype=self.output_dtype)
        multiply(rows, self.packed[0], output, self._weight_dtype)
        return output.view(*x.shape[:-1], self.out_features)


class PackedEmbedding(nn.Module):
    """An embedding that shares the packed weights of the model's head."""

    def __init__(self, head: PackedLinear, dtype: torch.dtype, scale: float = 1.0) -> None:
        """Share the weights of ``head``.

        Args:
            head: head with the same weights.
            dtype: dtype of the weights.
            scale: factor of the embeddings.
        """
        super().__init__()
        self._weights = head.packed[0]
        self.num_embeddings = head.out_features
        self.embedding_dim = head.in_features
        # Models read dtype and device from their parameters.
        self.empty = nn.Parameter(torch.empty(0, dtype=dtype), False)
        self.embed_scale = scale

    @cached_property
    def weight(self) -> Tensor:
        """Weights ``[V, features]`` for a model that reads them directly."""
        return UnpackedWeights(self._weights, self.empty.dtype)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Map ``[...]`` to ``[..., features]``."""
        rows = gather(self._weights, token_ids.reshape(-1).int(), self.empty.dtype)
        output = rows.view(*token_ids.shape, self.embedding_dim)
        return output if self.embed_scale == 1.0 else output.mul_(self.embed_scale)


def packable_gate_of(mlp: Any) -> Gate | None:
    """Gate of an MLP whose weights can be packed; None for other modules."""
    linears = mlp_linears(mlp)
    if linears is None or not all(can_pack(linear.weight) for linear in linears):
        return None
    return None if mlp.gate_proj.out_features % (PANEL_FEATURES // 2) else gate_of(mlp)


class PackedGatedMLP(FusedModule):
    """A gated MLP with packed weights."""

    def __init__(self, mlp: Any, gate: Gate, quantization: Quantization | None = None) -> None:
        """Pack the weights of ``mlp``; ``gate`` is its `packable_gate_of`."""
        super().__init__()
        down = own_linear(mlp.down_proj)
        self._group = group_of(mlp.down_proj)
        self._sizes, self._weight_dtype = (down.in_features, down.out_features), down.weight.dtype
        self.packed = (
            pack_gated(mlp.gate_proj.weight, mlp.up_proj.weight, gate, quantization),
            pack(down.weight, down.bias, quantization=quantization, peaks=peaks_of(down)),
        )
        self.parts = mlp_parts(mlp, *self.packed)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., features]`` to the same."""
        rows = x.reshape(-1, x.shape[-1])
        inner_size, size = self._sizes
        inner = torch.empty(len(rows), inner_size, dtype=x.dtype)
        output = torch.empty(len(rows), size, dtype=x.dtype)
        multiply(rows, self.packed[0], inner, self._weight_dtype)
        multiply(inner, self.packed[1], output, self._weight_dtype)
        if self._group is not None:
            self._group.all_reduce(output)
        return output.view(x.shape)


class CpuRMSNorm(nn.Module):
    """An RMS norm in one call."""

    def __init__(self, norm: nn.Module) -> None:
        """Copy the weight and epsilon of ``norm``."""
        super().__init__()
        self._weight = float32_vector(norm_factor(norm))
        self._epsilon = norm_epsilon(norm)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., features]`` to the same."""
        x = x.contiguous()
        output = torch.empty_like(x)
        rms_norm(
            dtype=DTYPE_NAMES[x.dtype],
            num_rows=x.numel() // len(self._weight),
            x=x.data_ptr(),
            output=output.data_ptr(),
            weight=self._weight,
            epsilon=self._epsilon,
            num_threads=torch.get_num_threads(),
        )
        return output
