"""Memory-efficient reading of a checkpoint's tensors by transformers.

It maps whole files.  A touched page stays in this process's memory until the last tensor of its
file is freed, so a model whose modules are replaced, or whose weights are converted, would
temporarily use twice its memory.  Tensors that are read instead have separate memory, which is
freed with their module.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers.modeling_utils
from safetensors import safe_open


@contextmanager
def weights_read() -> Iterator[None]:
    """A context in which transformers reads tensors of safetensors files without mapping."""
    module: Any = transformers.modeling_utils
    module.safe_open = _open
    try:
        yield
    finally:
        module.safe_open = safe_open


def _open(*positional: Any, **named: Any) -> Any:
    return safe_open(*positional, **{**named, "backend": "pread"})
