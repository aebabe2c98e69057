"""Which files ``FastTokenizer`` reads as transformers does, so that it may take its place.

Known are the families of the native backend, whose GGUF files are read alike, and of directories
those whose ``tokenizer.json`` transformers takes unchanged: its class replaces no part of it, or
replaces parts by equal ones.
"""

import json
from pathlib import Path
from typing import Any, Final

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from pagedserve.models.families.record import DecoderFamily
from pagedserve.models.families.table import family_of, family_of_gguf
from pagedserve.models.load.gguf_header import GgufHeader
from pagedserve.models.tokenizer.gguf_tokenizer import SPLITS
from pagedserve.regular_files import is_file, read_json

# Classes that take every part of the file.
_UNCHANGED: Final = frozenset({"PreTrainedTokenizer", "TokenizersBackend"})
# Options of transformers' tokenizers that ``FastTokenizer`` does not have.
_OTHER_OPTIONS: Final = (
    *("auto_map", "split_special_tokens", "fix_mistral_regex"),
    "add_prefix_space",
)


def is_known_gguf(header: GgufHeader) -> bool:
    """Whether a GGUF file is of a family whose tokenizers are read alike."""
    architecture = str(header.fields.get("general.architecture"))
    return isinstance(family_of_gguf(architecture), DecoderFamily)


def class_of_directory(directory: Path) -> str | None:
    """Class that transformers uses for a directory, without the ending ``Fast``.

    None for other families, and with options that change what a class does.
    """
    config, options = (
        _object(directory / name) for name in ("config.json", "tokenizer_config.json")
    )
    model_type = config.get("model_type")
    family = family_of(model_type) if isinstance(model_type, str) else None
    if not isinstance(family, DecoderFamily):
        return None
    if any(options.get(name) for name in _OTHER_OPTIONS):
        return None
    named = str(options.get("tokenizer_class") or config.get("tokenizer_class") or "")
    named = named.removesuffix("Fast")
    if family.fixes_tokenizer_class and named != "MistralCommonBackend":
        return family.tokenizer_class
    return named or family.tokenizer_class


def is_taken_unchanged(backend: Tokenizer, class_name: str) -> bool:
    """Whether a class of transformers leaves a tokenizer as it is.

    Args:
        backend: What is in ``tokenizer.json``.
        class_name: See `class_of_directory`.
    """
    if class_name == "LlamaTokenizer":  # not used for files with this type
        return _has_byte_level(backend)
    if class_name in _UNCHANGED:
        return True
    return class_name in _REPLACED and _parts(backend) == _parts(_REPLACED[class_name]())


def _qwen2() -> Tokenizer:
    """The parts of ``Qwen2Tokenizer``."""
    backend = Tokenizer(BPE(continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLITS["qwen2"] or ""), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _gemma() -> Tokenizer:
    """The parts of ``GemmaTokenizer``."""
    backend = Tokenizer(BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


_REPLACED: Final = {"Qwen2Tokenizer": _qwen2, "GemmaTokenizer": _gemma}


def _parts(backend: Tokenizer) -> tuple[object, ...]:
    """What classes replace: everything but vocabulary, merges and what surrounds a text."""
    model, ends = backend.model, ("continuing_subword_prefix", "end_of_word_suffix")
    flags = ("dropout", "unk_token", "fuse_unk", "byte_fallback", "ignore_merges")
    return (
        type(model),
        *(getattr(model, name, None) for name in flags),
        *(getattr(model, name, None) or "" for name in ends),
        *map(_fields, (backend.normalizer, backend.pre_tokenizer, backend.decoder)),
    )


def _fields(part: Any) -> object:
    """Fields of a part, but those for offsets, which nothing here reads."""
    if part is None:
        return None

    def without_offsets(fields: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if name != "trim_offsets"}

    return json.loads(part.__getstate__(), object_hook=without_offsets)


def _has_byte_level(backend: Tokenizer) -> bool:
    parts = json.dumps([_fields(backend.pre_tokenizer), _fields(backend.decoder)])
    return '"ByteLevel"' in parts


def _object(path: Path) -> dict[str, Any]:
    """Contents of a JSON file; empty without it, or where it holds something else."""
    try:
        content = read_json(path) if is_file(path) else {}
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
