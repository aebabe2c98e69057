"""Configurations of the attention kernels, by shape and device: a table, without autotuning.

``benches/python/tune_kernels.py`` measures candidates on a GPU and prints rows for this table;
``benches/python/compile_kernels.py`` compiles every row ahead of time and checks for spills.  A row
applies to head sizes up to its own.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

if __name__.startswith("kernels."):
    raise ImportError(f"import this module as pagedserve.{__name__}: {__name__} is a second copy")

# decode_wide is the same kernel as decode, with a tile of more than 16 rows.  prefill_plain is the
# same as prefill, without window, cap and slopes: the registers that these would take allow longer
# tiles.
Kernel = Literal["decode", "decode_wide", "prefill", "prefill_plain"]


@dataclass(frozen=True, slots=True)
class Config:
    """Configuration of a kernel.

    Attributes:
        rows: packed queries and heads per tile; a power of two from 16.
        key_tile: keys per iteration; a power of two from 16.
        num_warps: warps per program.
        num_stages: tiles of keys and values in flight at a time, including the one in use.
        resident: programs per multiprocessor, limited by shared memory; used to choose decode's
            splits.
    """

    rows: int
    key_tile: int
    num_warps: int
    num_stages: int
    resident: int

    def options(self) -> dict[str, int | bool]:
        """Launch options for triton.

        Multiplication and addition are fused as in hardware; triton 3.9 warns if that is left to
        its default.
        """
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,
        }


# (kernel, minimum capability, bytes of an element, maximum head size): the newest matching row is
# used, and of several the smallest.  Plain prefill has separate rows if they differ.
TABLE: dict[tuple[Kernel, int, int, int], Config] = {
    ("decode", 8, 2, 64): Config(16, 128, 4, 3, 2),
    ("decode", 8, 2, 128): Config(16, 64, 4, 3, 2),
    ("decode", 8, 2, 256): Config(16, 32, 4, 3, 2),
    ("decode", 8, 4, 128): Config(16, 32, 8, 3, 1),
    ("decode", 8, 4, 256): Config(16, 16, 8, 2, 1),
    ("decode", 9, 2, 64): Config(16, 128, 4, 2, 2),
    ("decode", 9, 2, 128): Config(16, 32, 4, 3, 2),
    ("decode", 9, 2, 256): Config(16, 32, 4, 4, 2),
    # On Blackwell tiles of 32 keys spill with all options.
    ("decode", 10, 2, 128): Config(16, 64, 4, 4, 2),
    ("decode", 10, 4, 128): Config(16, 32, 8, 3, 1),
    # With two stages ptxas gives this one 64 registers, and spills.
    ("decode", 10, 4, 256): Config(16, 16, 8, 3, 1),
    ("decode_wide", 8, 2, 64): Config(64, 128, 8, 3, 1),
    ("decode_wide", 8, 2, 128): Config(64, 64, 8, 3, 1),
    ("decode_wide", 8, 2, 256): Config(64, 32, 8, 3, 1),
    ("decode_wide", 8, 4, 64): Config(64, 32, 8, 2, 1),
    ("decode_wide", 8, 4, 128): Config(64, 16, 16, 1, 1),
    ("decode_wide", 8, 4, 256): Config(32, 16, 8, 1, 1),
    ("decode_wide", 9, 2, 128): Config(64, 64, 4, 3, 2),
    # On Blackwell tiles of bytes spill with four warps.
    ("decode_wide", 10, 2, 128): Config(64, 64, 8, 3, 1),
    ("prefill", 8, 2, 64): Config(128, 64, 8, 3, 1),
    ("prefill", 8, 2, 128): Config(128, 32, 8, 3, 1),
    ("prefill", 8, 2, 256): Config(64, 16, 8, 3, 1),
    ("prefill", 8, 4, 128): Config(16, 16, 8, 2, 1),
    ("prefill", 8, 4, 256): Config(16, 16, 4, 2, 1),
    ("prefill", 9, 2, 64): Config(128, 128, 8, 3, 1),
    ("prefill", 9, 2, 128): Config(128, 64, 8, 3, 1),
    ("prefill", 9, 2, 256): Config(128, 32, 8, 3, 1),
    # Blackwell's products keep their sums elsewhere, and 128 keys with all options spill.
    ("prefill", 10, 2, 64): Config(128, 64, 8, 3, 1),
    ("prefill_plain", 8, 2, 256): Config(64, 32, 8, 3, 1),
    ("prefill_plain", 9, 2, 64): Config(128, 64, 4, 3, 1),
    # As many keys as elements of a value: both products have one layout, and warps exchange no data
    # in the loop.  With two stages no tile would be in flight during the products.
    ("prefill_plain", 9, 2, 128): Config(128, 128, 8, 3, 1),
    ("prefill_plain", 10, 2, 64): Config(128, 128, 8, 3, 1),
}


@cache
def config_for(
    kernel: Kernel, *, head_size: int, itemsize: int, capability: int, stores_bytes: bool = False
) -> Config:
    """Return the configuration for a shape.

    Args:
        kernel: kernel name.
        head_size: elements of a key or a value of one head, the larger.
        itemsize: bytes of an element.
        capability: the device's major compute capability; older ones get the oldest rows.
        stores_bytes: whether keys and values are bytes.  Half the keys per iteration leave
            registers for their conversion.

    Raises:
        ValueError: no row applies to the head size or the dtype.
    """
    names = (kernel, "prefill") if kernel == "prefill_plain" else (kernel,)
    fitting = {
        (-since, size, names.index(name)): config
        for (name, since, width, size), config in TABLE.items()
        if name in names and since <= max(capability, 8) and width == itemsize and size >= head_size
    }
    if not fitting:
        raise ValueError(
            f"no {kernel} kernel for heads of {head_size} elements of {itemsize} bytes; the table "
            "has heads up to 256, of 2 and 4 bytes"
        )
    config = fitting[min(fitting)]
    return replace(config, key_tile=max(config.key_tile // 2, 16)) if stores_bytes else config
