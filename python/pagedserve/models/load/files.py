"""A model's files in Hugging Face format, and their config."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import transformers
from transformers import AutoConfig, PreTrainedConfig

from pagedserve.config import EngineArgs
from pagedserve.errors import ModelLoadError, PagedServeError, UnsupportedModelError
from pagedserve.models.families.prepare import register_classes
from pagedserve.models.families.table import FAMILIES, family_of
from pagedserve.models.load.progress import are_bars_shown
from pagedserve.models.load.quantized import check_quant_method
from pagedserve.models.load.sources import ModelSource, find_source

_MESSAGE_CHARACTERS: Final = 500


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Location of a model's files, and its config.

    Attributes:
        name: name that the user gave.
        directory: directory with the config, the weights and the tokenizer; for a GGUF file, its
            converted copy.
        hf_config: transformers' config of the whole model.
    """

    name: str
    directory: Path
    hf_config: PreTrainedConfig


def find_model_files(args: EngineArgs, source: ModelSource | None = None) -> ModelFiles:
    """Find a model's files, downloading or converting them if necessary, and read the config.

    Args:
        args: options that name the model; ``load_format="dummy"`` needs no weights.
        source: location of the files; None finds them.

    Raises:
        ModelLoadError: the model does not exist, or its files are incomplete.
        UnsupportedModelError: transformers does not know the architecture, or it is an unsupported
            encoder-decoder.
        ConfigError: a revision is given for a model without revisions.
    """
    source = find_source(args) if source is None else source
    with quiet_transformers():
        directory = source.directory()
        return ModelFiles(args.model, directory, _load_config(args.model, directory))


def architecture_of(config: PreTrainedConfig) -> str:
    """Architecture in a config, for messages."""
    classes = ", ".join(getattr(config, "architectures", None) or ["unnamed"])
    return f"{classes} (model_type {config.model_type!r})"


def first_line(error: Exception) -> str:
    """First line of an error's message; transformers appends pages of advice."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def one_line(error: Exception) -> str:
    """An error's message in one line of at most 500 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MESSAGE_CHARACTERS else f"{text[:_MESSAGE_CHARACTERS]}..."


@contextmanager
def foreign_errors_named(name: str) -> Iterator[None]:
    """A context that builds and checks a model: errors of its classes are reported with its name.

    Raises:
        ModelLoadError: its classes raised an error.
    """
    try:
        yield
    except (PagedServeError, ImportError):
        raise
    except Exception as error:  # classes raise any error if sizes do not match
        raise ModelLoadError(
            f"model {name!r}: its own modules fail, as where sizes in config.json do not fit each "
            f"other: {type(error).__name__}: {one_line(error)}"
        ) from error


def reason_of(error: Exception) -> str:
    """Why transformers cannot load a part of a model."""
    if "trust_remote_code" in str(error):
        return "it is code of the model's repository, which is never run"
    return first_line(error)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """A context without transformers' warnings, and with its progress bars only on a terminal."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not are_bars_shown():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _load_config(name: str, directory: Path) -> PreTrainedConfig:
    content = _content(name, directory)
    try:
        register_classes(content.get("model_type"))
        config = cast(
            PreTrainedConfig, AutoConfig.from_pretrained(directory, trust_remote_code=False)
        )
        config.get_text_config()  # raises if it is ambiguous
    except KeyError as error:
        raise UnsupportedModelError(f"model {name!r}: unknown model_type {error}") from error
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(
            f"model {name!r}: transformers {transformers.__version__} knows no such architecture: "
            f"{reason_of(error)}"
        ) from error
    except Exception as error:  # an invalid field type raises different errors by class
        raise ModelLoadError(
            f"model {name!r}: config.json is no config of model_type "
            f"{content.get('model_type')!r}: {one_line(error)}"
        ) from error
    try:
        check_quant_method(config)
    except ValueError as error:
        raise ModelLoadError(f"model {name!r}: config.json: {error}") from error
    if config.is_encoder_decoder and not family_of(config.model_type).is_encoder_decoder:
        accepted = sorted(family.model_type for family in FAMILIES if family.is_encoder_decoder)
        raise UnsupportedModelError(
            f"architecture {architecture_of(config)} cannot be run: it is an encoder-decoder; "
            f"accepted are those of model_type {', '.join(accepted)}, and decoder-only models"
        )
    return config


def _content(name: str, directory: Path) -> dict[str, Any]:
    """Contents of ``config.json``, or of the file that transformers uses instead."""
    try:
        content, _ = PreTrainedConfig.get_config_dict(directory)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"model {name!r}: config.json: {one_line(error)}") from error
    return content
