"""Pooling models among the native backend's families: their configs and pooling rules."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from pagedserve.models.families.table import DECODERS
from pagedserve.native.config import DecoderConfig, Head
from pagedserve.pooling.model_files import PoolingFiles
from pagedserve.pooling.rules import PoolingRules

_MAX_LABELS: Final = 1 << 20
# Endings of classes without a head for text: a model alone, and one with a head of classes.
_OTHERS: Final = ("Model", "ForSequenceClassification")


def as_generative(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config whose architecture is that of the family's model that generates.

    Args:
        content: Contents of a ``config.json``; returned unchanged for other families.
    """
    names = content.get("architectures") or ()
    for family in DECODERS:
        own = {f"{family.name}{text}{other}" for text in ("", "Text") for other in _OTHERS}
        if family.model_type == content.get("model_type") and own.intersection(names):
            return {**content, "architectures": [family.architecture]}
    return content


def find_pooling(content: Mapping[str, Any], path: Path, runner: str) -> PoolingRules | None:
    """Pooling rules of a decoder; None for a generative model.

    Args:
        content: Contents of its ``config.json``.
        path: Directory of its files, or a GGUF file.
        runner: Option of the engine.

    Raises:
        UnsupportedModelError: Unknown rules.
        ModelLoadError: Files with rules cannot be read.
        ValueError: Classes that no model can have.
    """
    names = ", ".join(content.get("architectures") or ["unnamed"])
    files = PoolingFiles(
        config=SimpleNamespace(**content),
        architecture=f"{names} (model_type {content.get('model_type')!r})",
        hidden_size=content.get("hidden_size", 0),
        directory=path,
    )
    if not files.pools(runner):
        return None
    fields = {"problem_type": None, **content, "id2label": _labels(content)}
    return replace(files, config=SimpleNamespace(**fields)).rules(is_encoder=False)


def with_head(config: DecoderConfig, rules: PoolingRules) -> DecoderConfig:
    """A decoder with the head of a pooling model: one of classes, or none."""
    if rules.classes is None:
        return replace(config, head=replace(config.head, num_outputs=0))
    num_classes = len(rules.classes.labels)
    return replace(config, head=Head(num_outputs=num_classes, is_tied=False, name="score.weight"))


def _labels(content: Mapping[str, Any]) -> Mapping[int, Any]:
    """Names of classes by their numbers, as transformers reads or makes them."""
    named = content.get("id2label")
    if named is None:
        number = content.get("num_labels", 2)
        if type(number) is not int or not 0 <= number <= _MAX_LABELS:
            raise ValueError(
                f"num_labels is {str(number)[:80]}; it must be an integer up to {_MAX_LABELS}"
            )
        return {place: f"LABEL_{place}" for place in range(number)}
    if not isinstance(named, Mapping) or not all(key.isdecimal() for key in named):
        raise ValueError(f"id2label is {str(named)[:80]}; it must give names by numbers")
    return {int(key): name for key, name in named.items()}
