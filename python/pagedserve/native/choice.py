"""Choice between the backends: torch with transformers, or Rust alone."""

import logging
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Final, Literal, TypeAlias

from pagedserve.config import EngineArgs
from pagedserve.errors import ConfigError

logger = logging.getLogger(__name__)

BackendName: TypeAlias = Literal["torch", "native"]

_TORCH: Final = ("torch", "transformers")


def backend_of(args: EngineArgs) -> BackendName:
    """Backend of an engine; logs which one and why.

    "auto" is torch where it is installed.

    Raises:
        ConfigError: An option that the native backend does not support, by name.
    """
    backend, reason = args.backend, "as given"
    if backend == "auto":
        absent = [name for name in _TORCH if not _is_installed(name)]
        backend = "native" if absent else "torch"
        reason = f"without {' and '.join(absent)}" if absent else "which is installed"
    logger.info("backend: %s, %s", backend, reason)
    if backend == "native":
        for refusal in _refusals(args):
            raise ConfigError(
                f"{refusal}: leave it out, or give backend='torch', which needs torch and "
                "transformers"
            )
    return backend


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # a finder that refuses it, a module without a spec
        return False


def _refusals(args: EngineArgs) -> Iterator[str]:
    """Options that the native backend does not support."""
    drafts = args.speculative_config
    refused = {
        "device": args.device not in ("auto", "cpu"),
        "attention_backend": args.attention_backend not in (None, "rust"),
        "cpu_kernels": args.cpu_kernels not in (None, "fused"),
        "tensor_parallel_size": args.tensor_parallel_size != 1,
        "enable_lora": args.enable_lora,
        "load_format": args.load_format == "dummy",
        "runner": args.runner == "pooling",
        "speculative_config": drafts is not None and drafts.method == "draft_model",
    }
    for name, is_refused in refused.items():
        if is_refused:
            yield f"{name} is {getattr(args, name)!r}, which the native backend does not support"
