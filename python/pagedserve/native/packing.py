"""Linear layers, packed from the files of a checkpoint."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagedserve._core.cpu import PackedWeights, pack_layers
from pagedserve.config.precision import FILE_QUANTIZATIONS, Quantization
from pagedserve.errors import ConfigError, ModelLoadError
from pagedserve.executor.memory import free_host_bytes, shown_bytes
from pagedserve.host_ops.pages import bytes_in_huge_pages
from pagedserve.models.families.record import Gate
from pagedserve.native.checkpoint import Checkpoint
from pagedserve.native.numbers import ComputeDtype, itemsize
from pagedserve.native.stored import (
    BLOCK_FORMATS,
    BLOCK_WEIGHTS,
    MADE_STORAGES,
    SCALED,
    SIZES,
    TURNED_ROWS,
    WHOLE_ROWS,
    StoredTensor,
)

logger = logging.getLogger(__name__)

# Formats of panels whose products are those of bytes, with the features of each.
Sections: TypeAlias = list[tuple[str, int]]

_PANEL_FEATURES: Final = 64  # as in rust/cpu/src/linear.rs
# What weights become, of the formats that Rust makes of any other: the first whose blocks their
# rows are.
_MADE: Final[dict[Quantization | None, tuple[str, ...]]] = {
    "w8a8": (TURNED_ROWS, "Q8_0"),
    "int4": ("Q4_1",),
}
# Dtypes of storages of 16 bits.
_HALVES: Final[dict[str, ComputeDtype]] = {"BF16": "bfloat16", "F16": "float16"}
# Storages whose products are those of bytes.
_AS_STORED: Final = BLOCK_FORMATS | MADE_STORAGES.keys()


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
        panels: Panels of all of them, of uint32 units, int8 weights or the bytes of sections.
        scales: Scales of int8 panels, or of whole rows.
        sections: Formats of the panels of bytes; None for others.
        bias: Bias of each matrix; empty for none.
        gate: Activation of a gated layer.
        dtype: Dtype of weights in units.
    """

    parts: tuple[Part, ...]
    tensors: list[StoredTensor]
    panels: NDArray[Any]
    scales: NDArray[np.float32] | None
    sections: Sections | None
    bias: Sequence[NDArray[np.float32]]
    gate: Gate | None
    dtype: ComputeDtype

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
        self._converted: list[StoredTensor] = []

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
        sections = _sections(tensors, quantization, is_gated=gate is not None)
        dtype = _weight_dtype(tensors, self.dtype)
        shape = sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1]
        if sections is None:
            panels, scales = _empty_panels(shape, dtype, quantization)
        else:
            has_scales = sections[0][0] in SCALED
            panels = _empty_bytes(shape[1], sections)
            scales = np.empty(shape[0], np.float32) if has_scales else None
        if sections is None:
            self._converted += [t for t in tensors if _is_converted(t, dtype, quantization)]
        planned = Linear(
            parts=parts,
            tensors=tensors,
            panels=panels,
            scales=scales,
            sections=sections,
            bias=bias,
            gate=gate,
            dtype=dtype,
        )
        self._planned.append(planned)
        return planned

    def pack(self) -> int:
        """Write the panels of all planned layers; return the bytes of panels and scales.

        Raises:
            ConfigError: They need more memory than is free.
            ModelLoadError: A weight is not finite, or a file cannot be read or has become shorter.
        """
        num_bytes = sum(linear.num_bytes for linear in self._planned)
        if num_bytes > (free_bytes := free_host_bytes()):
            raise ConfigError(
                f"model {self.checkpoint.model!r} needs {shown_bytes(num_bytes)} for its weights, "
                f"and {shown_bytes(free_bytes)} of memory are free: give {self._smaller()}"
            )
        layers = [self._arguments(linear) for linear in self._planned]
        try:
            odd = pack_layers(layers, num_threads=self._num_threads)
        except OSError as error:
            raise ModelLoadError(
                f"model {self.checkpoint.model!r}: its files were cut short or cannot be read "
                f"while it is loaded: {error}"
            ) from error
        for linear, numbers in zip(self._planned, odd, strict=True):
            for part, number in zip(linear.parts, numbers, strict=True):
                self.checkpoint.check_finite(part.name, number)
        return num_bytes

    def _smaller(self) -> str:
        """Options whose weights need less memory than those of the planned layers."""
        floats = [at for at in self._planned if at.sections is None and at.scales is None]
        choices = {
            "dtype='bfloat16'": any(at.dtype == "float32" for at in floats),
            "quantization='int8'": len(floats) == len(self._planned),
            "a smaller model": True,
        }
        return " or ".join(choice for choice, is_smaller in choices.items() if is_smaller)

    def _arguments(self, linear: Linear) -> tuple[Any, ...]:
        """Arguments of a layer for `pack_layers`."""
        rows = [
            (
                tensor.file.fileno(),
                tensor.offset,
                tensor.shape[0],
                tensor.storage,
                tensor.scales,
                self.checkpoint.interleaved if part.has_heads else 0,
            )
            for part, tensor in zip(linear.parts, linear.tensors, strict=True)
        ]
        is_gated = linear.gate is not None
        return (
            linear.panels,
            linear.dtype,
            rows,
            linear.in_features,
            is_gated,
            linear.scales,
            linear.sections,
        )

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
            sections=linear.sections,
            weight_dtype=linear.dtype,
        )

    def log_converted(self, quantization: Quantization | None) -> None:
        """Log how many matrices become floats despite the option, or because it was not given."""
        tensors = [tensor for linear in self._planned for tensor in linear.tensors]
        blocks = [tensor.storage for tensor in tensors if tensor.storage in BLOCK_FORMATS]
        if self._converted:
            logger.info(
                "%d of %d matrices are converted to %s, as they are of no format that is computed "
                "as stored, beside one of another format, or of rows of no whole blocks: %r of "
                "type %s is the first",
                len(self._converted),
                len(tensors),
                self.dtype,
                self._converted[0].name,
                self._converted[0].storage,
            )
        elif blocks and quantization is None:
            logger.info(
                "%d of %d matrices are converted to %s from blocks of %s; with quantization "
                "'gguf' they stay as stored, in less memory, and one stream is faster",
                len(blocks),
                len(tensors),
                self.dtype,
                ", ".join(sorted(set(blocks))),
            )


def _sections(
    tensors: Sequence[StoredTensor], quantization: Quantization | None, *, is_gated: bool
) -> Sections | None:
    """Formats of a layer whose products are those of bytes; None if they are not."""
    if all(_is_kept(tensor, quantization) for tensor in tensors):
        kept = _kept_sections(tensors, is_gated=is_gated)
        if kept is not None or quantization not in _MADE:
            return kept
    num_features = sum(tensor.shape[0] for tensor in tensors)
    made = _MADE.get(quantization, ())
    fitting = (name for name in made if tensors[0].shape[1] % SIZES[name][0] == 0)
    return next(([(name, num_features)] for name in fitting), None)


def _is_kept(tensor: StoredTensor, quantization: Quantization | None) -> bool:
    """Whether a matrix may stay as it is stored: with "int4" if its blocks are no larger."""
    if quantization == "int4":
        num_weights, num_bytes = SIZES["Q4_1"]
        is_small = tensor.num_bytes * num_weights <= tensor.num_weights * num_bytes
        return is_small and tensor.storage in BLOCK_FORMATS
    return quantization in FILE_QUANTIZATIONS and tensor.storage in _AS_STORED


def _kept_sections(tensors: Sequence[StoredTensor], *, is_gated: bool) -> Sections | None:
    """Formats of a layer as its matrices are stored; None if one product cannot have all."""
    sections = [
        (storage, sum(tensor.shape[0] for tensor in group))
        for storage, group in groupby(tensors, lambda tensor: tensor.storage)
    ]
    if len(sections) == 1:
        return sections
    # A panel is of one format, a gate shares panels with what it gates, and the scales of a row are
    # those of all panels.
    shares = any(num_features % _PANEL_FEATURES for _, num_features in sections[:-1])
    groups = {_row_group(name) for name, _ in sections}
    return None if shares or is_gated or len(groups) > 1 else sections


def _weight_dtype(tensors: Sequence[StoredTensor], dtype: ComputeDtype) -> ComputeDtype:
    """Dtype that holds the weights of a layer without loss, in as few bytes as products have."""
    storages = {tensor.storage for tensor in tensors}
    if dtype != "float32" or tensors[0].shape[1] % 2 or len(storages) > 1:  # a unit is a pair
        return dtype
    return _HALVES.get(storages.pop(), dtype)


def _row_group(storage: str) -> int | None:
    """Inputs of a row that share a scale where weights are stored so; None for all of them."""
    if storage == WHOLE_ROWS:
        return None
    return MADE_STORAGES.get(storage, (BLOCK_WEIGHTS, 0))[0]


def _is_converted(
    tensor: StoredTensor, dtype: ComputeDtype, quantization: Quantization | None
) -> bool:
    """Whether floats are other numbers than the option promises for a matrix.

    Formats of directories leave some matrices as floats, which stay such, and so do those whose
    dtype in the layer is that of the file.
    """
    if quantization == "gguf" and _HALVES.get(tensor.storage) == dtype:
        return False
    return quantization == "gguf" or quantization in _MADE or _is_kept(tensor, quantization)


def _empty_panels(
    shape: tuple[int, int], dtype: ComputeDtype, quantization: Quantization | None
) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
    """Panels and int8 scales of a layer of N rows of K, not yet written."""
    num_weights = _padded(shape[0]) * shape[1]
    if quantization == "int8":
        return bytes_in_huge_pages(num_weights).view(np.int8), np.empty(shape[0], np.float32)
    return bytes_in_huge_pages(num_weights * itemsize(dtype)).view(np.uint32), None


def _empty_bytes(in_features: int, sections: Sections) -> NDArray[np.uint8]:
    """Panels of sections of a layer, not yet written."""
    blocks = ((_padded(num_features), *SIZES[name]) for name, num_features in sections)
    num_bytes = sum(rows * (in_features // weights) * size for rows, weights, size in blocks)
    return bytes_in_huge_pages(num_bytes)


def _padded(num_features: int) -> int:
    """Features of whole panels."""
    return -(-num_features // _PANEL_FEATURES) * _PANEL_FEATURES
