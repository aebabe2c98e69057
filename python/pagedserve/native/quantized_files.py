"""Matrices of GPTQ, AWQ and compressed-tensors checkpoints.

Each format packs numbers of 4 or 8 bits into words of 32, lowest bits first.  GPTQ packs inputs,
and transposes the matrix; AWQ packs outputs in an order that interleaves them; compressed-tensors
packs inputs, or stores bytes.  Bits and groups follow from the shapes of the tensors.

Costs: each compute thread converts a matrix at a time, some 6 ns a weight.  Converted matrices
stay in memory until the model is packed, so that a load needs twice the memory of its blocks.
"""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagedserve.host_ops.threads import num_compute_threads
from pagedserve.models.load.safetensors_header import as_float32
from pagedserve.native.choice import OTHER_BACKEND
from pagedserve.native.families import UnsupportedError
from pagedserve.native.grouped_weights import GroupedWeights
from pagedserve.native.stored import BLOCK_WEIGHTS, WHOLE_ROWS, MemoryFile, StoredTensor

logger = logging.getLogger(__name__)

_BITS: Final = (4, 8)
_WORD_BITS: Final = 32
_SCALES: Final = ("F16", "BF16", "F32")
# The most inputs whose products may have one scale, as in rust/cpu/src/bytes/format.rs.
_MOST_INPUTS: Final = 1 << 16
# Position in a word of each of eight adjacent outputs.
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
# For each method the field that names its layout, the default, and the layouts that are read.
_LAYOUTS: Final[dict[str, tuple[str, str, tuple[str, ...]]]] = {
    "gptq": ("checkpoint_format", "gptq", ("gptq", "gptq_v2")),
    "awq": ("version", "gemm", ("gemm",)),
    "compressed-tensors": (
        "format",
        "none",
        ("pack-quantized", "int-quantized", "naive-quantized"),
    ),
}


def convert_quantized(
    tensors: Mapping[str, StoredTensor],
    shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any],
) -> dict[str, StoredTensor]:
    """Convert the quantized matrices of a checkpoint to blocks, or to float32 if none hold them.

    Args:
        tensors: Tensors of the files.
        shapes: Shapes of the model's weights.
        config: Its ``quantization_config``, of one of the three methods.

    Returns:
        The tensors, and each converted matrix under the name of its weight.  Bytes with a scale for
        each output feature stay in their file, if activations are planned to be quantized too.

    Raises:
        UnsupportedError: Names what is not read: a layout, or a number of bits.
        ValueError: A tensor is missing, or does not fit the others.
    """
    method = str(config["quant_method"])
    plan, read, file = _plan_of(method, config), _READERS[method], MemoryFile()

    def convert(matrix: _Matrix) -> _Converted | None:
        weights = read(matrix, plan)
        if isinstance(weights, StoredTensor):
            return _Converted(weights, None)
        return None if weights is None else _Converted.of(f"{matrix.stem}weight", weights, file)

    matrices = [
        _Matrix(tensors, name.removesuffix("weight"), shape)
        for name, shape in shapes.items()
        if len(shape) > 1
    ]
    with ThreadPoolExecutor(num_compute_threads(), "pagedserve-weights") as threads:
        converted = [each for each in threads.map(convert, matrices) if each is not None]
    dequantised = [each for each in converted if each.obstacle is not None]
    if dequantised:
        logger.info(
            "%d of %d quantized matrices are dequantised: %r, %s, is the first",
            len(dequantised),
            len(converted),
            dequantised[0].tensor.name,
            dequantised[0].obstacle,
        )
    return {**tensors, **{each.tensor.name: each.tensor for each in converted}}


class _Converted(NamedTuple):
    """A converted matrix.

    Attributes:
        tensor: Its blocks, or its weights as float32.
        obstacle: Why it has no blocks; None if it has.
    """

    tensor: StoredTensor
    obstacle: str | None

    @classmethod
    def of(cls, name: str, weights: GroupedWeights, file: MemoryFile) -> Self:
        """Convert weights of this name, and append them to a file."""
        content: NDArray[Any]
        obstacle = weights.obstacle()
        storage, content = ("F32", weights.floats()) if obstacle else weights.blocks()
        offset = file.append(content)
        shape = weights.numbers.shape
        return cls(StoredTensor(name, storage, shape, offset, content.nbytes, file), obstacle)


class _Plan(NamedTuple):
    """What a config says of all matrices.

    Attributes:
        layout: Layout of the tensors.
        quantizes_activations: Whether activations are to become bytes too, a scale each.
    """

    layout: str
    quantizes_activations: bool


def _plan_of(method: str, config: Mapping[str, Any]) -> _Plan:
    """Plan of a method's config.

    Raises:
        UnsupportedError: The layout is another one, or weights are rotated or sparse as well.
    """
    field, default, known = _LAYOUTS[method]
    layout = str(config.get(field) or default).lower()
    if layout not in known:
        raise UnsupportedError(
            f"quantization_config.{field} is {layout[:80]!r}; the native backend reads "
            f"{', '.join(known)}: {OTHER_BACKEND}"
        )
    sparsity = config.get("sparsity_config") or {}
    is_sparse = not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense"
    for name, is_refused in (
        ("sparsity_config", is_sparse),
        ("transform_config", bool(config.get("transform_config"))),
    ):
        if is_refused:
            raise UnsupportedError(
                f"quantization_config.{name} is {str(config[name])[:80]}, which the native backend "
                f"does not support: {OTHER_BACKEND}"
            )
    return _Plan(layout, _quantizes_activations(config))


def _quantizes_activations(config: Mapping[str, Any]) -> bool:
    """Whether activations of all matrices are to be bytes with a scale a token or a tensor."""
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return False
    plans = [
        group.get("input_activations") if isinstance(group, Mapping) else None
        for group in groups.values()
    ]
    return all(
        isinstance(plan, Mapping)
        and (plan.get("type"), plan.get("num_bits")) == ("int", 8)
        and plan.get("strategy") in ("token", "tensor", None)
        for plan in plans
    )


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix of a checkpoint.

    Attributes:
        tensors: Tensors of the files.
        stem: Prefix of the names of its tensors.
        shape: Rows N and inputs K.
    """

    tensors: Mapping[str, StoredTensor]
    stem: str
    shape: tuple[int, ...]

    def has(self, part: str, storage: str | None = None) -> bool:
        """Whether the files have a tensor of it, of a storage if one is given."""
        tensor = self.tensors.get(f"{self.stem}{part}")
        return tensor is not None and storage in (None, tensor.storage)

    def tensor(self, part: str, *storages: str) -> StoredTensor:
        """Find a tensor of the matrix, of one of these storages.

        Raises:
            UnsupportedError: It has another storage.
            ValueError: The files lack it.
        """
        name = f"{self.stem}{part}"
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ValueError(f"its files lack {name!r}")
        if tensor.storage not in storages:
            raise UnsupportedError(
                f"its files have {name!r} as {tensor.storage}; the native backend reads "
                f"{', '.join(storages)}: {OTHER_BACKEND}"
            )
        return tensor

    def packed(
        self, part: str, shape_of: Callable[[int], tuple[int, ...]]
    ) -> tuple[int, NDArray[np.uint8]]:
        """Read words by the shape that they have for a number of bits; the bits, and `unpacked`.

        Raises:
            UnsupportedError: They have the shape of other numbers.
        """
        tensor = self.tensor(part, "I32")
        for bits in _BITS:
            if tensor.shape == shape_of(bits):
                return bits, self.unpacked(part, bits, tensor.shape)
        known = " or ".join(f"{shape_of(bits)} for {bits} bits" for bits in _BITS)
        raise UnsupportedError(
            f"{tensor.name!r} is {tensor.shape} in its files; the native backend reads {known}: "
            f"{OTHER_BACKEND}"
        )

    def read(self, part: str, storage: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """Read whole numbers, int32 or int8.

        Raises:
            ValueError: They have another shape, or the file has become shorter.
        """
        tensor = self.tensor(part, storage)
        if tensor.shape != shape:
            raise ValueError(
                f"{tensor.name!r} is {tensor.shape} in its files, and the others make it {shape}"
            )
        dtype = np.int32 if storage == "I32" else np.int8
        return np.frombuffer(tensor.read(), dtype).reshape(shape)

    def unpacked(
        self, part: str, bits: int, shape: tuple[int, ...], missing: int = 0
    ) -> NDArray[np.uint8]:
        """Read words ``[A, B]``, and unpack them into numbers, uint8 ``[A, B, 32 / bits]``.

        Args:
            part: Name of the tensor, without the stem.
            bits: Bits of a number.
            shape: Shape of the words.
            missing: What was subtracted from each word, modulo 2^32.
        """
        words = self.read(part, "I32", shape).view(np.uint32) + np.uint32(missing)
        octets: NDArray[Any] = words[..., None].view(np.uint8)
        if bits == 8:  # noqa: PLR2004
            return octets
        return np.stack((octets & 15, octets >> 4), axis=-1).reshape(*shape, -1)

    def scales(self, part: str, group_axis: int) -> NDArray[np.float32]:
        """Read scales of rows and groups, float32 ``[N, G]``; a single one is that of all.

        Raises:
            ValueError: They have another shape.
        """
        tensor, rows = self.tensor(part, *_SCALES), self.shape[0]
        scales = as_float32(np.frombuffer(tensor.read(), np.uint8), tensor.storage)
        if scales.size == 1:
            return np.full((rows, 1), scales.reshape(-1)[0], np.float32)
        is_matrix = len(tensor.shape) == len(self.shape) and scales.size > 0
        if not is_matrix or tensor.shape[1 - group_axis] != rows:
            raise ValueError(
                f"{tensor.name!r} is {tensor.shape} in its files, and its config makes it scales "
                f"of {rows} features"
            )
        return np.moveaxis(scales.reshape(tensor.shape), group_axis, 1)

    def groups(self, part: str, num_groups: int) -> NDArray[np.int64]:
        """Group of each input, int64 ``[K]``: in order without a tensor, or with one of -1 only.

        Raises:
            ValueError: A group does not exist, or inputs do not divide into the groups.
        """
        columns = self.shape[1]
        if self.has(part):
            groups = self.read(part, "I32", (columns,)).astype(np.int64)
            if groups.min() >= 0 and groups.max() < num_groups:
                return groups
            if (groups != -1).any():
                raise ValueError(
                    f"'{self.stem}{part}' names groups other than its {num_groups} groups"
                )
        if columns % num_groups:
            raise ValueError(
                f"'{self.stem}weight' has {columns} inputs, and its files {num_groups} groups"
            )
        return np.repeat(np.arange(num_groups, dtype=np.int64), columns // num_groups)


_Reader: TypeAlias = Callable[[_Matrix, _Plan], GroupedWeights | StoredTensor | None]


def _read_gptq(matrix: _Matrix, plan: _Plan) -> GroupedWeights | None:
    """Read a matrix of GPTQ; None if it is not quantized.

    Version 1 stores zero points less 1: words less a word of ones, so that a zero point of 0
    borrows from the next one.
    """
    if not matrix.has("qweight"):
        return None
    rows, columns = matrix.shape
    bits, numbers = matrix.packed("qweight", lambda bits: (_num_words(columns, bits), rows))
    scales = matrix.scales("scales", 0)
    num_groups = scales.shape[1]
    ones = ((1 << _WORD_BITS) - 1) // ((1 << bits) - 1)
    missing = ones if plan.layout == "gptq" else 0
    zeros = matrix.unpacked("qzeros", bits, (num_groups, _num_words(rows, bits)), missing)
    return GroupedWeights(
        bits=bits,
        numbers=numbers.swapaxes(0, 1).reshape(rows, -1)[:, :columns],
        scales=scales,
        zeros=zeros.reshape(num_groups, -1)[:, :rows].T.astype(np.int16),
        groups=matrix.groups("g_idx", num_groups),
    )


def _read_awq(matrix: _Matrix, _: _Plan) -> GroupedWeights | None:
    """Read a matrix of AWQ; None if it is not quantized."""
    if not matrix.has("qweight"):
        return None
    rows, columns = matrix.shape
    bits = _BITS[0]
    numbers = matrix.unpacked("qweight", bits, (columns, _num_words(rows, bits)))
    scales = matrix.scales("scales", 0)
    num_groups = scales.shape[1]
    zeros = matrix.unpacked("qzeros", bits, (num_groups, _num_words(rows, bits)))
    return GroupedWeights(
        bits=bits,
        numbers=numbers[..., _AWQ_ORDER].reshape(columns, -1)[:, :rows].T,
        scales=scales,
        zeros=zeros[..., _AWQ_ORDER].reshape(num_groups, -1)[:, :rows].T.astype(np.int16),
        groups=matrix.groups("g_idx", num_groups),
    )


def _read_compressed(matrix: _Matrix, plan: _Plan) -> GroupedWeights | StoredTensor | None:
    """Read a matrix of compressed-tensors; None if it is not quantized to whole numbers."""
    stored = _with_scales(matrix) if plan.quantizes_activations else None
    if stored is not None:
        return stored
    rows, columns = matrix.shape
    if matrix.has("weight_packed"):
        bits, words = matrix.packed("weight_packed", lambda bits: (rows, _num_words(columns, bits)))
        numbers = words.reshape(rows, -1)[:, :columns]
    elif matrix.has("weight", "I8"):
        bits = _BITS[-1]
        numbers = (matrix.read("weight", "I8", matrix.shape) ^ -128).view(np.uint8)
    else:
        return None
    scales = matrix.scales("weight_scale", 1)
    return GroupedWeights(
        bits=bits,
        numbers=numbers,
        scales=scales,
        zeros=_compressed_zeros(matrix, bits, scales.shape[1]),
        groups=matrix.groups("weight_g_idx", scales.shape[1]),
    )


def _with_scales(matrix: _Matrix) -> StoredTensor | None:
    """A matrix of bytes and the scales of its output features; None if it is another matrix."""
    if not matrix.has("weight", "I8") or matrix.has("weight_g_idx"):
        return None
    scales, columns = matrix.scales("weight_scale", 1), matrix.shape[1]
    fits = scales.shape[1] == 1 and columns % BLOCK_WEIGHTS == 0 and columns <= _MOST_INPUTS
    if not fits or (_compressed_zeros(matrix, 8, 1) != 1 << 7).any():
        return None
    stored = matrix.tensor("weight", "I8")
    return replace(stored, storage=WHOLE_ROWS, scales=np.ascontiguousarray(scales[:, 0]))


def _compressed_zeros(matrix: _Matrix, bits: int, num_groups: int) -> NDArray[np.int16]:
    """Zero points of compressed-tensors, int16 ``[N, G]``: packed, bytes, or the middle."""
    part, rows, middle = "weight_zero_point", matrix.shape[0], 1 << (bits - 1)
    if not matrix.has(part):
        return np.full((rows, num_groups), middle, np.int16)
    if matrix.has(part, "I8"):
        stored = matrix.tensor(part, "I8").shape
        shape = stored if stored in ((), (1,), (1, 1)) else (rows, num_groups)
        zeros = np.add(matrix.read(part, "I8", shape), middle, dtype=np.int16)
        return np.broadcast_to(zeros, (rows, num_groups))
    words = matrix.unpacked(part, bits, (_num_words(rows, bits), num_groups))
    return words.swapaxes(1, 2).reshape(-1, num_groups)[:rows].astype(np.int16)


def _num_words(num_numbers: int, bits: int) -> int:
    """Words of a packed row."""
    return -(-num_numbers * bits // _WORD_BITS)


_READERS: Final[dict[str, _Reader]] = {
    "gptq": _read_gptq,
    "awq": _read_awq,
    "compressed-tensors": _read_compressed,
}
