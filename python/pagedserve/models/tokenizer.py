"""A model's tokenizer, loaded without the model."""

from pathlib import Path
from typing import Any, Final, cast

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from pagedserve.collector import collector_paused
from pagedserve.config import EngineArgs
from pagedserve.errors import ModelLoadError, extra_needed
from pagedserve.models.files import find_model_files, quiet_transformers, reason_of
from pagedserve.models.hub import HubOptions
from pagedserve.models.registry import has_tokenizer, resolve_model
from pagedserve.models.sentencepiece_model import match_sentencepiece

# Grammars and drafts build a table with a row for each token.
MAX_TOKEN_ID: Final = 1 << 24


def load_tokenizer(args: EngineArgs) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model; reads no weights.

    Args:
        args: options that name the model, or another tokenizer.  With ``load_format="dummy"``, a
            directory without a tokenizer gets one whose words are token ids: "5 17" is [5, 17].

    Raises:
        ModelLoadError: the model does not exist, or transformers cannot load its tokenizer.
        UnsupportedModelError: transformers does not know the architecture, or it is an unsupported
            encoder-decoder.
        ConfigError: a revision is given for a model without revisions.
    """
    with collector_paused(), quiet_transformers():
        name, hub = args.tokenizer or args.model, HubOptions.of_tokenizer(args)
        if name != args.model or hub != HubOptions.of_model(args):
            source = resolve_model(name, part="tokenizer", hub=hub)
            return _load(name, source.directory())
        files = find_model_files(args)
        if args.load_format == "dummy" and not has_tokenizer(files.directory):
            return _number_tokenizer(files.hf_config.get_text_config().vocab_size)
        return _load(name, files.directory)


def _load(name: str, directory: Path) -> PreTrainedTokenizerBase:
    try:
        return _checked(_from_files(directory))
    except ModelLoadError as error:
        raise ModelLoadError(f"model {name!r}: {error}") from error
    except Exception as error:  # transformers raises many unrelated types here
        raise ModelLoadError(
            f"model {name!r} has no tokenizer that transformers can load ({reason_of(error)}); "
            "accepted are tokenizer.json or the files of a tokenizer class beside config.json"
        ) from error


def _checked(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Check the token ids and chat templates of a tokenizer, and return it.

    Raises:
        ModelLoadError: a token id is too large, or a chat template is not text.
    """
    last = max(tokenizer.get_vocab().values(), default=0)
    if last > MAX_TOKEN_ID:
        raise ModelLoadError(
            f"its tokenizer has the token {last}; accepted are up to {MAX_TOKEN_ID}"
        )
    given: object = tokenizer.chat_template
    texts = list(given.values()) if isinstance(given, dict) else [given]
    if given is not None and not all(isinstance(text, str) for text in texts):
        raise ModelLoadError(f"chat_template is {str(given)[:80]!r}; it must be a text")
    return tokenizer


def _from_files(directory: Path) -> PreTrainedTokenizerBase:
    tekken_file, has_json = directory / "tekken.json", (directory / "tokenizer.json").is_file()
    if tekken_file.is_file() and not has_json:
        return _from_tekken(tekken_file)
    try:
        # Not with mistral-common itself, which supports neither streaming nor templates.
        loaded: Any = AutoTokenizer.from_pretrained(
            directory, trust_remote_code=False, mistral_format=False
        )
    except ModuleNotFoundError:  # mistral-common without its dependencies
        loaded = PreTrainedTokenizerFast.from_pretrained(directory)
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


def _number_tokenizer(vocab_size: int) -> PreTrainedTokenizerBase:
    words = {str(token): token for token in range(vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="0")
