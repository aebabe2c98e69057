"""Detokenization, at once or incremental.

Invariants:

1. The text of a ``TextStream`` and its rest, joined, equal ``Detokenizer.decode`` of all its
   tokens, however they were split over calls.
2. Text of a stream is final: no later token changes it, and it ends at a character boundary.  It
   too depends on the tokens only: an engine that gets them at once has the text of another that
   got them one by one.
3. A stream is a value: taking tokens creates a new one, so a forked sequence shares its parent's
   stream and a step can be processed before it is recorded.

Two streams, selected by the tokenizer's decoder:

- Byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM, ...): a token is a string of bytes, so text comes
  from UTF-8 decoding the bytes, at most three of them held back.  Constant cost per token, except
  for the copy of the text so far: a microsecond for ten thousand characters.
- Any other: decode the pending tokens after the last settled ones, and take what is new.
  Byte-fallback tokens (``<0xE2>``) settle only when their run ends, since one invalid byte turns
  the *whole* run into replacement characters.

``tokenizers.decoders.DecodeStream`` does neither: on byte-fallback vocabularies it raises "Invalid
prefix" or returns text that differs from the whole decode, and tokens that never complete a
character cost it quadratic time.
"""

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Self

from pagedserve.byte_alphabet import BYTE_OF_CHARACTER
from pagedserve.errors import panic_as_error
from pagedserve.tokenizer import TextTokenizer

if TYPE_CHECKING:
    import tokenizers

_REPLACEMENT: Final = "\ufffd"
_BYTE_TOKEN: Final = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextStream(ABC):
    """Text of one sequence as its tokens arrive; immutable.

    Attributes:
        text: Final text so far that was not dropped.
        num_tokens: Number of tokens taken.
    """

    text: str = ""
    num_tokens: int = 0

    @abstractmethod
    def advanced(self, token_ids: Sequence[int]) -> Self:
        """Return the stream after the next tokens, those from number ``num_tokens`` on."""

    def without(self, num_chars: int) -> Self:
        """Return the stream with the first ``num_chars`` characters of its text dropped."""
        return replace(self, text=self.text[num_chars:]) if num_chars else self

    @abstractmethod
    def rest(self) -> str:
        """Return what is held back, incomplete characters as U+FFFD: the end of a finished text."""

    @property
    def held_byte(self) -> int | None:
        """Byte of the last token, if that is one byte whose run may continue."""
        return None

    def complete_rest(self) -> str:
        """Return the whole characters that are held back only because a later byte may change them.

        "" if the last one is incomplete.
        """
        return ""


class Detokenizer:
    """Detokenizer for one tokenizer and one set of options.

    ``spaces_between_special_tokens`` is not an option: transformers 5 ignores it.
    """

    def __init__(self, tokenizer: TextTokenizer, *, skip_special_tokens: bool = True) -> None:
        self._vocabulary = _Vocabulary(tokenizer, skip_special_tokens=skip_special_tokens)
        self._names = _Vocabulary(tokenizer, skip_special_tokens=False)
        self._token_texts: dict[int, str] = {}
        self._empty: TextStream = _WindowStream(vocabulary=self._vocabulary)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None and _is_byte_level(backend):
            self._empty = _ByteStream(token_bytes=_TokenBytes(backend, self._vocabulary.silent))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode a whole sequence."""
        return self._vocabulary.decode(token_ids)

    def token_text(self, token_id: int) -> str:
        """Text of one token alone, for logprobs; cached per token.

        A special token is shown by name whatever the options are, incomplete bytes as U+FFFD.
        """
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self._names.decode([token_id])
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token alone, for logprobs; they may be a part of a character."""
        if isinstance(self._empty, _ByteStream):
            found = self._empty.token_bytes.of([token_id])
            return found or self.token_text(token_id).encode()  # a special token has only a name
        byte = self._names.byte(token_id)
        return self.token_text(token_id).encode() if byte is None else bytes([byte])

    def stream(self) -> TextStream:
        """Create the stream of a sequence without tokens."""
        return self._empty

    def hides(self, texts: Iterable[str]) -> bool:
        """Whether any of these strings contains a special token that is skipped."""
        return any(name in text for text in texts for name in self.hidden_tokens)

    @property
    def hidden_tokens(self) -> Mapping[str, int]:
        """Special tokens that are skipped, by their names."""
        return self._vocabulary.hidden


def _is_byte_level(backend: object) -> bool:
    """Whether this is a byte-level tokenizer of tokenizers, a package that may be absent."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel

    return isinstance(backend, Tokenizer) and isinstance(backend.decoder, ByteLevel)


class _Vocabulary:
    """Tokens of the tokenizer; those in ``silent`` have no text."""

    def __init__(self, tokenizer: TextTokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        added = tokenizer.added_tokens_decoder.items() if skip_special_tokens else ()
        self.hidden = {str(token): token_id for token_id, token in added if token.special}
        self.silent = frozenset(self.hidden.values())

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode ids to text.

        ``clean_up_tokenization_spaces`` is off whatever the tokenizer's configuration is: it would
        remove spaces that were already returned.

        Raises:
            RuntimeError: The tokenizer's library panics, which concerns these ids only.
        """
        with panic_as_error():
            text = self._tokenizer.decode(
                list(token_ids),
                skip_special_tokens=self._skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        assert isinstance(text, str)  # noqa: S101  # a list of ids decodes to one string
        return text

    def name(self, token_id: int) -> str:
        """The vocabulary's string of a token; "" if there is no token."""
        (name,) = self._tokenizer.convert_ids_to_tokens([token_id])
        return name or ""

    def audible(self, token_ids: Sequence[int]) -> list[int]:
        """Ids that have text: models pad their vocabulary with ids that have no token."""
        names = self._tokenizer.convert_ids_to_tokens(list(token_ids))
        pairs = zip(token_ids, names, strict=True)
        return [
            token_id for token_id, name in pairs if name is not None and token_id not in self.silent
        ]

    def byte(self, token_id: int) -> int | None:
        """The byte of a character that an id represents; None if it represents none."""
        name = self.name(token_id)
        return int(name[3:5], 16) if _BYTE_TOKEN.fullmatch(name) else None


class _TokenBytes:
    """Bytes of each token of a byte-level vocabulary, cached per token."""

    def __init__(self, backend: "tokenizers.Tokenizer", silent: frozenset[int]) -> None:
        self._backend = backend
        self._known: dict[int, bytes] = dict.fromkeys(silent, b"")

    def of(self, token_ids: Sequence[int]) -> bytes:
        known = self._known
        return b"".join(
            [
                known[token_id] if token_id in known else self._learn(token_id)
                for token_id in token_ids
            ]
        )

    def _learn(self, token_id: int) -> bytes:
        # An id without a token (models pad their vocabulary) has no text.
        token = self._backend.id_to_token(token_id) or ""
        try:
            found = bytes([BYTE_OF_CHARACTER[character] for character in token])
        except KeyError:  # an added token, whose string is its text
            found = token.encode()
        self._known[token_id] = found
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _ByteStream(TextStream):
    """``held`` is the start of one character, at most three bytes."""

    token_bytes: _TokenBytes
    held: bytes = b""

    def advanced(self, token_ids: Sequence[int]) -> Self:
        data = self.held + self.token_bytes.of(token_ids)
        piece, num_bytes = codecs.utf_8_decode(data, "replace", False)  # not final
        return type(self)(
            text=self.text + piece,
            num_tokens=self.num_tokens + len(token_ids),
            token_bytes=self.token_bytes,
            held=data[num_bytes:],
        )

    def rest(self) -> str:
        return self.held.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class _WindowStream(TextStream):
    """Decodes ``settled + pending`` and takes the text after that of ``settled``.

    ``settled`` ends in the last token that later ones cannot change, and whose text is visible,
    because decoders strip the space at the start of a text.  Neither holds a token without text:
    such a token ends no run of bytes, and any number of them costs nothing.
    """

    vocabulary: _Vocabulary
    settled: tuple[int, ...] = ()
    pending: tuple[int, ...] = ()

    def advanced(self, token_ids: Sequence[int]) -> Self:
        new = self.vocabulary.audible(token_ids)
        num_tokens = self.num_tokens + len(token_ids)
        taken = replace(self, num_tokens=num_tokens, pending=(*self.pending, *new))
        for end in range(len(taken.pending), len(self.pending), -1):
            window = replace(taken, pending=taken.pending[:end])
            piece = window.rest() if window.held_byte is None else ""
            if piece and not piece.endswith(_REPLACEMENT):
                later = taken.pending[end:]
                return replace(
                    window, text=self.text + piece, settled=window.pending, pending=later
                )
        return taken

    def rest(self) -> str:
        if not self.pending:
            return ""
        start = len(self.vocabulary.decode(self.settled)) if self.settled else 0
        return self.vocabulary.decode(self.settled + self.pending)[start:]

    def complete_rest(self) -> str:
        rest = "" if self.held_byte is None else self.rest()
        return "" if rest.endswith(_REPLACEMENT) else rest

    @property
    def held_byte(self) -> int | None:
        return self.vocabulary.byte(self.pending[-1]) if self.pending else None
