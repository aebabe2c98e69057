"""Choice between the backends: torch with transformers, or Rust alone."""

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple, TypeAlias

from pagedserve.config import EngineArgs
from pagedserve.errors import ConfigError
from pagedserve.extras import absent_modules

BackendName: TypeAlias = Literal["torch", "native"]

# For what the native backend does not have.
OTHER_BACKEND: Final = "give backend='torch', which needs torch and transformers"


class BackendChoice(NamedTuple):
    """A backend, and why it is this one as text."""

    name: BackendName
    reason: str

    @property
    def extra(self) -> str:
        """Extra of the package whose requirements it needs."""
        return "cpu" if self.name == "native" else "engine"


def choose_backend(args: EngineArgs) -> BackendChoice:
    """Choose the backend of an engine; "auto" is torch where it is installed."""
    if args.backend != "auto":
        return BackendChoice(args.backend, "as given")
    if absent := absent_modules("torch", "transformers"):
        return BackendChoice("native", f"without {' and '.join(absent)}")
    return BackendChoice("torch", "which is installed")


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
