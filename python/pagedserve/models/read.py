"""From a model's files to a model of transformers, with nothing exchanged."""

from typing import Any, cast

import torch
from transformers import AutoModel, PreTrainedModel

from pagedserve.attention.interface import ATTENTION_NAME
from pagedserve.errors import ModelLoadError, UnsupportedModelError
from pagedserve.model_args import LoadFormat
from pagedserve.models.architectures import attention_to_build_with
from pagedserve.models.dummy import dummy_model
from pagedserve.models.files import ModelFiles, architecture_of, first_line
from pagedserve.models.quantized import has_quantized_files, use_dtype
from pagedserve.models.towers import attention_by_part
from pagedserve.parallel.group import RankGroup
from pagedserve.parallel.plan import read_plan


def load_weights(
    auto_class: Any,
    files: ModelFiles,
    dtype: torch.dtype,
    load_format: LoadFormat,
    group: RankGroup | None = None,
) -> PreTrainedModel:
    """A model with the weights of its files.

    Args:
        auto_class: of transformers.
        files: of the model.
        dtype: of the weights.
        load_format: which files.
        group: of ranks that share it: each has a part; None reads all.

    Raises:
        ModelLoadError: if transformers cannot read them, or some are missing.
        UnsupportedModelError: if it is no model that attends through our function, or it cannot be
            shared.
    """
    split: dict[str, Any] = {}
    if group is not None:
        from pagedserve.parallel.localise import localise, split_options  # imports DTensor

        plan = read_plan(auto_class, files.hf_config, group.size)
        split = split_options(plan)
    try:
        loaded: Any = auto_class.from_pretrained(
            files.directory,
            dtype=dtype,
            attn_implementation=attention_by_part(
                files.hf_config, attention_to_build_with(files.hf_config)
            ),
            output_loading_info=True,
            use_safetensors=True if load_format == "safetensors" else None,
            trust_remote_code=False,
            **split,
        )
    except Exception as error:  # transformers raises many unrelated types here
        raise _load_error(files, error) from error
    model, info = loaded
    # What an encoder has behind its last states is not asked for.
    unused = "pooler." if auto_class is AutoModel else ()
    missing = sorted(name for name in info["missing_keys"] if not name.startswith(unused))
    if missing:
        raise ModelLoadError(
            f"model {files.name!r}: its files lack {len(missing)} of the model's weights, the "
            f"first is {missing[0]!r}"
        )
    if has_quantized_files(files.hf_config):
        use_dtype(model, dtype)
    if group is not None:
        localise(model, plan, group)
    return cast(PreTrainedModel, model)


def make_up_weights(
    auto_class: Any, files: ModelFiles, dtype: torch.dtype, device: torch.device, *, seed: int
) -> PreTrainedModel:
    """A model with random weights; raises as ``load_weights``."""
    try:
        attention = attention_by_part(files.hf_config, attention_to_build_with(files.hf_config))
        return dummy_model(
            files.hf_config,
            attention=attention,
            dtype=dtype,
            device=device,
            seed=seed,
            auto_class=auto_class,
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
