"""Quantized GGUF files: written from others, and compared with them.

``blocks`` rounds weights, ``targets`` chooses the format of each matrix, ``gguf_copy`` writes the
file, ``likelihood`` measures what it costs, and ``run`` does all of it for a command line.
"""

from typing import Literal, TypeAlias

# What a file may be quantized to; see `pagedserve.quantize.targets`.
TargetName: TypeAlias = Literal["w8a8", "int4"]
