"""What a model's files say of pooling: whether it pools, and by which rules."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from pagedserve.errors import UnsupportedModelError
from pagedserve.pooling.rules import (
    Activation,
    Classes,
    PoolingRules,
    PoolingType,
    has_rules,
    read_rules,
)

# Suffixes of the names of base models, whose files have no LM head.
_BARE: Final = ("Model", "ForTextEncoding", "ForMaskedLM")
_WITH_HEAD: Final = ("LMHeadModel", "DoubleHeadsModel")

# Fields that CrossEncoder of sentence-transformers adds to configs.
_ACTIVATIONS: Final[dict[str, Activation]] = {"Sigmoid": "sigmoid", "Identity": "identity"}
_BY_PROBLEM: Final[dict[str, Activation]] = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingFiles:
    """Config of a model, and the directory of its files.

    Attributes:
        config: Fields of ``config.json`` as attributes, with transformers' ``id2label``.
        architecture: Architecture in the config, for messages.
        hidden_size: Features of a hidden state.
        directory: The directory; it may have rules of sentence-transformers.
    """

    config: Any
    architecture: str
    hidden_size: int
    directory: Path

    @property
    def names_classes(self) -> bool:
        """Whether the model is a classifier."""
        return any("Classification" in name for name in self._class_names)

    def pools(self, runner: str) -> bool:
        """Whether the model pools, with the engine's option ``runner``."""
        names = self._class_names
        is_bare = any(name.endswith(_BARE) and not name.endswith(_WITH_HEAD) for name in names)
        of_files = self.names_classes or is_bare or has_rules(self.directory)
        return runner == "pooling" or (runner == "auto" and of_files)

    def rules(self, *, is_encoder: bool) -> PoolingRules:
        """Pooling rules of a pooling model.

        Args:
            is_encoder: Whether its attention is bidirectional.

        Raises:
            UnsupportedModelError: Unknown rules, or classes of something other than texts.
            ModelLoadError: Files cannot be read.
        """
        if self.names_classes:
            return self._class_rules(is_encoder=is_encoder)
        rules = PoolingRules(pooling_type="CLS" if is_encoder else "LAST")
        if has_rules(self.directory):
            rules = read_rules(self.directory)
        return replace(rules, dimensions=self._dimensions())

    @property
    def _class_names(self) -> Sequence[str]:
        return getattr(self.config, "architectures", None) or []

    def _dimensions(self) -> Sequence[int]:
        """Numbers of components to which vectors may be truncated, by the names that vLLM reads.

        All components are one of them, which clients of vector stores request.
        """
        if getattr(self.config, "is_matryoshka", False):
            return range(1, self.hidden_size + 1)
        fewer = getattr(self.config, "matryoshka_dimensions", None) or ()
        return sorted({*fewer, self.hidden_size})

    def _class_rules(self, *, is_encoder: bool) -> PoolingRules:
        """Rules of a classification head: its input, and the activation of its logits."""
        if not any(name.endswith("ForSequenceClassification") for name in self._class_names):
            raise UnsupportedModelError(
                f"architecture {self.architecture} cannot be run: its classes are not those of "
                "whole texts (ForSequenceClassification)"
            )
        is_mean = getattr(self.config, "classifier_pooling", "cls") == "mean"
        of_encoder: PoolingType = "MEAN" if is_mean else "CLS"
        labels = sorted((self.config.id2label or {}).items())
        return PoolingRules(
            pooling_type=of_encoder if is_encoder else "LAST",
            normalize=False,
            classes=Classes(
                labels=tuple(str(label) for _, label in labels),
                activation=self._activation(),
                has_token_types=getattr(self.config, "type_vocab_size", 0) > 1,
            ),
        )

    def _activation(self) -> Activation:
        config = self.config
        trained = getattr(config, "sentence_transformers", None)
        named = trained.get("activation_fn") if isinstance(trained, Mapping) else None
        named = named or getattr(config, "sbert_ce_default_activation_function", None)
        if named is not None:
            name = str(named).rpartition(".")[2]
            if name not in _ACTIVATIONS:
                raise UnsupportedModelError(
                    f"architecture {self.architecture} cannot be run: its activation_fn is "
                    f"{named}; accepted are {', '.join(_ACTIVATIONS)}"
                )
            return _ACTIVATIONS[name]
        if config.problem_type is not None:
            if config.problem_type not in _BY_PROBLEM:
                raise UnsupportedModelError(
                    f"architecture {self.architecture} cannot be run: its problem_type is "
                    f"{str(config.problem_type)[:80]}; accepted are {', '.join(_BY_PROBLEM)}"
                )
            return _BY_PROBLEM[config.problem_type]
        return "sigmoid" if len(config.id2label or {}) == 1 else "softmax"
