"""Pooling models: detection, pooling rules, and decoders that return states instead of logits."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from pagedserve.attention.backend import AttentionBackend
from pagedserve.config import EngineArgs
from pagedserve.errors import UnsupportedModelError
from pagedserve.models.check.numerics import prompt_of
from pagedserve.models.check.paged_logits import paged_logits
from pagedserve.models.check.probe import ProbeResult
from pagedserve.models.encoders import is_encoder
from pagedserve.models.load.files import ModelFiles, architecture_of
from pagedserve.pooling.model_files import PoolingFiles
from pagedserve.pooling.rules import PoolingRules


@dataclass(frozen=True, slots=True)
class Pooling:
    """How a pooling model is run.

    Attributes:
        rules: pooling rules, from states to one vector.
        is_encoder: whether attention is bidirectional.
    """

    rules: PoolingRules
    is_encoder: bool


def find_pooling(args: EngineArgs, files: ModelFiles) -> Pooling | None:
    """Pooling of a model; None for a generative model.

    Raises:
        UnsupportedModelError: unknown rules, or classes of something other than texts.
        ModelLoadError: files cannot be read.
    """
    config = files.hf_config
    found = PoolingFiles(
        config=config,
        architecture=architecture_of(config),
        hidden_size=getattr(config.get_text_config(), "hidden_size", 0),
        directory=files.directory,
    )
    if config.is_encoder_decoder:
        if args.runner == "pooling" or found.names_classes:
            raise UnsupportedModelError(
                f"architecture {architecture_of(config)} cannot be run: it is an encoder-decoder "
                "that is to pool; accepted are encoder-decoders that generate"
            )
        return None
    if not found.pools(args.runner):
        return None
    bidirectional = is_encoder(config)
    return Pooling(found.rules(is_encoder=bidirectional), bidirectional)


def use_head(
    model: PreTrainedModel, probed: ProbeResult, backend: AttentionBackend, head: nn.Module
) -> None:
    """Make a checked decoder return a head's output for its last hidden states.

    Args:
        model: model with our attention function.
        probed: result of the check.
        backend: attention backend.
        head: module on states ``[..., F]``.

    Raises:
        UnsupportedModelError: something besides the LM head follows those states.
    """
    states: list[Any] = []
    model.set_output_embeddings(head)
    base: Any = model.base_model
    handle = base.register_forward_hook(lambda *call: states.append(call[-1].last_hidden_state))
    try:
        prompt = prompt_of(model, 5)
        (found,) = paged_logits(
            model,
            probed.layers,
            [prompt],
            [len(prompt)],
            backend,
            selects_logits=probed.selects_logits,
            states=probed.states,
        )
    finally:
        handle.remove()
    with torch.inference_mode():
        expected = None if base is model else head(states[-1])[0].float()
    if expected is None or not torch.equal(found, expected):
        raise UnsupportedModelError(
            f"architecture {architecture_of(model.config)} cannot pool: more than a head stands "
            "between its last states and its logits"
        )
