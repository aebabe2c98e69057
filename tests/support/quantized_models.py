"""Tiny models as GPTQ, AWQ and compressed-tensors checkpoints, packed as their libraries do."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

# Order in which AutoAWQ puts eight adjacent outputs into a word.
_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)

Tensors: TypeAlias = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How the matrices of a checkpoint are quantized.

    Attributes:
        method: ``quant_method``.
        layout: The field that names the layout, and its value.
        bits: Bits of a number.
        group_size: Inputs of a group; None for whole rows.
        is_symmetric: Whether zero points are the middle of the numbers.
        has_order: Whether inputs of a group are spread over the row (act-order).
        scale_dtype: Type of the scales.
        quantizes_rows: Whether inputs are planned to become bytes as well.
    """

    method: str
    layout: tuple[str, str]
    bits: int = 4
    group_size: int | None = 32
    is_symmetric: bool = False
    has_order: bool = False
    scale_dtype: torch.dtype = torch.float16
    quantizes_rows: bool = False


GPTQ: Final = Scheme(method="gptq", layout=("checkpoint_format", "gptq"))
AWQ: Final = Scheme(method="awq", layout=("version", "GEMM"))
PACKED: Final = Scheme(
    method="compressed-tensors",
    layout=("format", "pack-quantized"),
    is_symmetric=True,
    scale_dtype=torch.bfloat16,
)
BYTES: Final = replace(
    PACKED,
    layout=("format", "int-quantized"),
    bits=8,
    group_size=None,
    quantizes_rows=True,
)


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A quantized matrix of N rows of K.

    Attributes:
        numbers: Numbers from 0, int64 ``[N, K]``.
        zeros: Zero points, int64 ``[N, G]``.
        scales: Scales, ``[N, G]``.
        groups: Group of each input, int64 ``[K]``.
    """

    numbers: NDArray[np.int64]
    zeros: NDArray[np.int64]
    scales: torch.Tensor
    groups: NDArray[np.int64]

    @property
    def exact(self) -> NDArray[np.float64]:
        """The weights."""
        scales = self.scales.double().numpy()
        centred = self.numbers - self.zeros[:, self.groups]
        exact: NDArray[np.float64] = scales[:, self.groups] * centred
        return exact

    @property
    def of_blocks(self) -> NDArray[np.float64]:
        """The weights with float16 minima, as blocks have them; exact without zero points."""
        scales = self.scales.double().numpy()
        minima = (-scales * self.zeros).astype(np.float16).astype(np.float64)
        return scales[:, self.groups] * self.numbers + minima[:, self.groups]


def quantize(weights: NDArray[np.float32], scheme: Scheme, random: np.random.Generator) -> Matrix:
    """Round a matrix to whole numbers."""
    rows, columns = weights.shape
    size = scheme.group_size or columns
    groups = np.arange(columns) // size
    if scheme.has_order:
        random.shuffle(groups)
    num_groups, most = int(groups.max()) + 1, (1 << scheme.bits) - 1
    of_group = [weights[:, groups == group] for group in range(num_groups)]
    lowest = np.minimum(np.stack([each.min(1) for each in of_group], axis=1), 0)
    highest = np.maximum(np.stack([each.max(1) for each in of_group], axis=1), 0)
    steps = 2 * np.maximum(highest, -lowest) / most
    zeros = np.full((rows, num_groups), (most + 1) // 2)
    if not scheme.is_symmetric:
        steps = (highest - lowest) / most
        zeros = np.clip(np.round(-lowest / steps), 0, most).astype(np.int64)
    scales = torch.from_numpy(steps).to(scheme.scale_dtype)
    whole = np.round(weights / scales.double().numpy()[:, groups]) + zeros[:, groups]
    numbers = np.clip(whole, 0, most).astype(np.int64)
    return Matrix(numbers=numbers, zeros=zeros, scales=scales, groups=groups)


def words(numbers: NDArray[np.int64], bits: int, axis: int, order: Any = None) -> torch.Tensor:
    """Pack numbers along an axis, the first into the lowest bits."""
    per_word = 32 // bits
    rest = -numbers.shape[axis] % per_word
    last = np.moveaxis(numbers, axis, -1)
    last = np.pad(last, [(0, 0)] * (last.ndim - 1) + [(0, rest)])
    packed = np.zeros((*last.shape[:-1], last.shape[-1] // per_word), np.uint64)
    for bit, place in enumerate(order or range(per_word)):
        packed |= last[..., place::per_word].astype(np.uint64) << np.uint64(bit * bits)
    whole = np.ascontiguousarray(np.moveaxis(packed.astype(np.uint32), -1, axis))
    return torch.from_numpy(whole.view(np.int32))


def _gptq(matrix: Matrix, scheme: Scheme) -> Tensors:
    less = words(np.ones_like(matrix.zeros.T), scheme.bits, 1)
    zeros = words(matrix.zeros.T, scheme.bits, 1)
    return {
        "qweight": words(matrix.numbers.T, scheme.bits, 0),
        "qzeros": zeros - less if scheme.layout[1] == "gptq" else zeros,
        "scales": matrix.scales.T.contiguous(),
        "g_idx": torch.from_numpy(matrix.groups.astype(np.int32)),
    }


def _awq(matrix: Matrix, scheme: Scheme) -> Tensors:
    return {
        "qweight": words(matrix.numbers.T, scheme.bits, 1, _AWQ_ORDER),
        "qzeros": words(matrix.zeros.T, scheme.bits, 1, _AWQ_ORDER),
        "scales": matrix.scales.T.contiguous(),
    }


def _compressed(matrix: Matrix, scheme: Scheme) -> Tensors:
    tensors = {"weight_scale": matrix.scales}
    if scheme.layout[1] == "int-quantized":
        tensors["weight"] = torch.from_numpy((matrix.numbers - 128).astype(np.int8))
        if not scheme.is_symmetric:
            zeros = (matrix.zeros - 128).astype(np.int8)
            tensors["weight_zero_point"] = torch.from_numpy(zeros)
        return tensors
    tensors["weight_packed"] = words(matrix.numbers, scheme.bits, 1)
    tensors["weight_shape"] = torch.tensor(matrix.numbers.shape)
    if not scheme.is_symmetric:
        tensors["weight_zero_point"] = words(matrix.zeros, scheme.bits, 0)
    if scheme.has_order:
        tensors["weight_g_idx"] = torch.from_numpy(matrix.groups.astype(np.int32))
    return tensors


_PACKERS: Final[Mapping[str, Callable[[Matrix, Scheme], Tensors]]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
}


def _fields(scheme: Scheme) -> dict[str, Any]:
    """``quantization_config`` of a checkpoint, as its library writes it."""
    size, (field, layout) = scheme.group_size or -1, scheme.layout
    fields = {"quant_method": scheme.method, field: layout}
    if scheme.method == "compressed-tensors":
        weights = {
            "num_bits": scheme.bits,
            "type": "int",
            "symmetric": scheme.is_symmetric,
            "strategy": "channel" if scheme.group_size is None else "group",
            "group_size": scheme.group_size,
            "actorder": "group" if scheme.has_order else None,
            "dynamic": False,
        }
        rows = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": rows if scheme.quantizes_rows else None,
        }
        status = {"quantization_status": "compressed", "ignore": ["lm_head"]}
        return fields | status | {"config_groups": {"group_0": group}}
    if scheme.method == "awq":
        return fields | {"bits": scheme.bits, "group_size": size, "zero_point": True}
    order = {"desc_act": scheme.has_order, "sym": scheme.is_symmetric}
    return fields | order | {"bits": scheme.bits, "group_size": size}


def write_quantized(
    directory: Path,
    scheme: Scheme,
    dense: Path,
    *,
    has_blocks: bool = True,
    is_quantized: Callable[[str], bool] = lambda name: name.endswith("proj.weight"),
) -> None:
    """Quantize the matrices of a checkpoint in place.

    Args:
        directory: The checkpoint, of float32 weights.
        scheme: How it is quantized.
        dense: Directory of another checkpoint, of the weights that the numbers stand for.
        has_blocks: Whether those weights are `Matrix.of_blocks`, not the exact ones.
        is_quantized: Whether a weight, by name, is quantized.
    """
    random, file = np.random.default_rng(7), "model.safetensors"
    dense.mkdir()
    for each in directory.iterdir():
        (dense / each.name).write_bytes(each.read_bytes())
    exact: Tensors = load_file(directory / file)
    packed: Tensors = {}
    for name, weight in list(exact.items()):
        if not is_quantized(name):
            packed[name] = weight
            continue
        matrix = quantize(weight.numpy(), scheme, random)
        numbers = matrix.of_blocks if has_blocks else matrix.exact
        exact[name] = torch.from_numpy(numbers.astype(np.float32))
        for part, tensor in _PACKERS[scheme.method](matrix, scheme).items():
            packed[name.removesuffix("weight") + part] = tensor
    save_file(packed, directory / file, metadata={"format": "pt"})
    save_file(exact, dense / file, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = _fields(scheme)
    (directory / "config.json").write_text(json.dumps(config))
