"""A model's tokenizer, loaded by transformers."""

from pathlib import Path
from typing import Any, cast

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from pagedserve.collector import collector_paused
from pagedserve.config import EngineArgs
from pagedserve.errors import ModelLoadError, extra_needed
from pagedserve.models.load.files import find_model_files, quiet_transformers, reason_of
from pagedserve.models.load.sources import (
    ModelSource,
    find_tokenizer_source,
    has_own_tokenizer,
    has_tokenizer,
)
from pagedserve.models.tokenizer.number_tokenizer import number_tokenizer
from pagedserve.models.tokenizer.sentencepiece_model import match_sentencepiece
from pagedserve.models.tokenizer.tokenizer_checks import (
    check_chat_template,
    check_texts,
    check_token_ids,
)


def load_transformers_tokenizer(
    args: EngineArgs, model: ModelSource | None = None, **options: Any
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model; see `pagedserve.models.tokenizer.loader.load_tokenizer`.

    Args:
        args: Options that name the model, or another tokenizer.
        model: The model's files; None finds them.
        **options: Options of transformers' tokenizer, such as ``padding_side``.
    """
    with collector_paused(), quiet_transformers():
        if not has_own_tokenizer(args):
            directory = find_tokenizer_source(args, model).directory()
            return _load(args.tokenizer or args.model, directory, options)
        files = find_model_files(args, model)
        if args.load_format == "dummy" and not has_tokenizer(files.directory):
            backend = number_tokenizer(files.hf_config.get_text_config().vocab_size)
            return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="0", **options)
        return _load(args.model, files.directory, options)


def _load(name: str, directory: Path, options: dict[str, Any]) -> PreTrainedTokenizerBase:
    try:
        tokenizer = _from_files(directory, options)
        check_token_ids(tokenizer)
        check_chat_template(tokenizer)
        check_texts(tokenizer)
    except ModelLoadError as error:
        raise ModelLoadError(f"model {name!r}: {error}") from error
    except Exception as error:  # transformers raises many unrelated types here
        raise ModelLoadError(
            f"model {name!r} has no tokenizer that transformers can load ({reason_of(error)}); "
            "accepted are tokenizer.json or the files of a tokenizer class beside config.json"
        ) from error
    return tokenizer


def _from_files(directory: Path, options: dict[str, Any]) -> PreTrainedTokenizerBase:
    tekken_file, has_json = directory / "tekken.json", (directory / "tokenizer.json").is_file()
    if tekken_file.is_file() and not has_json:
        if options:
            raise ModelLoadError(f"{tekken_file.name} is loaded without options: {options}")
        return _from_tekken(tekken_file)
    try:
        # Not with mistral-common itself, which supports neither streaming nor templates.
        loaded: Any = AutoTokenizer.from_pretrained(
            directory, trust_remote_code=False, mistral_format=False, **options
        )
    except ModuleNotFoundError:  # mistral-common without its dependencies
        loaded = PreTrainedTokenizerFast.from_pretrained(directory, **options)
    model_file = directory / "tokenizer.model"
    if model_file.is_file() and not has_json:
        match_sentencepiece(loaded, model_file)
    return cast(PreTrainedTokenizerBase, loaded)


def _from_tekken(file: Path) -> PreTrainedTokenizerBase:
    """Load mistral-common's format, including its chat template."""
    with extra_needed(f"{file.name} without tokenizer.json", "tokenizers"):
        import mistral_common.tokens.tokenizers.tekken  # noqa: F401  # used by transformers
    import transformers.integrations.mistral

    module: Any = transformers.integrations.mistral
    tokenizer = module.convert_tekken_tokenizer(str(file))
    tokenizer.add_bos_token = True  # mistral-common adds it to every text
    return cast(PreTrainedTokenizerBase, tokenizer)
