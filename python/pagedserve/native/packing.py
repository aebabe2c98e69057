"""Linear layers, packed from the files of a checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedserve._core.cpu import PackedWeights, pack_layers
from pagedserve.config.precision import Quantization
from pagedserve.errors import ModelLoadError
from pagedserve.host_ops.pages import bytes_in_huge_pages
from pagedserve.models.families.record import Gate
from pagedserve.native.checkpoint import Checkpoint
from pagedserve.native.numbers import ComputeDtype, itemsize
from pagedserve.native.stored import StoredTensor

_PANEL_FEATURES: Final = 64  # as in rust/cpu/src/linear.rs


class Part(NamedTuple):
    """A matrix that is a part of a layer.

    Attributes:
        name: Name of the tensor.
        has_heads: Whether its features are those of query or key heads.
    """

    name: str
    has_heads: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A linear layer whose panels are not yet written.

    Attributes:
        parts: Its matrices, one after another; of a gated layer the gate and what it gates.
        tensors: Where they are stored.
        panels: Panels of all of them, of uint32 units or int8 weights.
        scales: Scales of int8 panels.
        bias: Bias of each matrix; empty for none.
        gate: Activation of a gated layer.
    """

    parts: tuple[Part, ...]
    tensors: list[StoredTensor]
    panels: NDArray[Any]
    scales: NDArray[np.float32] | None
    bias: Sequence[NDArray[np.float32]]
    gate: Gate | None

    @property
    def in_features(self) -> int:
        """Number of input features."""
        return self.tensors[0].shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of panels and scales."""
        return self.panels.nbytes + (0 if self.scales is None else self.scales.nbytes)


class Packer:
    """Packs the layers of a checkpoint: first all are planned, then all are packed at once.

    A single call packs many layers, because a thread that computes in Python, such as one that
    imports modules meanwhile, delays each return to Python by milliseconds.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: ComputeDtype, num_threads: int) -> None:
        """Pack in a dtype, with a number of threads."""
        self.checkpoint = checkpoint
        self.dtype = dtype
        self._num_threads = num_threads
        self._planned: list[Linear] = []

    def plan(
        self,
        *parts: Part,
        bias: Sequence[NDArray[np.float32]] = (),
        gate: Gate | None = None,
        quantization: Quantization | None = None,
    ) -> Linear:
        """Allocate a layer, which `pack` will write.

        Args:
            *parts: Matrices; of a gated layer the gate and what it gates.
            bias: Bias of each matrix; empty for none.
            gate: Activation of a gated layer.
            quantization: Quantization of the weights.
        """
        tensors = [self.checkpoint.tensors[part.name] for part in parts]
        num_rows, depth = sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1]
        panels, scales = _empty_panels(num_rows, depth, self.dtype, quantization)
        planned = Linear(
            parts=parts, tensors=tensors, panels=panels, scales=scales, bias=bias, gate=gate
        )
        self._planned.append(planned)
        return planned

    def pack(self) -> int:
        """Write the panels of all planned layers; return the bytes of panels and scales.

        Raises:
            ModelLoadError: A weight is not finite, or a file cannot be read or has become shorter.
        """
        layers = [self._arguments(linear) for linear in self._planned]
        try:
            odd = pack_layers(layers, dtype=self.dtype, num_threads=self._num_threads)
        except OSError as error:
            raise ModelLoadError(
                f"model {self.checkpoint.model!r}: its files were cut short or cannot be read "
                f"while it is loaded: {error}"
            ) from error
        for linear, numbers in zip(self._planned, odd, strict=True):
            for part, number in zip(linear.parts, numbers, strict=True):
                self.checkpoint.check_finite(part.name, number)
        return sum(linear.num_bytes for linear in self._planned)

    def _arguments(self, linear: Linear) -> tuple[Any, ...]:
        """Arguments of a layer for `pack_layers`."""
        rows = [
            (
                tensor.file.fileno(),
                tensor.offset,
                tensor.shape[0],
                tensor.storage,
                self.checkpoint.interleaved if part.has_heads else 0,
            )
            for part, tensor in zip(linear.parts, linear.tensors, strict=True)
        ]
        is_gated = linear.gate is not None
        return linear.panels, rows, linear.in_features, is_gated, linear.scales

    def weights(self, linear: Linear) -> PackedWeights:
        """The weights of a packed layer."""
        return PackedWeights(
            linear.panels,
            dtype=self.dtype,
            in_features=linear.in_features,
            out_features=sum(tensor.shape[0] for tensor in linear.tensors),
            scales=linear.scales,
            bias=np.concatenate(linear.bias) if linear.bias else None,
            gate=linear.gate,
        )


def _empty_panels(
    num_rows: int, depth: int, dtype: ComputeDtype, quantization: Quantization | None
) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
    """Panels and int8 scales of a layer, not yet written."""
    num_weights = -(-num_rows // _PANEL_FEATURES) * _PANEL_FEATURES * depth
    if quantization is not None:
        return bytes_in_huge_pages(num_weights).view(np.int8), np.empty(num_rows, np.float32)
    return bytes_in_huge_pages(num_weights * itemsize(dtype)).view(np.uint32), None
