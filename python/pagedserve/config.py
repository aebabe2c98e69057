"""What the user says about the model; the scheduler's configurations live in the core."""

import re
from dataclasses import dataclass
from typing import Final, Literal, get_args

from pagedserve.errors import ConfigError

ModelDtype = Literal["auto", "float32", "bfloat16", "float16"]
AttentionBackend = Literal["rust", "torch", "triton"]
CpuTier = Literal["fused", "modules", "generic"]
Quantization = Literal["int8"]
LoadFormat = Literal["auto", "dummy"]

# What fields of ModelConfig may be.
_WORDS: Final[dict[str, tuple[str | None, ...]]] = {
    "dtype": get_args(ModelDtype),
    "load_format": get_args(LoadFormat),
    "attention_backend": (*get_args(AttentionBackend), None),
    "cpu_tier": (*get_args(CpuTier), None),
    "quantization": (*get_args(Quantization), None),
}
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
            the first that there is, and in Triton's interpreter what a GPU would have.
        quantization: what weights of linear layers become while they are loaded, on the CPU:
            ``"int8"`` one byte each with a scale an output feature; everything else stays in
            ``dtype``. None leaves them as they are.
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
    quantization: Quantization | None = None
    device: str = "auto"
    load_format: LoadFormat = "auto"
    enforce_eager: bool = False
    cpu_instructions: str | None = None

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError(
                "model is empty: give 'smollm2', a directory, a .gguf file or a hub id"
            )
        for name, accepted in _WORDS.items():
            if (given := getattr(self, name)) not in accepted:
                shown = ", ".join(map(str, accepted))
                raise ConfigError(f"{name} is {given!r}: accepted are {shown}")
        if self.cpu_tier == "fused" and self.attention_backend not in (None, "rust"):
            raise ConfigError(
                "cpu_tier is 'fused', whose layers attend in Rust, and attention_backend is "
                f"{self.attention_backend!r}: give 'modules' or 'generic', or leave one of the "
                "two out"
            )
        if self.quantization is not None and self.cpu_tier == "generic":
            raise ConfigError(
                f"quantization is {self.quantization!r}, and cpu_tier is 'generic', whose linear "
                "layers are torch's: give 'fused' or 'modules', or leave one of the two out"
            )
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(
                f"device is {self.device!r}: accepted are auto, cpu, cuda, cuda:0, cuda:1 and so on"
            )
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ConfigError(f"max_model_len is {self.max_model_len}: must be at least 1, or None")
