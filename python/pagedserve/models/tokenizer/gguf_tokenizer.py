"""The tokenizer in a GGUF file's metadata, without transformers.

A GGUF file has a vocabulary, merges or scores, and names of what surrounds them: the model of the
tokenizer and, of byte-level BPE, the expression that splits text before the merges.

Invariants:

1. Ids and texts are those of the tokenizer that transformers makes of the file, which
   `pagedserve.models.load.convert` keeps; a file whose kind is not known here is refused.  Special
   tokens outside the alphabet of bytes, which transformers loses, are kept.
2. No token is added to the vocabulary of the file: the model has no row for it.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, Self

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from pagedserve.byte_alphabet import BYTE_OF_CHARACTER, CHARACTER_OF_BYTE
from pagedserve.errors import ModelLoadError
from pagedserve.models.families.table import family_of_gguf
from pagedserve.models.load.gguf_header import (
    LIKE_LLAMA3,
    GgufHeader,
    TextList,
    chat_template_of,
    read_header,
)
from pagedserve.models.tokenizer.fast_tokenizer import ChatTemplate, FastTokenizer

_SPACE: Final = "▁"
# A character outside the alphabet of bytes.
_NOT_A_BYTE: Final = re.compile(f"[^{re.escape(''.join(BYTE_OF_CHARACTER))}]")
_MERGES: Final = "tokenizer.ggml.merges"
# Types of tokens in a file.
_CONTROL: Final = 3
_USER_DEFINED: Final = 4

_NAMED: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

_WORDS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
)
_CASED_REST: Final = _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)

_LLAMA3: Final = rf"{_ENDINGS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2: Final = rf"{_ENDINGS}|{_WORDS}|\p{{N}}|{_REST}"
_TEKKEN: Final = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_CASED_REST}"
_GPT4O: Final = rf"{_CASED[0]}{_ENDINGS}?|{_CASED[1]}{_ENDINGS}?|\p{{N}}{{1,3}}|{_CASED_REST}"

# Expressions by ``tokenizer.ggml.pre``; None is GPT-2's, which ``ByteLevel`` has.  Models of the
# last line were trained with digits apart, which transformers leaves out.
SPLITS: Final[dict[str, str | None]] = {
    **dict.fromkeys((*LIKE_LLAMA3, "dbrx", "smaug-bpe"), _LLAMA3),
    "tekken": _TEKKEN,
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O),
    **dict.fromkeys(("default", "gpt-2", "phi-2", "jina-es", "jina-de", "mpt", "olmo"), None),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "command-r"), None),
}


@dataclass(frozen=True, slots=True)
class _Metadata:
    """Fields of a GGUF file.

    Attributes:
        architecture: ``general.architecture``.
        fields: The others, by their names without ``tokenizer.ggml.``.
        chat_template: ``tokenizer.chat_template``, or with others beside it all by name.
    """

    architecture: str
    fields: Mapping[str, Any]
    chat_template: ChatTemplate | None

    @classmethod
    def of(cls, header: GgufHeader) -> Self:
        """Fields of a header.

        Raises:
            UnicodeError: A token or the chat template is not UTF-8.
        """
        start, fields = "tokenizer.ggml.", header.fields
        return cls(
            architecture=str(fields.get("general.architecture")),
            fields={
                name.removeprefix(start): _read(name, value)
                for name, value in fields.items()
                if name.startswith(start)
            },
            chat_template=chat_template_of(fields),
        )

    @property
    def tokens(self) -> list[str]:
        """Tokens by id."""
        tokens: list[str] = self.fields["tokens"]
        return tokens

    def of_type(self, kind: int) -> list[str]:
        """Tokens of a type."""
        pairs = zip(self.tokens, self.fields.get("token_type", ()), strict=False)
        return [token for token, its_kind in pairs if its_kind == kind]


def _read(name: str, value: object) -> object:
    """A field's value, with the texts of a list: merges as pairs."""
    if not isinstance(value, TextList):
        return value
    return value.read_pairs() if name == _MERGES else value.texts


def tokenizer_of_gguf(path: Path, header: GgufHeader | None = None) -> FastTokenizer:
    """Make the tokenizer of a GGUF file.

    Args:
        path: The file.
        header: Its header; None reads it.

    Raises:
        ModelLoadError: The file is damaged, or its tokenizer is of an unsupported kind.
    """
    try:
        metadata = _Metadata.of(read_header(path) if header is None else header)
        make = _maker(metadata)
        backend = make(metadata)
        named = _add_special_tokens(backend, metadata)
    except ModelLoadError:
        raise
    except Exception as error:  # fields of wrong types, merges of unknown tokens: unrelated types
        raise ModelLoadError(f"{path.name}: its tokenizer cannot be read: {error}") from error
    return FastTokenizer(backend, named, metadata.chat_template, name_or_path=str(path))


def _maker(metadata: _Metadata) -> Callable[[_Metadata], Tokenizer]:
    """Choose the function that makes the backend.

    Raises:
        ModelLoadError: The kind of tokenizer is not supported.
    """
    kind, pre = metadata.fields.get("model"), metadata.fields.get("pre", "default")
    if kind == "gpt2":
        if pre not in SPLITS:
            raise ModelLoadError(
                f"its text is split as {pre!r} (tokenizer.ggml.pre), and how is not known; "
                f"accepted are {', '.join(sorted(SPLITS))}"
            )
        return _byte_level
    if kind == "llama":
        return _SENTENCEPIECE[family_of_gguf(metadata.architecture).gguf_tokenizer]
    raise ModelLoadError(
        f"its tokenizer is {kind!r} (tokenizer.ggml.model); accepted are 'gpt2' and 'llama'"
    )


def _byte_level(metadata: _Metadata) -> Tokenizer:
    """Byte-level BPE, as of GPT-2, Llama 3, Qwen and SmolLM."""
    tokens = metadata.tokens
    if _NOT_A_BYTE.search("".join(tokens)):
        whole = {*metadata.of_type(_CONTROL), *metadata.of_type(_USER_DEFINED)}
        tokens = [token if token in whole else _spelled(token) for token in tokens]
    backend = Tokenizer(
        BPE(
            vocab=_ids(tokens),
            merges=_listed_merges(metadata),
            continuing_subword_prefix="",
            end_of_word_suffix="",
            fuse_unk=False,
            ignore_merges=metadata.fields.get("pre") in LIKE_LLAMA3,
        )
    )
    split = SPLITS[metadata.fields.get("pre", "default")]
    if split is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    if family_of_gguf(metadata.architecture).composes_text:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _spelled(token: str) -> str:
    """A token in the alphabet of bytes; some files have added tokens as plain text."""
    if not _NOT_A_BYTE.search(token):
        return token
    return "".join(CHARACTER_OF_BYTE[byte] for byte in token.encode())


def _llama(metadata: _Metadata) -> Tokenizer:
    """SentencePiece's BPE, as of Llama 2 and Mistral: a space before the first word, if any."""
    is_spaced = metadata.fields.get("add_space_prefix", True)
    scheme = "first" if is_spaced else "never"
    backend = _byte_fallback(metadata.tokens, _merges(metadata))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme, split=False)
    backend.decoder = _without_space() if is_spaced else decoders.Sequence(_spaces())
    return backend


def _phi3(metadata: _Metadata) -> Tokenizer:
    """Like Llama's, but with a space before each part of a text between special tokens."""
    backend = _byte_fallback(metadata.tokens, _merges(metadata))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
    )
    backend.decoder = _without_space()
    return backend


def _gemma(metadata: _Metadata) -> Tokenizer:
    """Gemma's: no space before the first word, merges in the order of tokens.

    Runs of spaces are tokens, which files spell with spaces.
    """
    tokens = [
        _SPACE * len(token) if " " in token and not token.strip() else token
        for token in metadata.tokens
    ]
    order = ((token, -index) for token, index in _ids(tokens).items())
    merges = _listed_merges(metadata) or _merges_by_score(_ids(tokens), order)
    backend = _byte_fallback(tokens, merges, unk_token="<unk>")
    backend.normalizer = normalizers.Replace(" ", _SPACE)
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence(_spaces())
    return backend


_SENTENCEPIECE: Final = {"llama": _llama, "phi3": _phi3, "gemma": _gemma}


def _byte_fallback(
    tokens: Sequence[str], merges: list[tuple[str, str]], unk_token: str | None = None
) -> Tokenizer:
    """BPE whose unknown characters become tokens of their bytes."""
    return Tokenizer(
        BPE(
            vocab=_ids(tokens),
            merges=merges,
            unk_token=unk_token,
            fuse_unk=True,
            byte_fallback=True,
        )
    )


def _spaces() -> list[Any]:
    return [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]


def _without_space() -> Any:
    """Decoder that removes the space before the first word."""
    return decoders.Sequence([*_spaces(), decoders.Strip(" ", 1, 0)])


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(tokens)}


def _merges(metadata: _Metadata) -> list[tuple[str, str]]:
    """Merges of a file, or those that the scores of its tokens imply."""
    if "merges" in metadata.fields:
        return _listed_merges(metadata)
    tokens = metadata.tokens
    scores = dict(zip(tokens, metadata.fields["scores"], strict=True))
    return _merges_by_score(_ids(tokens), scores.items())


def _listed_merges(metadata: _Metadata) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = metadata.fields.get("merges", [])
    return merges


def _merges_by_score(
    vocab: Collection[str], scores: Iterable[tuple[str, float]]
) -> list[tuple[str, str]]:
    """Merges of two tokens to a third, best score of the third first.

    Args:
        vocab: All tokens.
        scores: Tokens with their scores.
    """
    found = [
        (score, cut, len(token) - cut, token)
        for token, score in scores
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    found.sort(key=itemgetter(0, 1, 2), reverse=True)
    return [(token[:cut], token[cut:]) for _, cut, _, token in found]


def _add_special_tokens(backend: Tokenizer, metadata: _Metadata) -> dict[str, str]:
    """Add the tokens that are never split, and those that start and end a text.

    Returns:
        Texts of named tokens.
    """
    tokens, fields = metadata.tokens, metadata.fields
    named = {name: tokens[fields[key]] for name, key in _NAMED.items() if key in fields}
    user_defined, control = (
        [token for token in metadata.of_type(kind) if backend.token_to_id(token) is not None]
        for kind in (_USER_DEFINED, _CONTROL)
    )
    special = {*control, *named.values()} - {*user_defined}
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in sorted(special)])
    backend.add_tokens([AddedToken(token, normalized=False) for token in user_defined])
    starts = fields.get(
        "add_bos_token", fields["model"] == "llama" or fields.get("pre") in LIKE_LLAMA3
    )
    ends = fields.get("add_eos_token", False)
    around = [named.get("bos_token") if starts else None, named.get("eos_token") if ends else None]
    _surround(backend, *around)
    return named


def _surround(backend: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Add these tokens around each text."""
    first, second = (
        [
            *([f"{bos}:{number}"] if bos else []),
            f"${text}:{number}",
            *([f"{eos}:{number}"] if eos else []),
        ]
        for number, text in enumerate("AB")
    )
    ids = {token: backend.token_to_id(token) for token in (bos, eos) if token is not None}
    backend.post_processor = TemplateProcessing(
        single=first, pair=[*first, *second], special_tokens=list(ids.items())
    )
