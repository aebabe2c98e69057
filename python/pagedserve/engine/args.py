"""What an engine is made from: one definition for Python and for the command line."""

import argparse
import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Self, TypeAlias, get_args

from pagedserve.config import (
    AttentionBackend,
    CpuTier,
    LoadFormat,
    ModelConfig,
    ModelDtype,
    Quantization,
)
from pagedserve.errors import ConfigError

PreemptionMode: TypeAlias = Literal["recompute", "swap"]

_FLAGS: Final = (bool, bool | None)
# Fields of these types are names; of the others all that are no flags are counts, but for
# ``swap_space`` and ``gpu_memory_utilization``.
_NAMES: Final = (
    str,
    ModelDtype,
    PreemptionMode | None,
    AttentionBackend | None,
    CpuTier | None,
    Quantization | None,
    LoadFormat,
    str | None,
)
# The least of a count; of any other it is 1.
_LEAST: Final = {"seed": 0, "num_lookahead_slots": 0, "max_model_len": 2}

_UNITS: Final = {"": 1} | {
    prefix + kind: base**power
    for kind, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("kmgt", start=1)
}


def parse_bytes(text: str) -> int:
    """Bytes from "1073741824", "512MiB", "2G" or "1.5GiB".

    Raises:
        argparse.ArgumentTypeError: Another form.
    """
    number = text.lower().replace(" ", "").removesuffix("b")
    unit = number.lstrip("0123456789.")
    digits = number.removesuffix(unit)
    is_number = digits.replace(".", "", 1).isdecimal() and math.isfinite(float(digits))
    if unit not in _UNITS or not is_number:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of bytes; give e.g. 512MiB or 2G (k, M, G, T, Ki, Mi, Gi, Ti)"
        )
    return int(float(digits) * _UNITS[unit])


def _option(text: str, **argument: object) -> dict[str, object]:
    return {"help": text, **argument}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """Everything that decides how an engine is built; checked when made.

    Attributes:
        model: "smollm2", a local directory in Hugging Face format, a .gguf file, or a hub id.
        dtype: Of weights and KV cache; "auto" is float32 on the CPU, else the model's own.
        max_model_len: Tokens of a sequence, prompt and output, at least 2; None is what the model
            allows.
        device: "auto" (the first GPU if there is one, else the CPU), "cpu", "cuda" or "cuda:N".
        num_gpu_blocks: KV blocks; None takes what ``kv_cache_memory`` holds.
        block_size: Tokens of a KV block.
        max_num_seqs: Sequences of a step.
        max_num_batched_tokens: Tokens of a step; None is 512 with chunked prefill, otherwise 2048
            or ``max_model_len`` if more, since a prompt is computed in one step then; in either
            case no fewer than ``max_num_seqs``.
        seed: For the random numbers of requests that have no seed of their own.
        kv_cache_memory: Bytes of the KV cache; None is 1 GiB on the CPU, less where less is free,
            and on a GPU what ``gpu_memory_utilization`` leaves.
        gpu_memory_utilization: Share of the GPU's whole memory that weights, activations, CUDA
            graphs and KV cache take together, above 0, to 1; None is 0.9.  The largest step is
            tried out to learn what activations need.  On the CPU an error.
        enable_prefix_caching: Keep the KV blocks of what was computed, for later prompts that
            begin with the same tokens.
        enable_chunked_prefill: Compute long prompts in parts, beside the tokens of others.
        swap_space: GiB of host memory for the KV blocks of preempted requests; None is as much as
            the KV cache holds, at most 4 and at most half of the host memory that is free.
        preemption_mode: What happens to the KV blocks of a request that must give its place to
            others: "recompute" drops them, "swap" moves them to the host.  None recomputes
            requests of one sequence and swaps those of several.
        num_lookahead_slots: KV slots kept free behind each running sequence, for several tokens
            in one step.
        attention_backend: "rust" (on the CPU, in float32, bfloat16 and float16), "triton" (on
            NVIDIA GPUs; on the CPU in Triton's interpreter) or "torch"; None takes rust or triton
            where it can.
        cpu_tier: How much of the model's own code is exchanged for Rust kernels on the CPU:
            "fused" is whole decoder layers where their family is known, "modules" is gated layers,
            linear layers and norms, "generic" is nothing; None takes the first that there is.
        quantization: "int8" makes the weights of linear layers bytes with a scale an output
            feature, on the CPU: a quarter of float32's memory; None leaves them as they are.
        load_format: "auto" reads the weights; "dummy" makes them up, from a directory that needs
            nothing but a config.json.
        enforce_eager: Capture no CUDA graphs; decode steps on a GPU are then launched kernel by
            kernel.
        async_scheduling: Decide and launch the next step while the tokens of one are still on
            their way, wherever nothing depends on them; a sequence that turns out to have ended
            runs once more for nothing.  None does so on a GPU.
        cpu_instructions: Vector instructions of the Rust kernels: "portable", "avx2", "avx512" or
            "avx512_bf16"; None is the best of this CPU.  It holds for the process.

    Raises:
        ConfigError: A value that cannot be; the message says what is accepted.
    """

    model: str = field(metadata=_option("smollm2, a local directory, a .gguf file or a hub id"))
    dtype: ModelDtype = field(
        default="auto",
        metadata=_option("of weights and KV cache", choices=get_args(ModelDtype)),
    )
    device: str = field(default="auto", metadata=_option("auto, cpu, cuda or cuda:N"))
    max_model_len: int | None = field(
        default=None,
        metadata=_option("tokens of a sequence, prompt and output (default: the model's)"),
    )
    num_gpu_blocks: int | None = field(
        default=None, metadata=_option("KV blocks (default: from --kv-cache-memory)")
    )
    block_size: int = field(default=16, metadata=_option("tokens of a KV block"))
    max_num_seqs: int = field(default=256, metadata=_option("sequences of a step"))
    max_num_batched_tokens: int | None = field(
        default=None,
        metadata=_option("tokens of a step (default: 2048 or the model length, 512 with chunks)"),
    )
    seed: int = field(
        default=0, metadata=_option("for the random numbers of requests without a seed")
    )
    kv_cache_memory: int | None = field(
        default=None,
        metadata=_option(
            "bytes of the KV cache, as in 512MiB (default: 1GiB, less where less is free)",
            type=parse_bytes,
        ),
    )
    gpu_memory_utilization: float | None = field(
        default=None,
        metadata=_option("share of the GPU's memory to take (default: 0.9)", type=float),
    )
    enable_prefix_caching: bool = field(
        default=False, metadata=_option("keep KV blocks for prompts that begin alike")
    )
    enable_chunked_prefill: bool = field(
        default=False, metadata=_option("compute long prompts in parts")
    )
    swap_space: float | None = field(
        default=None,
        metadata=_option(
            "GiB of host memory for preempted requests (default: as the KV cache, at most 4)",
            type=float,
        ),
    )
    preemption_mode: PreemptionMode | None = field(
        default=None,
        metadata=_option(
            "what becomes of the KV blocks of preempted requests (default: by their sequences)",
            choices=get_args(PreemptionMode),
        ),
    )
    num_lookahead_slots: int = field(
        default=0, metadata=_option("KV slots kept free behind each running sequence")
    )
    attention_backend: AttentionBackend | None = field(
        default=None,
        metadata=_option(
            "who computes attention (default: rust on the CPU, triton on a GPU)",
            choices=get_args(AttentionBackend),
        ),
    )
    cpu_tier: CpuTier | None = field(
        default=None,
        metadata=_option(
            "how much of the model is exchanged for Rust kernels (default: as much as can be)",
            choices=get_args(CpuTier),
        ),
    )
    quantization: Quantization | None = field(
        default=None,
        metadata=_option(
            "what weights of linear layers become on the CPU (default: they stay as they are)",
            choices=get_args(Quantization),
        ),
    )
    load_format: LoadFormat = field(
        default="auto",
        metadata=_option("dummy makes weights up, for measuring", choices=get_args(LoadFormat)),
    )
    enforce_eager: bool = field(default=False, metadata=_option("capture no CUDA graphs"))
    async_scheduling: bool | None = field(
        default=None,
        metadata=_option(
            "launch a step before the tokens of the last are known (default: on GPUs)"
        ),
    )
    cpu_instructions: str | None = field(
        default=None,
        metadata=_option("vector instructions of the Rust kernels (default: the best of this CPU)"),
    )

    def __post_init__(self) -> None:
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if one.type in _FLAGS:
                _check_flag(one.name, value, optional=one.default is None)
            elif one.name == "swap_space":
                _check_size(one.name, value)
            elif one.name == "gpu_memory_utilization":
                _check_share(one.name, value)
            elif one.type in _NAMES:
                _check_name(one.name, value, optional=one.default is None)
            else:
                _check_integer(
                    one.name, value, low=_LEAST.get(one.name, 1), optional=one.default is None
                )
        if self.preemption_mode not in (None, *get_args(PreemptionMode)):
            raise ConfigError(
                f"preemption_mode is {self.preemption_mode!r}; it must be recompute, swap or None"
            )
        _ = self.model_config  # looks at what the names say

    @property
    def model_config(self) -> ModelConfig:
        """The part of the executor."""
        return ModelConfig(
            model=self.model,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            seed=self.seed,
            attention_backend=self.attention_backend,
            cpu_tier=self.cpu_tier,
            quantization=self.quantization,
            device=self.device,
            load_format=self.load_format,
            enforce_eager=self.enforce_eager,
            cpu_instructions=self.cpu_instructions,
        )

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> None:
        """Give a parser one option for each field."""
        group = parser.add_argument_group("engine")
        for one in dataclasses.fields(cls):
            argument: dict[str, Any] = {"type": str if one.type in _NAMES else int}
            if one.type in _FLAGS:
                argument = {"action": argparse.BooleanOptionalAction}
            argument |= one.metadata
            if one.default is dataclasses.MISSING:
                argument["required"] = True
            else:
                argument["default"] = one.default
            if one.default not in (None, False, dataclasses.MISSING):
                argument["help"] += " (default: %(default)s)"
            group.add_argument(f"--{one.name.replace('_', '-')}", **argument)

    @classmethod
    def from_cli_args(cls, namespace: argparse.Namespace) -> Self:
        """The arguments that a parser with ``add_cli_args`` found."""
        return cls(**{one.name: getattr(namespace, one.name) for one in dataclasses.fields(cls)})


def _check_name(name: str, value: object, *, optional: bool) -> None:
    if not isinstance(value, str) and not (optional and value is None):
        accepted = "a string" + (", or None" if optional else "")
        raise ConfigError(f"{name} is {value!r}; it must be {accepted}")


def _check_flag(name: str, value: object, *, optional: bool) -> None:
    if not isinstance(value, bool) and not (optional and value is None):
        accepted = "True, False or None" if optional else "True or False"
        raise ConfigError(f"{name} is {value!r}; it must be {accepted}")


def _check_size(name: str, value: object) -> None:
    is_size = isinstance(value, int | float) and 0 <= value < math.inf
    if value is not None and (not is_size or isinstance(value, bool)):
        raise ConfigError(f"{name} is {value!r}; it must be a number of GiB, at least 0, or None")


def _check_share(name: str, value: object) -> None:
    is_share = isinstance(value, int | float) and 0 < value <= 1
    if value is not None and (not is_share or isinstance(value, bool)):
        raise ConfigError(f"{name} is {value!r}; it must be a number above 0, at most 1, or None")


def _check_integer(name: str, value: object, *, low: int, optional: bool) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        accepted = f"an integer, at least {low}" + (", or None" if optional else "")
        raise ConfigError(f"{name} is {value!r}; it must be {accepted}")
