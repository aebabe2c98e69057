"""The weights of a model in its files, checked before anything is allocated.

Owns the open files, which are closed with the last reference to the checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from pagedserve.errors import ModelLoadError, UnsupportedModelError
from pagedserve.models.load.gguf_header import check_known
from pagedserve.models.load.safetensors_header import as_float32
from pagedserve.native.choice import OTHER_BACKEND
from pagedserve.native.config import DecoderConfig
from pagedserve.native.families import UnsupportedError
from pagedserve.native.gguf_file import GgufFile
from pagedserve.native.numbers import ComputeDtype, rounded
from pagedserve.native.quantized_files import convert_quantized
from pagedserve.native.safetensors_file import read_safetensors
from pagedserve.native.stored import MADE_STORAGES, STORAGES, StoredTensor
from pagedserve.native.tensor_names import GGUF_NAMES, TensorNames, safetensors_names, shapes_of
from pagedserve.regular_files import is_file, read_json

_SINGLE: Final = "model.safetensors"
_MAX_INDEX_BYTES: Final = 256 << 20
# Embedding in the files of a model without a head.
_BARE_EMBEDDING: Final = "embed_tokens.weight"
# Storages of vectors.
_PLAIN: Final = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Weights of a model by name.

    Attributes:
        model: Name of the model in errors.
        config: What the model computes, with the head that its files have.
        tensors: Tensors by name.
        names: Names in this format.
        norm_offset: Added to the weights of norms.
        has_offset: Whether the weights of norms in the files have it already.
        interleaved: Size of the heads of queries and keys, whose halves are interleaved; 0 if they
            are in order.
    """

    model: str
    config: DecoderConfig
    tensors: Mapping[str, StoredTensor]
    names: TensorNames
    norm_offset: float
    has_offset: bool
    interleaved: int

    @classmethod
    def of_gguf(cls, model: str, gguf: GgufFile, config: DecoderConfig) -> Self:
        """Weights of a GGUF file, checked; see `check` and `check_known`."""
        # A pooling model leaves out the head.
        known = {*shapes_of(config, GGUF_NAMES), GGUF_NAMES.head}
        check_known(model, gguf.tensors, known)
        return cls(
            model=model,
            config=config,
            tensors=gguf.tensors,
            names=GGUF_NAMES,
            norm_offset=config.family.norm_offset,
            has_offset=True,
            interleaved=config.head_size if config.family.interleaves else 0,
        ).check()

    @classmethod
    def of_directory(
        cls,
        model: str,
        directory: Path,
        config: DecoderConfig,
        quantization: Mapping[str, Any] | None = None,
    ) -> Self:
        """Weights of the safetensors files of a directory, checked; see `check`.

        As in transformers, a head that the files have is read, whatever the config says.

        Args:
            model: Name of the model in errors.
            directory: The directory.
            config: What the model computes.
            quantization: ``quantization_config`` of files that `convert_quantized` reads.
        """
        try:
            tensors = _tensors_of(directory)
        except UnsupportedError:
            raise
        except ValueError as error:
            raise ModelLoadError(f"model {model!r}: {error}") from error
        names = safetensors_names(config, "" if _BARE_EMBEDDING in tensors else "model.")
        if quantization is not None:
            tensors = convert_quantized(tensors, shapes_of(config, names), quantization)
        head, embedding = tensors.get(names.head), tensors.get(names.embedding)
        if config.head.is_tied and head is not None:
            if embedding is None:
                tensors[names.embedding] = head
            elif not head.equals(embedding):
                config = replace(config, head=replace(config.head, is_tied=False))
        return cls(
            model=model,
            config=config,
            tensors=tensors,
            names=names,
            norm_offset=config.family.norm_offset,
            has_offset=False,
            interleaved=0,
        ).check()

    def check(self) -> Self:
        """Check that all weights exist, have their shapes, and are of known types.

        Raises:
            ModelLoadError: Names the first weight that does not fit.
            UnsupportedModelError: Names the first weight of an unsupported type.
        """
        shapes = shapes_of(self.config, self.names)
        if missing := sorted(shapes.keys() - self.tensors.keys()):
            raise ModelLoadError(
                f"model {self.model!r}: its files lack {len(missing)} of the model's weights, the "
                f"first is {missing[0]!r}"
            )
        found = {name: self.tensors[name] for name in sorted(shapes)}
        odd = [name for name, tensor in found.items() if tensor.shape != shapes[name]]
        if odd:
            raise ModelLoadError(
                f"model {self.model!r}: {odd[0]!r} is {found[odd[0]].shape} in its files, and its "
                f"config makes it {shapes[odd[0]]}; {len(odd) - 1} more do not fit"
            )
        for name, tensor in found.items():
            known = STORAGES if len(tensor.shape) > 1 else _PLAIN
            if tensor.storage not in known and tensor.storage not in MADE_STORAGES:
                raise UnsupportedModelError(
                    f"model {self.model!r}: its files have {name!r} as {tensor.storage}; the "
                    f"native backend reads {', '.join(known)}: {OTHER_BACKEND}"
                )
        return self

    def vector(self, name: str, dtype: ComputeDtype) -> NDArray[np.float32]:
        """Read a vector, rounded to the model's dtype.

        Raises:
            ModelLoadError: A number is not finite, or the file has become shorter.
        """
        tensor = self.tensors[name]
        try:
            stored = np.frombuffer(tensor.read(), np.uint8)
        except ValueError as error:
            raise ModelLoadError(f"model {self.model!r}: {error}") from error
        numbers = as_float32(stored, tensor.storage)
        self.check_finite(name, int(np.count_nonzero(~np.isfinite(numbers))))
        return rounded(numbers, dtype)

    def norm(self, name: str, dtype: ComputeDtype) -> NDArray[np.float32]:
        """Read the weight of a norm; the offset is not rounded, as a model adds it in float32."""
        offset = np.float32(self.norm_offset)
        if not offset:
            return self.vector(name, dtype)
        weight = self.vector(name, "float32")
        return offset + rounded(weight - offset if self.has_offset else weight, dtype)

    def head_bias(self, name: str, dtype: ComputeDtype) -> NDArray[np.float32]:
        """Read the bias of queries or keys."""
        bias = self.vector(name, dtype)
        if not self.interleaved:
            return bias
        heads = bias.reshape(-1, self.interleaved // 2, 2)
        return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(-1)

    def check_finite(self, name: str, num_odd: int) -> None:
        """Refuse a tensor of which `num_odd` numbers, above 0, are not finite.

        Raises:
            ModelLoadError: There are any.
        """
        if num_odd:
            raise ModelLoadError(
                f"model {self.model!r}: {num_odd} of the {self.tensors[name].num_weights} numbers "
                f"of {name!r} are infinite or no numbers: its files are damaged, or it was saved "
                "in a dtype that is too narrow"
            )


def _tensors_of(directory: Path) -> dict[str, StoredTensor]:
    """Tensors of the files that transformers would read: one, or those of an index.

    Raises:
        UnsupportedError: There are only files of torch.
        ValueError: A file is damaged.
    """
    single, index = directory / _SINGLE, directory / f"{_SINGLE}.index.json"
    if is_file(single):
        return read_safetensors(single)
    if not is_file(index):
        raise UnsupportedError(
            f"it has no {_SINGLE}, and the native backend reads safetensors and GGUF: save it so, "
            f"or {OTHER_BACKEND}"
        )
    content: Any = read_json(index, _MAX_INDEX_BYTES)
    tensors: dict[str, StoredTensor] = {}
    weight_map: dict[str, str] = content["weight_map"]  # checked with the directory
    for shard in sorted(set(weight_map.values())):
        found = read_safetensors(directory / shard)
        if twice := found.keys() & tensors.keys():
            raise ValueError(f"{min(twice)!r} is in {shard} and in another file")
        tensors |= found
    return tensors
