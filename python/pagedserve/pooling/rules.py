"""Pooling rules of a model, in the format of sentence-transformers.

Such a model has a ``modules.json`` beside its weights, which lists its modules: the transformer,
the pooling, whose config is in a separate folder, and optionally a normalization.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

import pagedserve.checks as checks
from pagedserve.errors import ModelLoadError, RequestError, UnsupportedModelError
from pagedserve.pooling_params import PoolingParams, PoolingTask
from pagedserve.regular_files import is_file, read_json

PoolingType: TypeAlias = Literal["CLS", "MEAN", "LAST"]
Activation: TypeAlias = Literal["identity", "sigmoid", "softmax"]

MODULES_FILE: Final = "modules.json"
# Names of the file of the transformer's options, of which sentence-transformers reads the first.
_OPTION_FILES: Final = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)
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
    """Classes of a classification model.

    Attributes:
        labels: names of the classes.
        activation: function from logits to probabilities or scores.
        has_token_types: whether its input marks the second of two texts.
    """

    labels: tuple[str, ...]
    activation: Activation
    has_token_types: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRules:
    """Pooling configuration of a model.

    Attributes:
        pooling_type: CLS is the state of the first token, LAST that of the last, MEAN the mean of
            all.
        normalize: whether the vector is normalized to length 1.
        max_seq_length: maximum tokens of a prompt; None leaves it to the model.
        lowercases: whether texts are lowercased before they are tokenized.
        prompts: prefixes of prompts, by their names.
        default_prompt_name: name of the default prefix.
        dimensions: accepted numbers of leading components; fewer than all for Matryoshka models.
        classes: classes of a classification model, whose vectors are logits.
    """

    pooling_type: PoolingType
    normalize: bool = True
    max_seq_length: int | None = None
    lowercases: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    dimensions: Sequence[int] = ()
    classes: Classes | None = None

    @property
    def takes_pairs(self) -> bool:
        """Whether it scores a pair of texts in one prompt."""
        return self.classes is not None

    @property
    def pools_whole_prompts(self) -> bool:
        """Whether the states of other tokens than the last of a prompt are pooled."""
        return self.pooling_type != "LAST"

    def check_task(self, task: PoolingTask) -> None:
        """Check that the model supports a task.

        Raises:
            RequestError: an unknown task, an embedding model for classification, or the other way
                round.
        """
        checks.choice(get_args(PoolingTask))("pooling_task", task)
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
        """Check that the model supports the parameters of a prompt.

        Raises:
            RequestError: an unsupported task, dimensions, or an unknown prompt name.
        """
        if params.task is not None:
            self.check_task(params.task)
        name = params.prompt_name
        if name is not None and name not in self.prompts:
            raise RequestError(
                f"prompt_name is {name!r}; the model has {', '.join(self.prompts) or 'none'}",
                param="prompt_name",
            )
        wanted = params.dimensions
        if wanted is None or wanted in self.dimensions:
            return
        accepted = ", ".join(map(str, self.dimensions)) or "none: it names classes"
        if isinstance(self.dimensions, range):
            accepted = f"from {self.dimensions[0]} to {self.dimensions[-1]}"
        raise RequestError(
            f"dimensions is {wanted}; what this model accepts is {accepted}", param="dimensions"
        )


def has_rules(directory: Path) -> bool:
    """Whether a model's directory has rules of sentence-transformers."""
    return is_file(directory / MODULES_FILE)


def read_rules(directory: Path) -> PoolingRules:
    """Read the rules in a model's directory.

    Raises:
        ModelLoadError: files cannot be read.
        UnsupportedModelError: unknown modules or pooling methods.
    """
    modules = _modules(_read(directory / MODULES_FILE))
    unknown = modules.keys() - {"Transformer", "Pooling", "Normalize"}
    if unknown or "Pooling" not in modules:
        raise UnsupportedModelError(
            f"{MODULES_FILE} names {', '.join(modules)}; accepted are Transformer, Pooling and "
            "Normalize, the first two of which must be there"
        )
    prompts = _read_if_any(directory / "config_sentence_transformers.json")
    length, lowercases = _options(directory / modules.get("Transformer", ""))
    texts, default = prompts.get("prompts") or {}, prompts.get("default_prompt_name")
    if not isinstance(texts, Mapping) or not all(isinstance(text, str) for text in texts.values()):
        raise ModelLoadError(f"prompts is {str(texts)[:80]}; it must give texts by names")
    if default is not None and not isinstance(default, str):
        raise ModelLoadError(f"default_prompt_name is {str(default)[:80]}; it must be a name")
    if default is not None and default not in texts:
        raise ModelLoadError(
            f"default_prompt_name is {default[:80]!r}, which prompts does not have; it has "
            f"{str([*texts])[:200]}"
        )
    return PoolingRules(
        pooling_type=_pooling_type(_read_if_any(directory / modules["Pooling"] / "config.json")),
        normalize="Normalize" in modules,
        max_seq_length=length,
        lowercases=lowercases,
        prompts=texts,
        default_prompt_name=default,
    )


def _modules(listed: object) -> dict[str, str]:
    """Folders of a model's modules, by the names of their classes."""
    modules = {}
    for part in listed if isinstance(listed, list) else [listed]:
        kind, path = (
            (part.get("type"), part.get("path")) if isinstance(part, dict) else (None, None)
        )
        if not isinstance(kind, str) or not isinstance(path, str) or _leads_out(path):
            raise ModelLoadError(
                f"{MODULES_FILE} has {str(part)[:200]}; it must be a list of parts, each with a "
                "type and the path of a folder within the model's directory"
            )
        modules[kind.rpartition(".")[2]] = path
    return modules


def _options(folder: Path) -> tuple[int | None, bool]:
    """Maximum tokens of a prompt, and whether texts are lowercased, by the transformer's folder."""
    paths = [folder / name for name in _OPTION_FILES]
    options = _read_if_any(next(filter(is_file, paths), paths[0]))
    length, lowercases = options.get("max_seq_length"), options.get("do_lower_case", False)
    if length is not None and not (type(length) is int and length > 0):
        raise ModelLoadError(f"max_seq_length is {str(length)[:80]!r}; it must be a number above 0")
    if not isinstance(lowercases, bool):
        raise ModelLoadError(f"do_lower_case is {str(lowercases)[:80]!r}; it must be true or false")
    return length, lowercases


def _leads_out(path: str) -> bool:
    return path.startswith("/") or ".." in Path(path).parts


def _pooling_type(config: Mapping[str, object]) -> PoolingType:
    """The single method of a pooling config."""
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
    content = _read(path) if is_file(path) else {}
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path.name} is no JSON object")
    return content


def _read(path: Path) -> object:
    try:
        return read_json(path)
    except ValueError as error:
        raise ModelLoadError(str(error)) from error
