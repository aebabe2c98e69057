"""A model's tokenizer, loaded without the model."""

from pathlib import Path
from typing import cast

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from pagedserve.collector import collector_paused
from pagedserve.config import LoadFormat
from pagedserve.errors import ModelLoadError
from pagedserve.models.files import find_model_files, first_line, quiet_transformers

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_tokenizer(
    model: str, load_format: LoadFormat = "auto", tokenizer: str | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model; reads no weights.

    Args:
        model: see `pagedserve.config.EngineArgs`.
        load_format: with "dummy", a directory without a tokenizer gets one whose words are token
            ids: "5 17" is [5, 17].
        tokenizer: another place to take it from; None is the model.

    Raises:
        ModelLoadError: if there is no such model, or transformers cannot load its tokenizer.
        UnsupportedModelError: if transformers does not know the architecture, or it is an
            encoder-decoder.
    """
    with collector_paused():
        if tokenizer is not None and Path(tokenizer).is_dir():
            with quiet_transformers():
                return _load(tokenizer, Path(tokenizer))
        name, is_dummy = tokenizer or model, load_format == "dummy"
        files = find_model_files(name, load_format if name == model else "dummy")
        if is_dummy and name == model and not _has_tokenizer(files.directory):
            return _number_tokenizer(files.hf_config.get_text_config().vocab_size)
        with quiet_transformers():
            return _load(name, files.directory)


def _load(name: str, directory: Path) -> PreTrainedTokenizerBase:
    try:
        return cast(
            PreTrainedTokenizerBase,
            AutoTokenizer.from_pretrained(directory, trust_remote_code=False),
        )
    except Exception as error:  # transformers raises many unrelated types here
        raise ModelLoadError(
            f"model {name!r} has no tokenizer that transformers can load ({first_line(error)}); "
            "accepted are tokenizer.json or the files of a tokenizer class beside config.json"
        ) from error


def _has_tokenizer(directory: Path) -> bool:
    return any((directory / name).is_file() for name in _TOKENIZER_FILES)


def _number_tokenizer(vocab_size: int) -> PreTrainedTokenizerBase:
    words = {str(token): token for token in range(vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="0")
