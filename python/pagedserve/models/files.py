"""A model's files in Hugging Face format, and the config that they hold."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import transformers
from transformers import AutoConfig, PreTrainedConfig

from pagedserve.config import EngineArgs
from pagedserve.errors import UnsupportedModelError
from pagedserve.models.encoder_prompts import FAMILIES
from pagedserve.models.hub import HubOptions, Part
from pagedserve.models.mappings import register_mapping
from pagedserve.models.progress import is_progress_shown
from pagedserve.models.registry import resolve_model


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model's files are, and what kind of model it is.

    Attributes:
        name: what the user gave.
        directory: holds the config, the weights and the tokenizer; of a GGUF file, its converted
            copy.
        hf_config: transformers' config of the whole model.
    """

    name: str
    directory: Path
    hf_config: PreTrainedConfig


def find_model_files(args: EngineArgs) -> ModelFiles:
    """Find a model's files, download or convert them if they are not here yet, read the config.

    Args:
        args: which model; ``load_format="dummy"`` needs no weights.

    Raises:
        ModelLoadError: if there is no such model, or its files are not whole.
        UnsupportedModelError: if transformers does not know the architecture, or it is an
            encoder-decoder of a kind that does not run here.
        ConfigError: if a revision is asked for of what has none.
    """
    part: Part = "config" if args.load_format == "dummy" else "model"
    source = resolve_model(args.model, part=part, hub=HubOptions.of_model(args))
    with quiet_transformers():
        directory = source.directory()
        return ModelFiles(args.model, directory, _load_config(args.model, directory))


def architecture_of(config: PreTrainedConfig) -> str:
    """The architecture that a config names, for messages."""
    classes = ", ".join(getattr(config, "architectures", None) or ["unnamed"])
    return f"{classes} (model_type {config.model_type!r})"


def first_line(error: Exception) -> str:
    """The first line of an error's message; transformers appends pages of advice."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def reason_of(error: Exception) -> str:
    """Why transformers cannot load a part of a model."""
    if "trust_remote_code" in str(error):
        return "it is code of the model's repository, which is never run"
    return first_line(error)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' warnings, which are about its own use, and bars that nobody wants."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not is_progress_shown():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _load_config(name: str, directory: Path) -> PreTrainedConfig:
    try:
        content, _ = PreTrainedConfig.get_config_dict(directory)
        register_mapping(content.get("model_type"))
        config = cast(
            PreTrainedConfig, AutoConfig.from_pretrained(directory, trust_remote_code=False)
        )
    except KeyError as error:
        raise UnsupportedModelError(f"model {name!r}: unknown model_type {error}") from error
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(
            f"model {name!r}: transformers {transformers.__version__} knows no such architecture: "
            f"{reason_of(error)}"
        ) from error
    if config.is_encoder_decoder and config.model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"architecture {architecture_of(config)} cannot be run: it is an encoder-decoder; "
            f"accepted are those of model_type {', '.join(FAMILIES)}, and decoder-only models"
        )
    return config
