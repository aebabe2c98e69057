"""The header of a GGUF file: its fields and the entries of its tensors.

The only reader of the format for both backends.  Every length is checked against the file before
anything is read or created for it: the gguf package's reader creates objects for each declared
element, so for an array of 2^60 numbers in a file of a hundred bytes it would run indefinitely.

The file is read, not mapped: one that becomes shorter meanwhile is refused and ends no process.

Costs: some milliseconds for a vocabulary of 50,000 tokens with as many merges, and some 15 more to
read them.
"""

import os
import re
import struct
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

from pagedserve._core.cpu import pass_texts, read_pairs, read_texts
from pagedserve.errors import UnsupportedModelError
from pagedserve.regular_files import opened

MAX_FIELDS: Final = 65_536
MAX_TENSORS: Final = 65_536
# Maximum elements of all arrays; a vocabulary of 200,000 tokens has 850,000 with merges and types.
MAX_ELEMENTS: Final = 4_000_000
# Bytes of a text in a list: of a token or a merge; the longest known have some hundred.
MAX_TOKEN_BYTES: Final = 4096
# Bytes of another text; chat templates have some kilobytes.
MAX_TEXT_BYTES: Final = 16 << 20
_MAX_DIMENSIONS: Final = 4
_DEFAULT_ALIGNMENT: Final = 32
_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_STRING: Final = 8
_ARRAY: Final = 9
# Formats of `struct` of a value, by type; strings and arrays have none.
_FORMATS: Final = dict(
    zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True),
)
# Bytes of a file that are read at once.
_PIECE: Final = 1 << 22


# Values of ``tokenizer.ggml.pre``.  As llama.cpp reads such files, texts begin with the first token
# unless one says otherwise, and a word that is a token needs no merges.
LIKE_LLAMA3: Final = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1"),
    *("pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
)
_TEMPLATE: Final = "tokenizer.chat_template"
# Tensors that exist where a config has these fields set.
BIASES: Final = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
# Prefixes of the names of tensors without which a model computes something else.
_READ_WHOLE: Final = ("blk.", "output")
# Fields of the tokens that end a text, a turn or a message.
_ENDS: Final = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
# Ends of a turn in a vocabulary, which llama.cpp finds by their texts: some files name the end of a
# text alone.
_END_TEXTS: Final = frozenset(
    {
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>"),
        *("<EOT>", "_<EOT>", "<end_of_utterance>"),
        *("<|return|>", "<|call|>"),
    }
)
# In a vocabulary with all of these, as that of harmony, the last ends a message of several.
_HARMONY: Final = ("<|return|>", "<|call|>", "<|end|>")


def end_token_ids(fields: Mapping[str, Any]) -> list[int]:
    """Tokens that end a sequence, of a header's fields: those that are named come first.

    Raises:
        UnicodeError: A token of the vocabulary is not UTF-8.
    """
    found = [fields[name] for name in _ENDS if name in fields]
    if isinstance(more := fields.get("tokenizer.ggml.eos_token_ids"), list):
        found += more
    if isinstance(tokens := fields.get("tokenizer.ggml.tokens"), TextList):
        ends = {token: index for index, token in enumerate(tokens.texts) if token in _END_TEXTS}
        found += ends.values()
        if all(token in ends for token in _HARMONY):
            found = [token for token in found if token != ends[_HARMONY[-1]]]
    return [token for place, token in enumerate(found) if token not in found[:place]]


def chat_template_of(fields: Mapping[str, Any]) -> Any:
    """Chat template of a header's fields, or several by name; None without any.

    Raises:
        ValueError: One is not UTF-8, or has a name that may not become that of a file.
    """
    default = fields.get(_TEMPLATE)
    start = f"{_TEMPLATE}."
    named = {name.removeprefix(start): fields[name] for name in fields if name.startswith(start)}
    if odd := [name for name in named if not re.fullmatch(r"\w+", name, re.ASCII)]:
        raise ValueError(f"it has the chat template {odd[0][:80]!r}; names have letters and digits")
    for text in (default, *named.values()):
        if isinstance(text, str):
            text.encode()
    if not named:
        return default
    return named if default is None else named | {"default": default}


def rope_scaling(architecture: str, fields: Mapping[str, Any]) -> tuple[Any, Any]:
    """Type of the scaling of rotary embeddings, "none" without any, and its factor or None.

    Without a type it is linear, by a factor whose key had another name at first.

    Args:
        architecture: Name with which the keys begin.
        fields: A header's fields.
    """
    start = f"{architecture}.rope."
    factor = fields.get(f"{start}scaling.factor")
    factor = fields.get(f"{start}scale_linear") if factor is None else factor
    return fields.get(f"{start}scaling.type", "linear" if factor else "none"), factor


def check_known(model: str, tensors: Iterable[str], known: Container[str]) -> None:
    """Check that all tensors that a file has for its layers and its head are read.

    Args:
        model: Name of the model in errors.
        tensors: Names in the file.
        known: Names that are read.

    Raises:
        UnsupportedModelError: Names the first tensor that is not read.
    """
    others = sorted(
        {name for name in tensors if name.startswith(_READ_WHOLE) and name not in known}
    )
    if others:
        raise UnsupportedModelError(
            f"model {model!r}: its file has {len(others)} tensors that are not read for its "
            f"architecture, the first is {others[0]!r}: give the model's directory"
        )


class GgufVersionError(ValueError):
    """A version of the format that is not supported."""


class TextList:
    """The texts of a field, whose lengths were checked; a vocabulary has 50,000 and more."""

    def __init__(self, content: bytes, *, big_endian: bool) -> None:
        """Keep the bytes of the texts, each after its length."""
        self._content, self._big_endian = content, big_endian

    @cached_property
    def texts(self) -> list[str]:
        """The texts, read once: the config and the tokenizer need a vocabulary's.

        Raises:
            UnicodeError: One is not UTF-8.
        """
        return read_texts(self._content, big_endian=self._big_endian)

    def read_pairs(self) -> list[tuple[str, str]]:
        """The texts, each split at its only space, as merges are written.

        Raises:
            ValueError: One has no space or several, or is not UTF-8.
        """
        return read_pairs(self._content, big_endian=self._big_endian)


class TensorEntry(NamedTuple):
    """A tensor as a header declares it.

    Attributes:
        name: Name.
        shape: Sizes, rows first.
        kind: Number of the type of its weights.
        offset: First byte, counted from the first tensor.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a GGUF file.

    Attributes:
        fields: Values by name: numbers, flags, texts, lists of numbers and flags, and `TextList`.
            Bytes of a text that are not UTF-8 become surrogates.
        spans: First byte of each field, with its name, and the byte after it; by name.
        tensors: Tensors in the order of the file; nothing is known of their bytes.
        is_big_endian: Whether the file has the other byte order.
        alignment: Tensors begin at multiples of that many bytes.
        data_offset: Byte of the file where tensors begin.
    """

    fields: dict[str, Any]
    spans: dict[str, tuple[int, int]]
    tensors: list[TensorEntry]
    is_big_endian: bool
    alignment: int
    data_offset: int


def read_header(path: Path) -> GgufHeader:
    """Read the header of a GGUF file.

    Raises:
        ValueError: It is no regular file or no GGUF file, or cut short or damaged; names what is
            declared and what the file has.
        GgufVersionError: It is of an unsupported version.
    """
    with opened(path) as (file, size):
        return header_of(path, file.fileno(), size)


def header_of(path: Path, file: int, size: int) -> GgufHeader:
    """Read the header of an open file; see `read_header`.

    Args:
        path: Its name in errors.
        file: File descriptor.
        size: Bytes of the file.
    """
    start = os.pread(file, len(_MAGIC), 0)
    if start != _MAGIC:
        raise ValueError(
            f"{path} is not a GGUF file: it starts with {start!r}, a GGUF file with {_MAGIC!r}"
        )
    try:
        header = _Reader(file, size).header()
    except GgufVersionError as error:
        raise GgufVersionError(f"{path}: {error}") from error
    except ValueError as error:
        raise ValueError(
            f"{path} is cut short or damaged: it has {size} bytes, and {error}"
        ) from error
    if (num_parts := header.fields.get("split.count", 1)) not in (0, 1):
        raise ValueError(
            f"{path} is one of {str(num_parts)[:20]} files of a model: merge them into one, as "
            "gguf-split --merge does"
        )
    return header


class _Reader:
    """A parser of a header.

    Attributes:
        at: Offset of the next byte.
        order: Byte order, as `struct` writes it.
    """

    def __init__(self, file: int, size: int) -> None:
        """Begin after the magic; ``file`` is a descriptor, ``size`` the bytes of the file."""
        self.at, self.order = len(_MAGIC), "<"
        self._file, self._size = file, size
        self._content = b""
        self._num_elements = 0

    def header(self) -> GgufHeader:
        """Read the header; see `read_header`."""
        version = self.version()
        if version not in _VERSIONS:
            raise GgufVersionError(f"it is GGUF of version {version}; accepted are 2 and 3")
        num_tensors = self.count("tensors", MAX_TENSORS)
        num_fields = self.count("fields", MAX_FIELDS)
        fields: dict[str, Any] = {}
        spans: dict[str, tuple[int, int]] = {}
        for _ in range(num_fields):
            start, name = self.at, self.text("a field's name")
            if name in fields:
                raise ValueError(f"it has the field {name!r} twice")
            fields[name] = self.value(self.number("I"))
            spans[name] = start, self.at
        tensors = [self.entry() for _ in range(num_tensors)]
        alignment = fields.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment % 8:
            raise ValueError(f"its general.alignment is {alignment}; it must be a multiple of 8")
        data_offset = -(-self.at // alignment) * alignment
        return GgufHeader(fields, spans, tensors, self.order == ">", alignment, data_offset)

    def version(self) -> int:
        """Read the version, which shows the byte order."""
        version = self.number("I")
        if not version & 0xFFFF:  # written with the other byte order
            self.at, self.order = len(_MAGIC), ">"
            version = self.number("I")
        return version

    def count(self, what: str, most: int) -> int:
        """Read the number of tensors or fields."""
        number = self.number("Q")
        if number > most:
            raise ValueError(f"it announces {number} {what}; accepted are at most {most}")
        return number

    def skip(self, num_bytes: int, what: str) -> int:
        """Skip bytes, and read the file up to their end; return the offset of the first.

        Raises:
            ValueError: The file is too short.
        """
        start = self.at
        if num_bytes > self._size - start:
            raise ValueError(
                f"it announces {what} of {num_bytes} bytes at byte {start} of {self._size}"
            )
        self.at += num_bytes
        if self.at > len(self._content):
            self.load(self.at)
        return start

    def load(self, end: int) -> None:
        """Read the file up to a byte and some further, as far as it goes.

        Raises:
            ValueError: The file has become shorter.
        """
        have = len(self._content)
        pieces = [self._content]
        while have < end:
            piece = os.pread(self._file, max(_PIECE, end - have), have)
            if not piece:
                raise ValueError(f"its end was at byte {have} when it was read")
            pieces.append(piece)
            have += len(piece)
        self._content = b"".join(pieces)

    def number(self, kind: str) -> int:
        """Read the next number of a `struct` type."""
        start = self.skip(struct.calcsize(kind), "a number")
        (found,) = struct.unpack_from(self.order + kind, self._content, start)
        return int(found)

    def text(self, what: str) -> str:
        """Read a length and that many bytes."""
        length = self.number("Q")
        if length > MAX_TEXT_BYTES:
            raise ValueError(
                f"it announces {what} of {length} bytes at byte {self.at} of {self._size}; "
                f"accepted are at most {MAX_TEXT_BYTES}"
            )
        start = self.skip(length, what)
        return self._content[start : self.at].decode(errors="surrogateescape")

    def value(self, kind: int) -> Any:
        """Read a field's value."""
        if kind == _STRING:
            return self.text("a text")
        if kind == _ARRAY:
            return self.array(self.number("I"), self.number("Q"))
        return self.numbers(kind, 1, "a number")[0]

    def array(self, kind: int, count: int) -> list[Any] | TextList:
        """Read an array of strings or numbers."""
        self._num_elements += count
        if self._num_elements > MAX_ELEMENTS:
            raise ValueError(
                f"its arrays announce {self._num_elements} elements; accepted are at most "
                f"{MAX_ELEMENTS}"
            )
        return self.texts(count) if kind == _STRING else [*self.numbers(kind, count, "an array")]

    def numbers(self, kind: int, count: int, what: str) -> tuple[Any, ...]:
        """Read consecutive numbers."""
        if kind not in _FORMATS:
            raise ValueError(f"it has a value of type {kind}, or arrays within arrays")
        form = f"{self.order}{count}{_FORMATS[kind]}"
        start = self.skip(struct.calcsize(form), what)
        return struct.unpack_from(form, self._content, start)

    def texts(self, count: int) -> TextList:
        """Pass over consecutive texts, hundreds of thousands of them without a call for each."""
        first, left, big_endian = self.at, count, self.order == ">"
        while left:
            passed, self.at = pass_texts(
                self._content, self.at, left, max_bytes=MAX_TOKEN_BYTES, big_endian=big_endian
            )
            left -= passed
            if left:  # the next is not in memory yet, or too long
                self.listed_text()
                left -= 1
        return TextList(self._content[first : self.at], big_endian=big_endian)

    def listed_text(self) -> None:
        """Pass over a text of a list, and read the file up to its end."""
        start = self.skip(8, "a text")
        (num_bytes,) = struct.unpack_from(f"{self.order}Q", self._content, start)
        if num_bytes > MAX_TOKEN_BYTES:
            raise ValueError(
                f"it announces a text of {num_bytes} bytes at byte {self.at} of {self._size}; "
                f"accepted are at most {MAX_TOKEN_BYTES} in a list"
            )
        self.skip(num_bytes, "a text")

    def entry(self) -> TensorEntry:
        """Read the next tensor's entry."""
        name, num_dimensions = self.text("a tensor's name"), self.number("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"{name!r} has {num_dimensions} dimensions; it must have 1 to 4")
        sizes = [self.number("Q") for _ in range(num_dimensions)]
        return TensorEntry(name, tuple(reversed(sizes)), self.number("I"), self.number("Q"))
