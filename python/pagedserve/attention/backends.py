"""Registry of the attention backends.

Each backend is the object ``BACKEND`` of the module beside this one that has its name.  Such a
module is imported when its backend is first requested, so importing this one is cheap and imports
no torch.
"""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Literal, TypeAlias, cast, get_args

from pagedserve.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from pagedserve.attention.backend import AttentionBackend

# The registry: the first that supports a model and its device is the default.
AttentionBackendName: TypeAlias = Literal["rust", "triton", "torch", "sdpa"]


@cache
def get_backend(name: AttentionBackendName) -> "AttentionBackend":
    """The backend of a name."""
    return cast("AttentionBackend", import_module(f"pagedserve.attention.{name}").BACKEND)


def choose_backend(
    requested: AttentionBackendName | None, device: "torch.device", dtype: "torch.dtype"
) -> "AttentionBackend":
    """Return the requested backend, or the first that supports such tensors.

    Raises:
        ConfigError: The requested one does not; the message gives the reason.
    """
    if requested is None:
        found = map(get_backend, get_args(AttentionBackendName))
        return next(backend for backend in found if backend.obstacle(device, dtype) is None)
    backend = get_backend(requested)
    obstacle = backend.obstacle(device, dtype)
    if obstacle is not None:
        raise ConfigError(
            f"attention_backend is {requested!r}, which {obstacle}: give another or leave it out"
        )
    return backend
