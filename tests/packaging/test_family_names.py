"""What is known of a family of models is in its record: no other code compares its names."""

import ast
import re
from pathlib import Path
from typing import Final

from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES

HOME: Final = "models/families/"

# Files with such names that are no names of families, and why.
ALLOWED: Final = {
    "config/reasoning.py": "formats of reasoning, as options name them",
    "models/load/gguf_header.py": "kinds of tokenizers, as GGUF files name them",
    "models/tokenizer/agreement.py": "kinds of tokenizers, as GGUF files name them",
    "models/tokenizer/gguf_tokenizer.py": "kinds of tokenizers, as GGUF files name them",
    "output/beam.py": "types of beam search",
    "server/tools/formats.py": "formats of tool calls, as options name them",
}

_PREFIXES: Final = {name.removesuffix("Config") for name in CONFIG_MAPPING_NAMES.values()}
_SUFFIXES: Final = r"(\w*Attention|DecoderLayer|RMSNorm|Config|(Text|Pre|Base)?Model|For[A-Z]\w+)?"
_CLASS: Final = re.compile(rf"({'|'.join(sorted(_PREFIXES, key=len, reverse=True))}){_SUFFIXES}")


def is_name_of_a_family(text: str) -> bool:
    """Whether a string is a ``model_type``, a class of one, or the prefix of its classes."""
    return text in CONFIG_MAPPING_NAMES or _CLASS.fullmatch(text) is not None


def names_of_families(source: str) -> set[str]:
    strings = {
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return {text for text in strings if is_name_of_a_family(text)}


def test_only_records_name_families(root: Path) -> None:
    package = root / "python" / "pagedserve"
    found = {
        path.relative_to(package).as_posix(): names
        for path in package.rglob("*.py")
        if (names := names_of_families(path.read_text(encoding="utf-8")))
    }
    elsewhere = {path: names for path, names in found.items() if not path.startswith(HOME)}
    assert elsewhere.keys() == ALLOWED.keys(), elsewhere
    assert found.keys() - elsewhere.keys(), "the records have names"


def test_names_of_families_are_found() -> None:
    source = 'is_gemma = type(norm).__name__.startswith("Gemma") or kind in ("llama", "BertModel")'
    assert names_of_families(source) == {"Gemma", "llama", "BertModel"}
    assert not names_of_families('"""Of llama."""; x = "attention", "model", "AutoModelling"')
