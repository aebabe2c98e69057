"""A model's tokenizer, loaded without the model: by transformers, or without it.

The files decide, not the backend: a model has the same tokens with both.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from pagedserve.collector import collector_paused
from pagedserve.config import EngineArgs
from pagedserve.errors import ModelLoadError, extra_needed
from pagedserve.extras import absent_modules, install_command
from pagedserve.models.load.sources import (
    ModelSource,
    find_tokenizer_source,
    has_own_tokenizer,
    has_tokenizer,
)
from pagedserve.models.tokenizer.tokenizer_checks import (
    check_chat_template,
    check_texts,
    check_token_ids,
)
from pagedserve.regular_files import read_json
from pagedserve.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pagedserve.models.load.gguf_header import GgufHeader
    from pagedserve.models.tokenizer.fast_tokenizer import FastTokenizer


def load_tokenizer(
    args: EngineArgs,
    *,
    uses_transformers: bool | None = None,
    model: ModelSource | None = None,
    header: "GgufHeader | None" = None,
) -> Tokenizer:
    """Load the tokenizer of a model; reads no weights.

    Where transformers is installed, it loads what is not known to be read alike without it.

    Args:
        args: Options that name the model, or another tokenizer.  With ``load_format="dummy"``, a
            directory without a tokenizer gets one whose words are token ids: "5 17" is [5, 17].
        uses_transformers: Whether transformers loads it; None if it and torch are installed, and it
            might make another one of these files.
        model: The model's files; None finds them.
        header: Header of the model's GGUF file, if it has been read.

    Raises:
        ModelLoadError: The model does not exist, or its tokenizer cannot be loaded.
        UnsupportedModelError: transformers does not know the architecture, or it is an unsupported
            encoder-decoder.
        ConfigError: A revision is given for a model without revisions.
        ImportError: The library tokenizers is not installed.
    """
    header = header if has_own_tokenizer(args) else None
    with collector_paused():
        if uses_transformers is None:
            if absent_modules("torch", "transformers"):  # which needs torch for a model's config
                return _load(args, model, header)
            if (tokenizer := _load_alike(args, model, header)) is not None:
                return tokenizer
        elif not uses_transformers:
            return _load(args, model, header)
    with extra_needed("a tokenizer of transformers", "engine"):
        from pagedserve.models.tokenizer.transformers_tokenizer import load_transformers_tokenizer

    return load_transformers_tokenizer(args, model)


def tokenizer_for_callers(args: EngineArgs, tokenizer: Tokenizer | None = None) -> Tokenizer:
    """The tokenizer for an engine's caller: that of transformers, where it is installed.

    Args:
        args: Options that name the model.
        tokenizer: That of the engine; None loads one.

    Raises:
        ModelLoadError: It cannot be loaded.
    """
    from pagedserve.models.tokenizer.fast_tokenizer import FastTokenizer

    if args.backend == "native" or absent_modules("torch", "transformers"):
        return load_tokenizer(args) if tokenizer is None else tokenizer
    if tokenizer is None or isinstance(tokenizer, FastTokenizer):
        return load_tokenizer(args, uses_transformers=True)
    return tokenizer


def _load_alike(
    args: EngineArgs, model: ModelSource | None, header: "GgufHeader | None"
) -> "FastTokenizer | None":
    """Load a tokenizer that transformers would read alike; None if it might not."""
    from pagedserve.models.load.gguf_header import read_header
    from pagedserve.models.tokenizer.agreement import (
        class_of_directory,
        is_known_gguf,
        is_taken_unchanged,
    )

    source = find_tokenizer_source(args, model)
    try:
        if source.is_gguf:
            header = read_header(source.path) if header is None else header
            return _checked(source, _read(source, header)) if is_known_gguf(header) else None
        if (class_name := class_of_directory(source.path)) is None:
            return None
        tokenizer = _checked(source, _read(source, None))
    except ValueError:  # transformers loads it, or says why not
        return None
    return tokenizer if is_taken_unchanged(tokenizer.backend_tokenizer, class_name) else None


def _load(
    args: EngineArgs, model: ModelSource | None, header: "GgufHeader | None"
) -> "FastTokenizer":
    name, source = args.tokenizer or args.model, find_tokenizer_source(args, model)
    is_dummy = args.load_format == "dummy" and has_own_tokenizer(args) and not source.is_gguf
    if is_dummy and not has_tokenizer(source.path):
        return _count(source.path)
    try:
        tokenizer = _read(source, header)
    except ModelLoadError as error:
        raise ModelLoadError(
            f"model {name!r} has no tokenizer that can be loaded without transformers ({error}); "
            "accepted are tokenizer.json and GGUF files, and with transformers "
            f"({install_command('engine', 'transformers')}) more"
        ) from error
    try:
        return _checked(source, tokenizer)
    except ModelLoadError as error:
        raise ModelLoadError(f"model {name!r}: {error}") from error


def _checked(source: ModelSource, tokenizer: "FastTokenizer") -> "FastTokenizer":
    if not source.is_gguf:  # whose tokens are numbered by their list
        check_token_ids(tokenizer)
    check_chat_template(tokenizer)
    check_texts(tokenizer)
    return tokenizer


def _read(source: ModelSource, header: "GgufHeader | None") -> "FastTokenizer":
    if source.is_gguf:
        from pagedserve.models.tokenizer.gguf_tokenizer import tokenizer_of_gguf

        return tokenizer_of_gguf(source.path, header)
    from pagedserve.models.tokenizer.tokenizer_files import tokenizer_of_directory

    return tokenizer_of_directory(source.path)


def _count(directory: Path) -> "FastTokenizer":
    """Tokenizer whose words are token ids, for the vocabulary of a config."""
    from pagedserve.models.tokenizer.fast_tokenizer import FastTokenizer
    from pagedserve.models.tokenizer.number_tokenizer import number_tokenizer

    config = read_json(directory / "config.json")
    assert isinstance(config, dict)  # noqa: S101  # the registry has checked it
    return FastTokenizer(number_tokenizer(config.get("text_config", config)["vocab_size"]))
