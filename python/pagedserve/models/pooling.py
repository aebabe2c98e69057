"""Which models pool, by what rules, and decoders whose states are wanted in the place of logits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from pagedserve.config import AttentionBackend, EngineArgs
from pagedserve.errors import UnsupportedModelError
from pagedserve.models.classifiers import class_rules
from pagedserve.models.encoders import is_encoder
from pagedserve.models.files import ModelFiles, architecture_of
from pagedserve.models.paged_logits import paged_logits
from pagedserve.models.probe import ProbeResult
from pagedserve.models.trials import prompt_of
from pagedserve.pooling.rules import PoolingRules, has_rules, read_rules

# How the names of bare models end, whose files have no head that would make tokens.
_BARE: Final = ("Model", "ForTextEncoding", "ForMaskedLM")
_WITH_HEAD: Final = ("LMHeadModel", "DoubleHeadsModel")


@dataclass(frozen=True, slots=True)
class Pooling:
    """How a model that pools is run.

    Attributes:
        rules: from its states to one vector.
        is_encoder: whether its tokens see those behind them.
    """

    rules: PoolingRules
    is_encoder: bool


def find_pooling(args: EngineArgs, files: ModelFiles) -> Pooling | None:
    """How a model pools; None for one that generates.

    Raises:
        UnsupportedModelError: rules that are not known, or classes of something else than texts.
        ModelLoadError: files that cannot be read.
    """
    names = getattr(files.hf_config, "architectures", None) or []
    names_classes = any("Classification" in name for name in names)
    is_bare = any(name.endswith(_BARE) and not name.endswith(_WITH_HEAD) for name in names)
    if files.hf_config.is_encoder_decoder:
        if args.runner == "pooling" or names_classes:
            raise UnsupportedModelError(
                f"architecture {architecture_of(files.hf_config)} cannot be run: it is an "
                "encoder-decoder that is to pool; accepted are encoder-decoders that generate"
            )
        return None
    if args.runner == "auto" and not (names_classes or is_bare or has_rules(files.directory)):
        return None
    if args.runner == "generate":
        return None
    bidirectional = is_encoder(files.hf_config)
    if names_classes:
        return Pooling(class_rules(files.hf_config, is_encoder=bidirectional), bidirectional)
    rules = PoolingRules(pooling_type="CLS" if bidirectional else "LAST")
    if has_rules(files.directory):
        rules = read_rules(files.directory)
    return Pooling(replace(rules, dimensions=_dimensions(files.hf_config)), bidirectional)


def _dimensions(config: PreTrainedConfig) -> Sequence[int]:
    """How few numbers of a model's vectors mean something, by the names that vLLM reads."""
    if getattr(config, "is_matryoshka", False):
        return range(1, config.get_text_config().hidden_size + 1)
    return tuple(getattr(config, "matryoshka_dimensions", None) or ())


def use_head(
    model: PreTrainedModel, probed: ProbeResult, backend: AttentionBackend, head: nn.Module
) -> None:
    """Let a decoder that passed its check give what a head makes of its last hidden states.

    Args:
        model: attends by our function.
        probed: what the check found.
        backend: computes attention.
        head: from states ``[..., F]``.

    Raises:
        UnsupportedModelError: if something else than the head stands behind those states.
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
