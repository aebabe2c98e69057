"""The alphabet of byte-level BPE: a character for each byte, in which vocabularies are written."""

from typing import Final


def _byte_of_character() -> dict[str, int]:
    """A printable Latin-1 character represents its byte.

    The other bytes are, in order, the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(0x100) if byte not in printable)
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_OF_CHARACTER: Final = _byte_of_character()
CHARACTER_OF_BYTE: Final = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
