"""What the user says about the model; the scheduler's configurations live in the core."""

import re
from dataclasses import dataclass
from typing import Final, Literal, get_args

from pagedserve.errors import ConfigError

ModelDtype = Literal["auto", "float32", "bfloat16", "float16"]
AttentionBackend = Literal["rust", "torch", "triton"]
CpuTier = Literal["fused", "modules", "generic"]
LoadFormat = Literal["auto", "dummy"]

_DEVICE: Final = re.compile(r"auto|cpu|cuda(:\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model to load, and how.

    Attributes:
        model: ``"smollm2"``, a directory in Hugging Face format, a ``.gguf`` file or a hub id.
        dtype: ``"auto"`` is float32 on the CPU and the model's own dtype on a GPU.
        max_model_len: most tokens of a sequence, prompt and output together; None takes what
            the model was made for.
        seed: seeds the random numbers of requests that bring no seed.
        attention_backend: ``"rust"`` (CPU; float32, bfloat16 and float16), ``"triton"`` (NVIDIA
            GPUs; on the CPU in Triton's interpreter) or ``"torch"`` (anywhere); None takes the
            first of them that can.
        cpu_tier: how much of the model's own code is exchanged for Rust kernels on the CPU:
            ``"fused"`` whole decoder layers where their family is known, else modules;
            ``"modules"`` gated layers, linear layers and norms; ``"generic"`` nothing. None takes
            the first that there is.
        device: ``"auto"`` (the first GPU if there is one, else the CPU), ``"cpu"``, ``"cuda"`` or
            ``"cuda:N"``.
        load_format: ``"auto"`` reads the weights; ``"dummy"`` makes them up from the seed, for
            measuring, and needs a directory with a ``config.json`` alone.
        enforce_eager: capture no CUDA graphs.
        cpu_instructions: vector instructions that Rust kernels use in this process, one of
            ``pagedserve._core.cpu_instruction_sets()``; None is the best of this CPU.

    Raises:
        ConfigError: for a value that no model could be loaded with.
    """

    model: str
    dtype: ModelDtype = "auto"
    max_model_len: int | None = None
    seed: int = 0
    attention_backend: AttentionBackend | None = None
    cpu_tier: CpuTier | None = None
    device: str = "auto"
    load_format: LoadFormat = "auto"
    enforce_eager: bool = False
    cpu_instructions: str | None = None

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError(
                "model is empty: give 'smollm2', a directory, a .gguf file or a hub id"
            )
        if self.dtype not in get_args(ModelDtype):
            accepted = ", ".join(get_args(ModelDtype))
            raise ConfigError(f"dtype is {self.dtype!r}: accepted are {accepted}")
        if self.attention_backend not in (None, *get_args(AttentionBackend)):
            accepted = ", ".join(get_args(AttentionBackend))
            raise ConfigError(
                f"attention_backend is {self.attention_backend!r}: accepted are {accepted}, None"
            )
        if self.cpu_tier not in (None, *get_args(CpuTier)):
            accepted = ", ".join(get_args(CpuTier))
            raise ConfigError(f"cpu_tier is {self.cpu_tier!r}: accepted are {accepted}, None")
        if self.cpu_tier == "fused" and self.attention_backend not in (None, "rust"):
            raise ConfigError(
                "cpu_tier is 'fused', whose layers attend in Rust, and attention_backend is "
                f"{self.attention_backend!r}: give 'modules' or 'generic', or leave one of the "
                "two out"
            )
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(
                f"device is {self.device!r}: accepted are auto, cpu, cuda, cuda:0, cuda:1 and so on"
            )
        if self.load_format not in get_args(LoadFormat):
            accepted = ", ".join(get_args(LoadFormat))
            raise ConfigError(f"load_format is {self.load_format!r}: accepted are {accepted}")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ConfigError(f"max_model_len is {self.max_model_len}: must be at least 1, or None")
