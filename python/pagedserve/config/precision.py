"""``PrecisionArgs``: options of the device, of precision and of kernels."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, ForwardRef, Literal, TypeAlias, get_args

import pagedserve.checks as checks
from pagedserve.attention.backends import AttentionBackendName
from pagedserve.config.options import option

ModelDtype: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]
Backend: TypeAlias = Literal["auto", "torch", "native"]
CpuKernels: TypeAlias = Literal["fused", "modules", "generic"]
Quantization: TypeAlias = Literal[
    "int8", "w8a8", "int4", "gguf", "gptq", "awq", "compressed-tensors"
]

# Those of directories, whose numbers are converted when the files are opened.
DIRECTORY_QUANTIZATIONS: Final[tuple[Quantization, ...]] = ("gptq", "awq", "compressed-tensors")
# Those that keep the numbers of the model's files, by the name of their format.
FILE_QUANTIZATIONS: Final[tuple[Quantization, ...]] = ("gguf", *DIRECTORY_QUANTIZATIONS)
# Those whose products are of bytes, which the native backend computes.
BYTE_QUANTIZATIONS: Final[tuple[Quantization, ...]] = ("w8a8", "int4", *FILE_QUANTIZATIONS)


_DTYPE_ALIASES: Final = {"half": "float16", "float": "float32"}

_DEVICE: Final = re.compile(r"auto|cpu|cuda(:\d+)?")


def quantization_of_files(config: object) -> str | None:
    """Value of the option that reads files with a ``quantization_config``; None if none does."""
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    return method if method in FILE_QUANTIZATIONS else None


def _device(name: str, value: object) -> str:
    if not isinstance(value, str) or not _DEVICE.fullmatch(value):
        checks.refuse(name, value, "auto, cpu, cuda, cuda:0, cuda:1 and so on")
    return value


def _dtype(name: str, value: object) -> object:
    """Check a dtype: a name, or a torch dtype, which prints as ``torch.float16``."""
    word = str(value).removeprefix("torch.")
    return checks.choice(get_args(ModelDtype))(name, _DTYPE_ALIASES.get(word, word))


@dataclass(kw_only=True)
class PrecisionArgs:
    """The options of ``EngineArgs`` for the device, precision and kernels."""

    dtype: ModelDtype = option(
        "auto",
        _dtype,
        "Data type of weights and KV cache. auto is float32 on the CPU, else the model's own.",
        concern="precision and kernels",
        converts=Literal["half", "float"] | ForwardRef("torch.dtype"),
    )
    backend: Backend = option(
        "auto",
        checks.choice(get_args(Backend)),
        "What runs the model: torch with transformers, or native, which imports neither, on the "
        "CPU for known families of decoder-only models (docs/cpu.md). auto is native on a CPU "
        "where it supports the model and the options, and where torch or transformers is not "
        "installed; else torch.",
        concern="precision and kernels",
    )
    device: str = option(
        "auto",
        _device,
        "Device that runs the model: auto (the first GPU if there is one, else the CPU), cpu, cuda "
        "or cuda:N.",
        concern="precision and kernels",
    )
    quantization: Quantization | None = option(
        None,
        checks.choice((*get_args(Quantization), None)),
        "Quantization of linear layers, on the CPU: int8 stores one byte per weight and a scale "
        "per output feature, a quarter of float32's memory; w8a8 stores as much, of "
        "turned inputs, and multiplies it with rows of bytes; int4 stores 5 bits per weight in "
        "blocks of 32; gguf keeps the blocks of a "
        "GGUF file and multiplies these with rows of bytes, and so do gptq, awq and "
        "compressed-tensors with the 4 or 8 bits of files in these formats. Both backends run "
        "int8, the native backend the others.",
        concern="precision and kernels",
        unset="none",
    )
    attention_backend: AttentionBackendName | None = option(
        None,
        checks.choice((*get_args(AttentionBackendName), None)),
        "Attention kernels: rust (on the CPU), triton (on NVIDIA GPUs; on the CPU with "
        "TRITON_INTERPRET=1), torch (anywhere) or sdpa (anywhere, with no padding between "
        "sequences).",
        concern="precision and kernels",
        unset="the first of them that supports the model and the device",
    )
    cpu_kernels: CpuKernels | None = option(
        None,
        checks.choice((*get_args(CpuKernels), None)),
        "How much of the model's code Rust kernels replace on the CPU: fused replaces whole "
        "decoder layers of known families and else acts as modules, modules replaces gated MLPs, "
        "linear layers and norms, generic nothing.",
        concern="precision and kernels",
        unset="the first of them that supports the model",
    )
    cpu_instructions: str | None = option(
        None,
        checks.optional(checks.text),
        "Vector instructions of the Rust kernels, for the whole process: portable, avx2, avx512, "
        "avx512_bf16, amx or neon.",
        concern="precision and kernels",
        unset="those of PAGEDSERVE_CPU_INSTRUCTIONS, or else the best that this CPU supports",
    )
    enforce_eager: bool = option(
        False,
        checks.flag,
        "Capture no CUDA graphs, so that decode steps on a GPU launch each kernel.",
        concern="precision and kernels",
    )

    @property
    def instructions(self) -> str | None:
        """Vector instructions that the option or the environment names."""
        return self.cpu_instructions or os.environ.get("PAGEDSERVE_CPU_INSTRUCTIONS") or None
