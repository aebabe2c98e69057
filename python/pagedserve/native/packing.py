"""Linear layers, packed from the mapped files of a checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedserve._core.cpu import PackedWeights, pack_rows
from pagedserve.config.precision import Quantization
from pagedserve.host_ops.pages import bytes_in_huge_pages
from pagedserve.models.families.record import Gate
from pagedserve.native.checkpoint import Checkpoint
from pagedserve.native.numbers import ComputeDtype, itemsize

_PANEL_FEATURES: Final = 64  # as in rust/cpu/src/linear.rs


class Part(NamedTuple):
    """A matrix that is a part of a layer.

    Attributes:
        name: Name of the tensor.
        has_heads: Whether its features are those of query or key heads.
    """

    name: str
    has_heads: bool = False


@dataclass(frozen=True, slots=True)
class Packer:
    """Packs the layers of a checkpoint.

    Attributes:
        checkpoint: The weights.
        dtype: Dtype of the model.
        num_threads: Threads that pack.
    """

    checkpoint: Checkpoint
    dtype: ComputeDtype
    num_threads: int

    def pack(
        self,
        *parts: Part,
        bias: Sequence[NDArray[np.float32]] = (),
        gate: Gate | None = None,
        quantization: Quantization | None = None,
    ) -> PackedWeights:
        """Pack a layer of one or more matrices, one after another.

        Args:
            *parts: Matrices; of a gated layer the gate and what it gates.
            bias: Bias of each matrix; empty for none.
            gate: Activation of a gated layer.
            quantization: Quantization of the weights.

        Raises:
            ModelLoadError: A weight is not finite.
        """
        tensors = [self.checkpoint.tensors[part.name] for part in parts]
        num_rows, depth = sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1]
        panels, scales = _empty_panels(num_rows, depth, self.dtype, quantization)
        num_odd = pack_rows(
            panels,
            rows=[
                (
                    tensor.address,
                    tensor.shape[0],
                    tensor.storage,
                    self.checkpoint.interleaved if part.has_heads else 0,
                )
                for part, tensor in zip(parts, tensors, strict=True)
            ],
            dtype=self.dtype,
            in_features=depth,
            is_gated=gate is not None,
            scales=scales,
            num_threads=self.num_threads,
        )
        for part, number in zip(parts, num_odd, strict=True):
            self.checkpoint.check_finite(part.name, number)
        return PackedWeights(
            panels,
            dtype=self.dtype,
            in_features=depth,
            out_features=num_rows,
            scales=scales,
            bias=np.concatenate(bias) if bias else None,
            gate=gate,
        )


def _empty_panels(
    num_rows: int, depth: int, dtype: ComputeDtype, quantization: Quantization | None
) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
    """Panels and int8 scales of a layer, not yet written."""
    num_weights = -(-num_rows // _PANEL_FEATURES) * _PANEL_FEATURES * depth
    if quantization is not None:
        return bytes_in_huge_pages(num_weights).view(np.int8), np.empty(num_rows, np.float32)
    return bytes_in_huge_pages(num_weights * itemsize(dtype)).view(np.uint32), None
