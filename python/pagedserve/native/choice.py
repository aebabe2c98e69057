"""Choice between the backends: torch with transformers, or Rust alone.

``choose_backend`` needs the options alone; a choice that ``may_change`` is torch after all if the
native backend cannot open the model's files (`pagedserve.engine.build.load`).
"""

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

from pagedserve.config import EngineArgs
from pagedserve.config.precision import BYTE_QUANTIZATIONS
from pagedserve.errors import ConfigError
from pagedserve.extras import absent_modules

BackendName: TypeAlias = Literal["torch", "native"]

# For what the native backend does not have.
OTHER_BACKEND: Final = "give backend='torch', which needs torch and transformers"

# Device file of AMD's GPUs, which torch also calls cuda.
_AMD_DEVICE: Final = Path("/dev/kfd")


class BackendChoice(NamedTuple):
    """A backend.

    Attributes:
        name: Its name.
        reason: Why it is this one, as text.
        may_change: Whether it is the other one for a model that the native backend cannot open.
    """

    name: BackendName
    reason: str
    may_change: bool = False

    @property
    def may_be_torch(self) -> bool:
        """Whether it is torch, for some models at least."""
        return self.name == "torch" or self.may_change

    @property
    def extra(self) -> str:
        """Extra of the package whose requirements it needs."""
        return "engine" if self.may_be_torch else "cpu"


def choose_backend(args: EngineArgs) -> BackendChoice:
    """Choose the backend for the options of an engine."""
    if args.backend != "auto":
        return BackendChoice(args.backend, "as given")
    if args.quantization in BYTE_QUANTIZATIONS:
        return BackendChoice("native", f"for quantization={args.quantization!r}")
    if absent := absent_modules("torch", "transformers"):
        return BackendChoice("native", f"without {' and '.join(absent)}")
    if (refusal := next(_refusals(args), None)) is not None:
        return BackendChoice("torch", refusal)
    if args.device == "auto" and _has_gpu():
        return BackendChoice("torch", "on a GPU")
    return BackendChoice("native", "for a known family on the CPU", may_change=True)


def gives_tensors(args: EngineArgs) -> bool:
    """Whether logits processors get torch tensors: where torch may run the model too."""
    return args.backend == "torch" or (args.backend == "auto" and not absent_modules("torch"))


def may_have_gpu() -> bool:
    """Whether torch could find a GPU: without a driver's library it finds none."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return _AMD_DEVICE.exists()
    return True


def _has_gpu() -> bool:
    """Whether torch finds a GPU; imports it only where there is a driver."""
    if not may_have_gpu():
        return False
    import torch

    return torch.cuda.is_available()


def check_backend(args: EngineArgs) -> None:
    """Check that the chosen backend supports the options.

    Raises:
        ConfigError: The first option that the native backend does not support, by name.
    """
    if choose_backend(args).name == "native":
        for refusal in _refusals(args):
            raise ConfigError(f"{refusal}: leave it out, or {OTHER_BACKEND}")


def _refusals(args: EngineArgs) -> Iterator[str]:
    """Options that the native backend does not support."""
    refused = {
        "device": args.device not in ("auto", "cpu"),
        "attention_backend": args.attention_backend not in (None, "rust"),
        "cpu_kernels": args.cpu_kernels not in (None, "fused"),
        "tensor_parallel_size": args.tensor_parallel_size != 1,
        "load_format": args.load_format == "dummy",
    }
    for name, is_refused in refused.items():
        if is_refused:
            yield f"{name} is {getattr(args, name)!r}, which the native backend does not support"
