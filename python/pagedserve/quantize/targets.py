"""What a file is quantized to: a format for each matrix."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from pagedserve.native.checkpoint import Checkpoint
from pagedserve.native.rounding import LARGEST_FLOAT16
from pagedserve.native.stored import BLOCK_WEIGHTS, STORAGES, StoredTensor
from pagedserve.native.tensor_names import shapes_of
from pagedserve.quantize import TargetName


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A format of blocks that weights are rounded to.

    Attributes:
        name: Its name, one of the `STORAGES`.
        number: Its number in GGUF files.
        largest: Largest magnitude of a weight, since scales are float16.
    """

    name: Literal["Q8_0", "Q4_1"]
    number: int
    largest: float

    def num_bytes(self, num_weights: int) -> int:
        """Bytes of whole blocks."""
        return num_weights // BLOCK_WEIGHTS * STORAGES[self.name][1]


_BYTES: Final = BlockFormat("Q8_0", 8, 127 * float(LARGEST_FLOAT16))
_HALVES: Final = BlockFormat("Q4_1", 3, float(LARGEST_FLOAT16))


@dataclass(frozen=True, slots=True)
class Target:
    """Formats of a file.

    Attributes:
        of_layers: Format of the matrices of decoder layers.
        of_ends: Format of embedding and head, which lose more.
        keeps_smaller: Whether matrices of smaller blocks are kept; else they become larger, and
            faster to multiply with several rows.
        file_type: Value of ``general.file_type``.
    """

    of_layers: BlockFormat
    of_ends: BlockFormat
    keeps_smaller: bool
    file_type: int

    def formats(self, checkpoint: Checkpoint) -> Iterator[tuple[StoredTensor, BlockFormat | None]]:
        """Each tensor of a file with its new format; None if it is copied unchanged."""
        names = checkpoint.names
        matrices = {
            name
            for name, shape in shapes_of(checkpoint.config, names).items()
            if len(shape) > 1 and not shape[-1] % BLOCK_WEIGHTS
        }
        for name, tensor in checkpoint.tensors.items():
            chosen = self.of_ends if name in (names.embedding, names.head) else self.of_layers
            is_kept = tensor.storage == chosen.name or (
                self.keeps_smaller and tensor.num_bytes <= chosen.num_bytes(tensor.num_weights)
            )
            yield tensor, None if is_kept or name not in matrices else chosen


TARGETS: Final[dict[TargetName, Target]] = {
    "w8a8": Target(_BYTES, _BYTES, keeps_smaller=False, file_type=7),
    "int4": Target(_HALVES, _BYTES, keeps_smaller=True, file_type=3),
}
