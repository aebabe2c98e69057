"""From a ModelConfig to a model that is known to run on paged attention."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pagedserve.attention.backends import choose_backend, describe
from pagedserve.attention.interface import ATTENTION_NAME, register
from pagedserve.cache.engine import LayerShape
from pagedserve.collector import collector_paused
from pagedserve.config import AttentionBackend, ModelConfig
from pagedserve.cpu.swap import exchange, use_instructions, weight_bytes
from pagedserve.errors import ConfigError, ModelLoadError, PagedServeError, UnsupportedModelError
from pagedserve.gpu.swap import exchange as exchange_for_gpu
from pagedserve.models.convert import converted_directory
from pagedserve.models.device import choose_device
from pagedserve.models.dummy import dummy_model, has_tokenizer, number_tokenizer
from pagedserve.models.known import ProbeResult
from pagedserve.models.limits import check_max_model_len, derive_max_model_len, eos_token_ids
from pagedserve.models.probe import (
    AttentionProfile,
    architecture,
    check_logits,
    profile_attention,
    vocab_size,
)
from pagedserve.models.registry import resolve_model


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that is ready to run, and what the engine needs to know of it.

    Attributes:
        model: runs on a flat ``[1, T]`` batch with our attention function.
        tokenizer: of the model.
        hf_config: the text model's config.
        layers: what each attention call stores, in the order of the calls.
        vocab_size: rows of the embedding; token ids are below it.
        max_model_len: most tokens of a sequence.
        eos_token_ids: tokens that end a sequence.
        dtype: of the weights, and of keys and values.
        device: of the model.
        attention_backend: who computes attention.
        weight_bytes: bytes of the weights; shared ones count once, unless one of them is packed.
        modules: how many of the model's modules are exchanged for faster ones, for people.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    hf_config: PreTrainedConfig
    layers: tuple[LayerShape, ...]
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    attention_backend: AttentionBackend
    weight_bytes: int
    modules: str

    @property
    def num_layers(self) -> int:
        """Attention layers."""
        return len(self.layers)

    def describe_backends(self) -> str:
        """One line for people: who computes attention and everything else."""
        return f"attention: {describe(self.attention_backend)}; exchanged modules: {self.modules}"


def load_model(config: ModelConfig, device: torch.device | None = None) -> LoadedModel:
    """Load a model with its tokenizer and check that paged attention runs it.

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
    is_dummy = config.load_format == "dummy"
    source = resolve_model(config.model, needs_weights=not is_dummy)
    register()
    with _quiet(), collector_paused():
        directory = converted_directory(source.path) if source.is_gguf else source.path
        hf_config = _load_config(source.name, directory)
        text_config = hf_config.get_text_config()
        max_model_len = derive_max_model_len(text_config, config.max_model_len)
        dtype = _dtype(config, text_config, device)
        backend = choose_backend(config.attention_backend, device, dtype)
        if is_dummy and not has_tokenizer(directory):
            tokenizer = number_tokenizer(text_config.vocab_size)
        else:
            tokenizer = _load_tokenizer(source.name, directory)
        if is_dummy:
            model = _make_up_weights(source.name, hf_config, dtype, device, seed=config.seed)
        else:
            model = _load_weights(source.name, directory, hf_config, dtype)
        cast(nn.Module, model).to(device).eval()
        known = ProbeResult.of(directory, dtype, device, describe(backend), max_model_len)
        profile = known.recall()
        if profile is None:
            profile = _checked_profile(model, max_model_len, backend)
            known.keep(profile)
        num_embeddings = vocab_size(model)
        modules = _exchange(model, config, device, backend)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        hf_config=text_config,
        layers=profile.layers,
        vocab_size=num_embeddings,
        max_model_len=check_max_model_len(
            max_model_len if config.max_model_len else None,
            min(max_model_len, profile.max_exact_len),
            "the length of the chunks that its attention is cut into",
        ),
        eos_token_ids=eos_token_ids(model.generation_config, text_config),
        dtype=dtype,
        device=device,
        attention_backend=backend,
        weight_bytes=weight_bytes(model),
        modules=modules,
    )


def _exchange(
    model: PreTrainedModel, config: ModelConfig, device: torch.device, backend: AttentionBackend
) -> str:
    """Exchange modules by device; interpreted Triton has a GPU's unless the CPU's are named."""
    is_named = config.cpu_tier is not None or config.quantization is not None
    if device.type != "cpu" or (backend == "triton" and not is_named):
        return exchange_for_gpu(model, backend)
    tier = config.cpu_tier or ("fused" if backend == "rust" else "modules")
    return exchange(model, tier, config.quantization)


def _checked_profile(
    model: PreTrainedModel, max_model_len: int, backend: AttentionBackend
) -> AttentionProfile:
    try:
        profile = profile_attention(model, max_model_len=max_model_len)
        length = min(max_model_len, profile.max_exact_len)
        check_logits(model, profile.layers, length, backend)
    except PagedServeError:
        raise
    except Exception as error:  # whatever a foreign model does with a flat batch
        raise UnsupportedModelError(
            f"architecture {architecture(model)} cannot be run: a trial forward over paged "
            f"attention failed with {type(error).__name__}: {error}"
        ) from error
    return profile


def _load_config(name: str, directory: Path) -> PreTrainedConfig:
    try:
        config = cast(
            PreTrainedConfig, AutoConfig.from_pretrained(directory, trust_remote_code=False)
        )
    except KeyError as error:
        raise UnsupportedModelError(f"model {name!r}: unknown model_type {error}") from error
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(
            f"model {name!r}: transformers {transformers.__version__} knows no such architecture: "
            f"{_first_line(error)}"
        ) from error
    if config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"architecture {_names(config)} cannot be run: it is an encoder-decoder; accepted are "
            "decoder-only models"
        )
    return config


def _load_tokenizer(name: str, directory: Path) -> PreTrainedTokenizerBase:
    try:
        return cast(
            PreTrainedTokenizerBase,
            AutoTokenizer.from_pretrained(directory, trust_remote_code=False),
        )
    except Exception as error:  # transformers raises many unrelated types here
        raise ModelLoadError(
            f"model {name!r} has no tokenizer that transformers can load ({_first_line(error)}); "
            "accepted are tokenizer.json or the files of a tokenizer class beside config.json"
        ) from error


def _load_weights(
    name: str, directory: Path, hf_config: PreTrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
            trust_remote_code=False,
        )
    except Exception as error:  # transformers raises many unrelated types here
        raise _load_error(name, hf_config, error) from error
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelLoadError(
            f"model {name!r}: its files lack {len(missing)} of the model's weights, the first is "
            f"{missing[0]!r}"
        )
    return cast(PreTrainedModel, model)


def _make_up_weights(
    name: str,
    hf_config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    seed: int,
) -> PreTrainedModel:
    try:
        return dummy_model(
            hf_config, attention=ATTENTION_NAME, dtype=dtype, device=device, seed=seed
        )
    except Exception as error:  # transformers raises many unrelated types here
        raise _load_error(name, hf_config, error) from error


def _load_error(name: str, hf_config: PreTrainedConfig, error: Exception) -> ModelLoadError:
    if ATTENTION_NAME in str(error) or "Unrecognized configuration" in str(error):
        return UnsupportedModelError(
            f"architecture {_names(hf_config)} cannot be run: it is no causal language model "
            f"that attends through transformers' attention interface ({_first_line(error)})"
        )
    return ModelLoadError(f"model {name!r}: its weights cannot be loaded: {_first_line(error)}")


def _dtype(config: ModelConfig, hf_config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return cast(torch.dtype, getattr(torch, config.dtype))
    # On the CPU, torch's half precision is slower than float32 and less exact.
    own = getattr(hf_config, "dtype", None)
    return own if device.type != "cpu" and isinstance(own, torch.dtype) else torch.float32


def _names(config: PreTrainedConfig) -> str:
    classes = ", ".join(getattr(config, "architectures", None) or ["unnamed"])
    return f"{classes} (model_type {config.model_type!r})"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and warnings, which are about its own use."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
