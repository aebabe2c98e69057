"""How a model's states of a prompt become one vector, as sentence-transformers writes it down.

A model of theirs has a ``modules.json`` beside its weights, which names its parts: the transformer,
the pooling, whose config lies in a folder of its own, and perhaps a normalisation.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias, cast

from pagedserve.errors import ModelLoadError, RequestError, UnsupportedModelError
from pagedserve.pooling_params import PoolingParams

PoolingType: TypeAlias = Literal["CLS", "MEAN", "LAST"]
Activation: TypeAlias = Literal["identity", "sigmoid", "softmax"]
# What may be asked of a model that pools.
PoolingTask: TypeAlias = Literal["encode", "embed", "classify", "score"]

MODULES_FILE: Final = "modules.json"
_METHODS: Final[dict[str, PoolingType]] = {
    "cls": "CLS",
    "cls_token": "CLS",
    "mean": "MEAN",
    "mean_tokens": "MEAN",
    "lasttoken": "LAST",
}
_MODE: Final = "pooling_mode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Classes:
    """The classes that a model tells apart.

    Attributes:
        labels: their names.
        activation: what makes probabilities, or scores, of its logits.
        has_token_types: whether it is told where the second of two texts begins.
    """

    labels: tuple[str, ...]
    activation: Activation
    has_token_types: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRules:
    """How a model pools.

    Attributes:
        pooling_type: CLS is the state of the first token, LAST that of the last, MEAN the mean of
            all.
        normalize: whether the vector gets length 1.
        max_seq_length: most tokens of a prompt; None leaves it to the model.
        prompts: texts that come before prompts, by their names.
        default_prompt_name: the one that is taken where none is named.
        dimensions: how few numbers of its vectors mean something, where it was trained for that.
        classes: of a model that names classes; its vectors are their logits.
    """

    pooling_type: PoolingType
    normalize: bool = True
    max_seq_length: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    dimensions: Sequence[int] = ()
    classes: Classes | None = None

    @property
    def takes_pairs(self) -> bool:
        """Whether it scores two texts at once, and not each by itself."""
        return self.classes is not None

    def check_task(self, task: PoolingTask) -> None:
        """Check that the model does what is asked.

        Raises:
            RequestError: it embeds and is to name classes, or the other way round.
        """
        if task == "encode":
            return
        if self.classes is None:
            if task == "classify":
                raise RequestError("the model embeds; accepted are embeddings and scores")
        elif task == "embed":
            raise RequestError("the model names classes; accepted are classifications and scores")
        elif task == "score" and len(self.classes.labels) != 1:
            raise RequestError(
                f"the model names {len(self.classes.labels)} classes; scores are for models of one "
                "class, and for those that embed"
            )

    def check(self, params: PoolingParams) -> None:
        """Check that the model can do what is asked of a prompt.

        Raises:
            RequestError: dimensions that it was not trained for, or a text that it has not.
        """
        name = params.prompt_name
        if name is not None and name not in self.prompts:
            raise RequestError(
                f"prompt_name is {name!r}; the model has {', '.join(self.prompts) or 'none'}",
                param="prompt_name",
            )
        wanted = params.dimensions
        if wanted is None or wanted in self.dimensions:
            return
        accepted = "none: its config has neither matryoshka_dimensions nor is_matryoshka"
        if isinstance(self.dimensions, range):
            accepted = f"from {self.dimensions[0]} to {self.dimensions[-1]}"
        elif self.dimensions:
            accepted = ", ".join(map(str, self.dimensions))
        raise RequestError(
            f"dimensions is {wanted}; what this model accepts is {accepted}", param="dimensions"
        )


def has_rules(directory: Path) -> bool:
    """Whether a model's directory has rules of sentence-transformers."""
    return (directory / MODULES_FILE).is_file()


def read_rules(directory: Path) -> PoolingRules:
    """The rules in a model's directory.

    Raises:
        ModelLoadError: files that cannot be read.
        UnsupportedModelError: parts or poolings that are not known.
    """
    listed = _read(directory / MODULES_FILE)
    modules = {
        str(part["type"]).rpartition(".")[2]: str(part["path"])
        for part in cast(list[dict[str, object]], listed)
    }
    unknown = modules.keys() - {"Transformer", "Pooling", "Normalize"}
    if unknown or "Pooling" not in modules:
        raise UnsupportedModelError(
            f"{MODULES_FILE} names {', '.join(modules)}; accepted are Transformer, Pooling and "
            "Normalize, the first two of which must be there"
        )
    prompts = _read_if_any(directory / "config_sentence_transformers.json")
    limits = _read_if_any(directory / modules.get("Transformer", "") / "sentence_bert_config.json")
    length = limits.get("max_seq_length")
    return PoolingRules(
        pooling_type=_pooling_type(_read_if_any(directory / modules["Pooling"] / "config.json")),
        normalize="Normalize" in modules,
        max_seq_length=length if isinstance(length, int) else None,
        prompts=cast("Mapping[str, str]", prompts.get("prompts") or {}),
        default_prompt_name=cast("str | None", prompts.get("default_prompt_name")),
    )


def _pooling_type(config: Mapping[str, object]) -> PoolingType:
    """The one method that a pooling's config asks for."""
    asked = [str(config[_MODE])] if _MODE in config else []
    asked += [
        name.removeprefix(_MODE + "_") for name in config if name != _MODE and config[name] is True
    ]
    asked = [name for name in asked if name != "include_prompt"]
    if len(asked) != 1 or asked[0] not in _METHODS or config.get("include_prompt") is False:
        raise UnsupportedModelError(
            f"its pooling is {dict(config)}; accepted is one of {', '.join(_METHODS)}, over the "
            "whole prompt"
        )
    return _METHODS[asked[0]]


def _read_if_any(path: Path) -> Mapping[str, object]:
    return cast("Mapping[str, object]", _read(path)) if path.is_file() else {}


def _read(path: Path) -> object:
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path.name} cannot be read: {error}") from error
    return content
