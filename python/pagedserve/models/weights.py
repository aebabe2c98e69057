"""How transformers gets at a checkpoint's tensors.

It maps whole files.  A mapped page that was touched stays this process's memory until the last
tensor of its file is gone, so a model whose modules are replaced, or whose weights become another
dtype, would for a while be there twice.  Read, each tensor is memory of its own, which goes with
its module.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers.modeling_utils
from safetensors import safe_open


@contextmanager
def weights_read() -> Iterator[None]:
    """Transformers reads tensors of safetensors files here, in the place of mapping the files."""
    module: Any = transformers.modeling_utils
    module.safe_open = _open
    try:
        yield
    finally:
        module.safe_open = safe_open


def _open(*positional: Any, **named: Any) -> Any:
    return safe_open(*positional, **{**named, "backend": "pread"})
