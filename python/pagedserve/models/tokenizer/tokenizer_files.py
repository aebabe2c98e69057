"""The tokenizer in a directory of Hugging Face format, without transformers.

``tokenizer.json`` is taken unchanged; of ``tokenizer_config.json``, ``special_tokens_map.json`` and
``added_tokens.json`` what transformers' ``TokenizersBackend`` adds to it: special tokens by name,
added tokens, and chat templates, which may have separate files.

transformers has classes that replace the normalizer and the pre-tokenizer of ``tokenizer.json``;
here the file counts.
"""

from collections.abc import Container, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from pagedserve.errors import ModelLoadError
from pagedserve.models.tokenizer.fast_tokenizer import ChatTemplate, FastTokenizer
from pagedserve.regular_files import is_file, read_bytes, read_json

_MAX_TOKENIZER_BYTES: Final = 512 << 20
_NAMES: Final = frozenset(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
_EXTRA: Final = "extra_special_tokens"


def tokenizer_of_directory(directory: Path) -> FastTokenizer:
    """Load a tokenizer from ``tokenizer.json`` and the files beside it.

    Raises:
        ModelLoadError: There is no ``tokenizer.json``, a file is damaged, or the tokenizer is code
            of the model's repository.
    """
    config = _json(directory / "tokenizer_config.json")
    auto_map = config.get("auto_map") or {}
    if not isinstance(auto_map, dict | list):
        raise ModelLoadError(f"auto_map is {auto_map!r:.80}; it must be an object")
    if isinstance(auto_map, list) or "AutoTokenizer" in auto_map:
        raise ModelLoadError("it is code of the model's repository, which is never run")
    try:
        content = read_bytes(directory / "tokenizer.json", _MAX_TOKENIZER_BYTES)
        backend = Tokenizer.from_str(content.decode())
        side = config.get("truncation_side") or (backend.truncation or {}).get("direction")
        pad_side = config.get("padding_side") or (backend.padding or {}).get("direction")
        named, extra = _add_tokens(backend, directory, config)
        return FastTokenizer(
            backend,
            named,
            _chat_template(directory, config),
            clean_up_tokenization_spaces=bool(config.get("clean_up_tokenization_spaces")),
            truncation_side="left" if side == "left" else "right",
            padding_side="left" if pad_side == "left" else "right",
            extra_special_tokens=extra,
            model_max_length=int(config.get("model_max_length") or 1e30),
            name_or_path=str(directory),
        )
    except ModelLoadError:
        raise
    except Exception as error:  # the library raises bare Exception; fields may have any type
        raise ModelLoadError(str(error) or type(error).__name__) from error


def _json(path: Path) -> dict[str, Any]:
    """Contents of a file; empty without it.

    Raises:
        ModelLoadError: It holds no JSON object.
    """
    if not is_file(path):
        return {}
    try:
        content = read_json(path)
    except ValueError as error:
        raise ModelLoadError(str(error)) from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path.name} holds no JSON object")
    return content


def _add_tokens(
    backend: Tokenizer, directory: Path, config: dict[str, Any]
) -> tuple[dict[str, str], list[str]]:
    """Add the tokens that configs list and ``tokenizer.json`` does not.

    Returns the texts of special tokens: by name, and others.
    """
    if "added_tokens_decoder" in config:
        named, extra = _special_tokens(config)
        tokens = [_token(token) for _, token in _in_order(config["added_tokens_decoder"])]
    else:
        named, extra = _special_tokens(config | _json(directory / "special_tokens_map.json"))
        tokens = _older_tokens(directory, {token.content for token in (*named.values(), *extra)})
    names = {token.content for token in named.values()}
    for token in (*tokens, *named.values()):
        token.special = token.special or token.content in names
    known = {token.content for token in (*backend.get_added_tokens_decoder().values(), *tokens)}
    new = (token for token in (*named.values(), *extra) if token.content not in known)
    backend.add_tokens([*tokens, *new])
    texts = {name: token.content for name, token in named.items()}
    return texts, [token.content for token in extra]


def _in_order(tokens: Mapping[str, Any]) -> list[tuple[int, Any]]:
    return sorted(((int(index), token) for index, token in tokens.items()), key=itemgetter(0))


def _older_tokens(directory: Path, special: Container[str]) -> list[AddedToken]:
    """Tokens of ``added_tokens.json``, which has ids by text."""
    listed = sorted(_json(directory / "added_tokens.json").items(), key=itemgetter(1))
    return [
        AddedToken(text, normalized=text not in special, special=text in special)
        for text, _ in listed
    ]


def _special_tokens(config: Mapping[str, Any]) -> tuple[dict[str, AddedToken], list[AddedToken]]:
    """Special tokens of a config: by name, and others.

    Raises:
        ModelLoadError: A named token is no text.
    """
    extra = config.get(_EXTRA) or config.get("additional_special_tokens") or []
    given = {name: token for name, token in config.items() if name.endswith("_token")}
    if isinstance(extra, dict):
        given, extra = given | extra, []
    named = {
        name: _token(token)
        for name, token in given.items()
        if isinstance(token, str | dict) or (name in _NAMES and token is not None)
    }
    return named, [_token(token) for token in extra]


def _token(token: Any) -> AddedToken:
    """An added token from its text or fields."""
    if isinstance(token, str):
        return AddedToken(token, special=True)
    if not isinstance(token, dict):
        raise ModelLoadError(f"a special token is {token!r:.80}; it must be a text or an object")
    fields = {name: value for name, value in token.items() if name != "__type"}
    return AddedToken(**({"special": True} | fields))


def _chat_template(directory: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    """Chat template: of files before that of the config."""
    files = {
        path.stem: path
        for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))
    }
    if is_file(directory / "chat_template.jinja"):
        files["default"] = directory / "chat_template.jinja"
    texts = {name: read_bytes(path, 1 << 24).decode() for name, path in files.items()}
    given: Any = texts or config.get("chat_template")
    if isinstance(given, list):
        given = {template["name"]: template["template"] for template in given}
    if texts.keys() == {"default"}:
        given = texts["default"]
    template: ChatTemplate | None = given  # checked with the whole tokenizer
    return template
