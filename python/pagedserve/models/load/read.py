"""Loads a model of transformers from a model's files, unchanged.

transformers maps whole files.  A touched page stays in this process's memory until the last tensor
of its file is freed, so a model whose modules are replaced, or whose weights are converted, would
temporarily use twice its memory.  Tensors that are read instead have separate memory, which is
freed with their module.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import transformers.modeling_utils
from safetensors import safe_open
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES

from pagedserve.config.model import LoadFormat
from pagedserve.errors import ModelLoadError, UnsupportedModelError
from pagedserve.models.attention_function import ATTENTION_NAME
from pagedserve.models.families.prepare import attention_to_build_with
from pagedserve.models.families.towers import has_tower
from pagedserve.models.load.checkpoint_checks import (
    check_dtypes,
    check_finite,
    check_present,
    checked_loading,
)
from pagedserve.models.load.dummy import dummy_model
from pagedserve.models.load.files import ModelFiles, architecture_of, first_line, one_line
from pagedserve.models.load.quantized import has_quantized_files, option_without_library, use_dtype
from pagedserve.parallel.group import RankGroup
from pagedserve.parallel.plan import read_plan
from pagedserve.pooling.rules import PoolingRules


def class_to_load(
    config: PreTrainedConfig, rules: PoolingRules | None, *, is_encoder: bool = False
) -> Any:
    """Class of transformers that a model is loaded with."""
    if config.is_encoder_decoder:
        is_speech = config.model_type in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
        return AutoModelForSpeechSeq2Seq if is_speech else AutoModelForSeq2SeqLM
    if rules is not None and rules.classes is not None:
        return AutoModelForSequenceClassification
    if is_encoder:
        return AutoModel
    return AutoModelForImageTextToText if has_tower(config) else AutoModelForCausalLM


@contextmanager
def weights_read() -> Iterator[None]:
    """A context in which transformers reads tensors of safetensors files without mapping."""
    module: Any = transformers.modeling_utils
    module.safe_open = _open
    try:
        yield
    finally:
        module.safe_open = safe_open


def _open(*positional: Any, **named: Any) -> Any:
    return safe_open(*positional, **{**named, "backend": "pread"})


def load_weights(
    auto_class: Any,
    files: ModelFiles,
    dtype: torch.dtype,
    load_format: LoadFormat,
    group: RankGroup | None = None,
    *,
    quantizes: bool = False,
    needs_head: bool = True,
    config: PreTrainedConfig | None = None,
) -> PreTrainedModel:
    """Load a model with the weights of its files.

    Args:
        auto_class: class of transformers.
        files: files of the model.
        dtype: dtype of the weights.
        load_format: which files.
        group: ranks that share it: each loads a shard; None loads everything.
        quantizes: whether the weights are quantized later.
        needs_head: whether modules after the last states are needed; their weights may be missing
            otherwise.
        config: config of a model with some of these weights; None for all.

    Raises:
        ModelLoadError: transformers cannot read them, weights are missing, have another shape, or
            have numbers that are not finite or not of a floating-point type.
        UnsupportedModelError: it does not use our attention function, or cannot be sharded.
    """
    options: dict[str, Any] = {} if config is None else {"config": config}
    if group is not None:
        from pagedserve.parallel.localise import localise, split_options  # imports DTensor

        plan = read_plan(auto_class, files.hf_config, group.size)
        options |= split_options(plan)
    unused = () if needs_head else ("lm_head.", "pooler.")
    with _load_errors(files), checked_loading(files.name, unused):
        model, info = auto_class.from_pretrained(
            files.directory,
            dtype=dtype,
            attn_implementation=attention_to_build_with(files.hf_config),
            output_loading_info=True,
            use_safetensors=True if load_format == "safetensors" else None,
            trust_remote_code=False,
            **options,
        )
    check_present(files.name, info["missing_keys"], unused)
    if has_quantized_files(files.hf_config):
        use_dtype(model, dtype)
    else:
        check_dtypes(files.name, files.directory, model)
    if group is not None:
        localise(model, plan, group, keeps_peaks=quantizes)
    check_finite(files.name, model)
    return cast(PreTrainedModel, model)


def make_up_weights(
    auto_class: Any, files: ModelFiles, dtype: torch.dtype, device: torch.device, *, seed: int
) -> PreTrainedModel:
    """Create a model with random weights; raises as ``load_weights``."""
    with _load_errors(files):
        return dummy_model(
            files.hf_config,
            attention=attention_to_build_with(files.hf_config),
            dtype=dtype,
            device=device,
            seed=seed,
            auto_class=auto_class,
        )


@contextmanager
def _load_errors(files: ModelFiles) -> Iterator[None]:
    """A context in which transformers creates a model, whose errors name the model.

    Raises:
        UnsupportedModelError: It does not use our attention function.
        ModelLoadError: Any other reason.
    """
    try:
        yield
    except ModelLoadError:
        raise
    except Exception as error:  # transformers raises many unrelated types here
        if ATTENTION_NAME in str(error) or "Unrecognized configuration" in str(error):
            raise UnsupportedModelError(
                f"architecture {architecture_of(files.hf_config)} cannot be run: it is no causal "
                "language model that attends through transformers' attention interface "
                f"({first_line(error)})"
            ) from error
        other = option_without_library(files.hf_config) if isinstance(error, ImportError) else ""
        raise ModelLoadError(
            f"model {files.name!r}: its weights cannot be loaded: {one_line(error)}{other}"
        ) from error
