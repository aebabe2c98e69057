"""From the engine's arguments to a model that is known to run on paged attention."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from pagedserve.attention.backends import choose_backend, describe
from pagedserve.attention.interface import ATTENTION_NAME, register
from pagedserve.cache.engine import LayerShape
from pagedserve.collector import collector_paused
from pagedserve.config import AttentionBackend, EngineArgs, LoadFormat
from pagedserve.errors import ConfigError, ModelLoadError, UnsupportedModelError
from pagedserve.host_ops.capabilities import use_instructions
from pagedserve.models.adapt import adapt, attention_to_build_with
from pagedserve.models.device import choose_device
from pagedserve.models.dummy import dummy_model
from pagedserve.models.files import (
    ModelFiles,
    architecture_of,
    find_model_files,
    first_line,
    quiet_transformers,
)
from pagedserve.models.fused.cpu.replace import replace_for_cpu, weight_bytes
from pagedserve.models.fused.gpu.replace import replace_for_gpu
from pagedserve.models.limits import check_max_model_len, derive_max_model_len, eos_token_ids
from pagedserve.models.probe import probe_model, vocab_size
from pagedserve.models.probe_cache import ProbeCacheEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that is ready to run, and what is known of it.

    Attributes:
        model: runs on a flat ``[1, T]`` batch with our attention function.
        layers: what each attention call stores, in the order of the calls.
        vocab_size: rows of the embedding; token ids are below it.
        max_model_len: most tokens of a sequence.
        eos_token_ids: tokens that end a sequence.
        dtype: of the weights, and of keys and values.
        device: of the model.
        attention_backend: computes attention.
        weight_bytes: bytes of the weights; shared ones count once, unless one of them is packed.
        replaced_modules: how many modules of which kind were replaced by faster ones, for people.
    """

    model: PreTrainedModel
    layers: tuple[LayerShape, ...]
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    attention_backend: AttentionBackend
    weight_bytes: int
    replaced_modules: str

    @property
    def num_layers(self) -> int:
        """Attention layers."""
        return len(self.layers)

    def describe_backends(self) -> str:
        """One line for people: who computes attention and everything else."""
        backend = describe(self.attention_backend)
        return f"attention: {backend}; replaced modules: {self.replaced_modules}"


def load_model(config: EngineArgs, device: torch.device | None = None) -> LoadedModel:
    """Load a model and check that paged attention runs it.

    Args:
        config: which model, and how.
        device: where to; None is what the config names.

    Raises:
        ModelLoadError: if there is no such model, or its files are not whole.
        UnsupportedModelError: if its architecture cannot be run.
        ConfigError: if max_model_len exceeds what the model can do, the CPU lacks the
            instructions, the weights cannot be quantized, or there is no such device.
    """
    device = device or choose_device(config.device)
    if config.quantization is not None and device.type != "cpu":
        raise ConfigError(
            f"quantization is {config.quantization!r}, which is for the CPU; the model's device is "
            f"{device}: leave it out"
        )
    use_instructions(config.cpu_instructions)
    register()
    with collector_paused(), quiet_transformers():
        files = find_model_files(config.model, config.load_format)
        text_config = files.hf_config.get_text_config()
        max_model_len = derive_max_model_len(text_config, config.max_model_len)
        dtype = _dtype(config, text_config, device)
        backend = choose_backend(config.attention_backend, device, dtype)
        if config.load_format == "dummy":
            model = _make_up_weights(files, dtype, device, seed=config.seed)
        else:
            model = _load_weights(files, dtype, config.load_format)
        cast(nn.Module, model).to(device).eval()
        adapt(model)
        how = (dtype, device, describe(backend), max_model_len)
        cached = ProbeCacheEntry.of(files.directory, *how)
        probed = cached.load()
        if probed is None:
            probed = probe_model(model, max_model_len=max_model_len, backend=backend)
            cached.save(probed)
        num_embeddings = vocab_size(model)
        replaced_modules = _replace_modules(model, config, device, backend)
    return LoadedModel(
        model=model,
        layers=probed.layers,
        vocab_size=num_embeddings,
        max_model_len=check_max_model_len(
            max_model_len if config.max_model_len else None,
            min(max_model_len, probed.max_exact_len),
            "the length of the chunks that its attention is cut into",
        ),
        eos_token_ids=eos_token_ids(model.generation_config, text_config),
        dtype=dtype,
        device=device,
        attention_backend=backend,
        weight_bytes=weight_bytes(model),
        replaced_modules=replaced_modules,
    )


def _replace_modules(
    model: PreTrainedModel, config: EngineArgs, device: torch.device, backend: AttentionBackend
) -> str:
    """Replace modules as the device wants it; says what was replaced.

    In Triton's interpreter the model gets a GPU's modules, unless an option names the CPU's.
    """
    names_cpu = config.cpu_kernels is not None or config.quantization is not None
    if device.type != "cpu" or (backend == "triton" and not names_cpu):
        return replace_for_gpu(model, backend)
    kernels = config.cpu_kernels or ("fused" if backend == "rust" else "modules")
    return replace_for_cpu(model, kernels, config.quantization)


def _load_weights(
    files: ModelFiles, dtype: torch.dtype, load_format: LoadFormat
) -> PreTrainedModel:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            files.directory,
            dtype=dtype,
            attn_implementation=attention_to_build_with(files.hf_config),
            output_loading_info=True,
            use_safetensors=True if load_format == "safetensors" else None,
            trust_remote_code=False,
        )
    except Exception as error:  # transformers raises many unrelated types here
        raise _load_error(files, error) from error
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelLoadError(
            f"model {files.name!r}: its files lack {len(missing)} of the model's weights, the "
            f"first is {missing[0]!r}"
        )
    return cast(PreTrainedModel, model)


def _make_up_weights(
    files: ModelFiles, dtype: torch.dtype, device: torch.device, *, seed: int
) -> PreTrainedModel:
    try:
        attention = attention_to_build_with(files.hf_config)
        return dummy_model(
            files.hf_config, attention=attention, dtype=dtype, device=device, seed=seed
        )
    except Exception as error:  # transformers raises many unrelated types here
        raise _load_error(files, error) from error


def _load_error(files: ModelFiles, error: Exception) -> ModelLoadError:
    if ATTENTION_NAME in str(error) or "Unrecognized configuration" in str(error):
        return UnsupportedModelError(
            f"architecture {architecture_of(files.hf_config)} cannot be run: it is no causal "
            "language model that attends through transformers' attention interface "
            f"({first_line(error)})"
        )
    return ModelLoadError(
        f"model {files.name!r}: its weights cannot be loaded: {first_line(error)}"
    )


def _dtype(config: EngineArgs, hf_config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return cast(torch.dtype, getattr(torch, config.dtype))
    # On the CPU, torch's half precision is slower than float32 and less exact.
    saved = getattr(hf_config, "dtype", None)
    return saved if device.type != "cpu" and isinstance(saved, torch.dtype) else torch.float32
