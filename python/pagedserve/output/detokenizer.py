"""Text from token ids, at once or as the tokens come.

Invariant: the pieces of a ``TextStream``, joined, equal ``Detokenizer.decode`` of all its tokens,
and no piece ends within a character.

Two streams, chosen by the tokenizer's decoder:

- Byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM, ...): a token is a string of bytes, so text comes
  from UTF-8 decoding the bytes, at most three of them held back.  Constant cost a token.
- Any other: decode the tokens not yet settled behind those settled last, and take what is new.
  Byte-fallback tokens (``<0xE2>``) settle only when their run ends, for one invalid byte turns the
  *whole* run into replacement characters.

``tokenizers.decoders.DecodeStream`` does neither: on byte-fallback vocabularies it raises "Invalid
prefix" or gives text that the whole decode does not have, and tokens that never complete a
character cost it quadratic time.
"""

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

_REPLACEMENT: Final = "\ufffd"
_BYTE_TOKEN: Final = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TextTokenizer(Protocol):
    """What is asked of a transformers tokenizer."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """Tokens added to the vocabulary; the special ones have no text."""

    def decode(self, token_ids: list[int], **options: Any) -> Any:
        """The text of all ids."""

    def convert_ids_to_tokens(self, ids: list[int]) -> Any:
        """The vocabulary's string of each id."""


class TextStream(ABC):
    """The text of one sequence as its tokens come.

    The state of a stream changes in one assignment, so an interrupt leaves it as it was before a
    call or as it is after.
    """

    @property
    @abstractmethod
    def text(self) -> str:
        """What has been given out."""

    @abstractmethod
    def advance(self, token_ids: Sequence[int]) -> str:
        """Take what is new.

        Args:
            token_ids: All tokens of the sequence so far; those taken before are passed over.

        Returns:
            The text that is now certain and was not before, often one word.
        """

    @abstractmethod
    def rest(self) -> str:
        """What is held back, incomplete characters as U+FFFD: the end of a finished text."""


class Detokenizer:
    """Text from token ids, special tokens left out; one for each tokenizer."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self._silent = frozenset(token_id for token_id, token in added if token.special)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._token_bytes: _TokenBytes | None = None
        if isinstance(backend, Tokenizer) and isinstance(backend.decoder, ByteLevel):
            self._token_bytes = _TokenBytes(backend, self._silent)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a whole sequence.

        ``clean_up_tokenization_spaces`` is off whatever the tokenizer's configuration says: it
        would take back spaces already given out.
        """
        text = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)  # noqa: S101  # a list of ids gives one string
        return text

    def stream(self) -> TextStream:
        """A stream for one new sequence."""
        if self._token_bytes is not None:
            return _ByteStream(self._token_bytes)
        return _WindowStream(self, self._tokenizer, self._silent)


class _TokenBytes:
    """The bytes of each token of a byte-level vocabulary, looked up once a token."""

    def __init__(self, backend: Tokenizer, silent: frozenset[int]) -> None:
        self._backend = backend
        self._known: dict[int, bytes] = dict.fromkeys(silent, b"")

    def of(self, token_ids: Sequence[int]) -> bytes:
        known = self._known
        return b"".join([known[one] if one in known else self._learn(one) for one in token_ids])

    def _learn(self, token_id: int) -> bytes:
        # An id without a token (models pad their vocabulary) has no text.
        token = self._backend.id_to_token(token_id) or ""
        try:
            found = bytes([_BYTE_OF_CHARACTER[character] for character in token])
        except KeyError:  # an added token, written as it is
            found = token.encode()
        self._known[token_id] = found
        return found


class _ByteState(NamedTuple):
    """``held`` is the start of one character, at most three bytes."""

    num_tokens: int = 0
    text: str = ""
    held: bytes = b""


class _ByteStream(TextStream):
    __slots__ = ("_state", "_token_bytes")

    def __init__(self, token_bytes: _TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._state = _ByteState()

    @property
    def text(self) -> str:
        return self._state.text

    def advance(self, token_ids: Sequence[int]) -> str:
        num_tokens, text, held = self._state
        data = held + self._token_bytes.of(token_ids[num_tokens:])
        piece, num_bytes = codecs.utf_8_decode(data, "replace", False)  # not final
        self._state = _ByteState(len(token_ids), text + piece, data[num_bytes:])
        return piece

    def rest(self) -> str:
        return self._state.held.decode("utf-8", "replace")


class _WindowState(NamedTuple):
    """``settled`` ends in a token that later ones cannot change, and made a visible piece.

    Visible, because decoders strip the space that opens a text.
    """

    num_tokens: int = 0
    text: str = ""
    settled: tuple[int, ...] = ()
    open: tuple[int, ...] = ()


class _WindowStream(TextStream):
    """Decodes ``settled + open`` and takes what lies behind the text of ``settled``."""

    __slots__ = ("_detokenizer", "_silent", "_state", "_tokenizer")

    def __init__(
        self, detokenizer: Detokenizer, tokenizer: TextTokenizer, silent: frozenset[int]
    ) -> None:
        self._detokenizer = detokenizer
        self._tokenizer = tokenizer
        self._silent = silent
        self._state = _WindowState()

    @property
    def text(self) -> str:
        return self._state.text

    def advance(self, token_ids: Sequence[int]) -> str:
        num_tokens, text, settled, open_ = self._state
        tokens = (*open_, *token_ids[num_tokens:])
        piece = "" if self._in_byte_run(tokens) else self._behind(settled, tokens)
        if not piece or piece.endswith(_REPLACEMENT):
            self._state = _WindowState(len(token_ids), text, settled, tokens)
            return ""
        self._state = _WindowState(len(token_ids), text + piece, tokens)
        return piece

    def rest(self) -> str:
        return self._behind(self._state.settled, self._state.open)

    def _behind(self, settled: tuple[int, ...], tokens: tuple[int, ...]) -> str:
        if not tokens:
            return ""
        start = len(self._detokenizer.decode(settled)) if settled else 0
        return self._detokenizer.decode(settled + tokens)[start:]

    def _in_byte_run(self, tokens: tuple[int, ...]) -> bool:
        """Whether the last token that has text is a byte; those without do not end a run."""
        for token in reversed(tokens):
            name = self._tokenizer.convert_ids_to_tokens([token])[0]
            if name is not None and token not in self._silent:
                return _BYTE_TOKEN.fullmatch(name) is not None
        return False


def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level BPE: a printable Latin-1 character stands for itself.

    The other bytes are, in order, the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(0x100) if byte not in printable)
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER: Final = _byte_of_character()
