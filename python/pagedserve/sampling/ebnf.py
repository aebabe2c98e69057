"""EBNF grammars as llama.cpp (GBNF) and XGrammar accept them, converted to Lark's syntax.

llguidance reads only Lark grammars, and its lexer takes the longest lexeme, while EBNF has no
lexer. So each character becomes a lexeme: all lexemes then have one character, and the converted
grammar accepts exactly the strings of the original.

Costs: one pass over the grammar without recursion; the result has a few times its characters.
"""

import re
from collections.abc import Iterator
from typing import Final, NoReturn

from pagedserve.sampling.schemas import GrammarError

_NAME: Final = r"[A-Za-z_][\w.-]*"
_BEGIN: Final = re.compile(rf"(?:\s++|\#[^\n]*(?:\n|\Z))*+{_NAME}\s*::=", re.ASCII)
_LEXEME: Final = re.compile(
    rf"""(?P<space>\s+|\#[^\n]*)
      | (?P<define>{_NAME}\s*::=)
      | (?P<name>{_NAME})
      | (?P<string>"(?:\\.|[^"\\\n])*")
      | (?P<set>\[(?:\\.|[^]\\\n])*\])
      | (?P<any>\.)
      | (?P<repeat>\{{\s*\d*\s*(?:,\s*\d*\s*)?\}})
      | (?P<mark>[()|*+?])""",
    re.VERBOSE | re.ASCII,
)
_CHARACTER: Final = re.compile(
    r"\\x(?P<x>[0-9A-Fa-f]{2})|\\u(?P<u>[0-9A-Fa-f]{4})|\\U(?P<U>[0-9A-Fa-f]{8})"
    r"|\\(?P<escape>.)|(?P<plain>[^\\])",
    re.DOTALL,
)
_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t", **{mark: mark for mark in "\\\"'[]-^/"}}
_SURROGATES: Final = range(0xD800, 0xE000)
_MAX_CODE: Final = 0x10FFFF
_ANY: Final = "/(?s:.)/"
_DASH: Final = (ord("-"), True)


def is_ebnf(grammar: str) -> bool:
    """Whether a grammar starts with a rule of the form ``root ::= ...``."""
    return _BEGIN.match(grammar) is not None


def lark_of_ebnf(grammar: str) -> str:
    """Convert a grammar to Lark's syntax; ``root`` becomes ``start``.

    Raises:
        GrammarError: A syntax error, or a rule that is missing or defined twice.
    """
    names = _Names()
    converted = "".join(_converted(grammar, names))
    names.check()
    return converted


class _Names:
    """Rules of a grammar, with their names in Lark, where capitals would mean terminals."""

    def __init__(self) -> None:
        self._in_lark = {"root": "start"}
        self._defined = set[str]()

    def define(self, name: str) -> str:
        """Start a rule.

        Raises:
            GrammarError: It is already defined.
        """
        if name in self._defined:
            raise GrammarError(f"rule {name!r} is defined twice")
        self._defined.add(name)
        return self.use(name)

    def use(self, name: str) -> str:
        """Return the name in Lark; its number distinguishes names that differ in case or marks."""
        if name not in self._in_lark:
            plain = re.sub(r"\W", "_", name, flags=re.ASCII).lower().lstrip("_")
            self._in_lark[name] = f"r_{plain}_{len(self._in_lark)}"
        return self._in_lark[name]

    def check(self) -> None:
        """Check that all rules are defined.

        Raises:
            GrammarError: A rule is not defined.
        """
        for name in self._in_lark:
            if name not in self._defined:
                raise GrammarError(f"rule {name!r} is not defined")


def _converted(grammar: str, names: _Names) -> Iterator[str]:
    end = 0
    while end < len(grammar):
        lexeme = _LEXEME.match(grammar, end)
        if lexeme is None:
            _refuse(grammar, end)
        try:
            yield _convert(lexeme, names)
        except ValueError as error:
            raise GrammarError(f"{error}, in {lexeme[0][:40]!r}") from None
        end = lexeme.end()


def _convert(lexeme: re.Match[str], names: _Names) -> str:
    text = lexeme[0]
    match lexeme.lastgroup:
        case "space":
            return " "
        case "define":
            return f"\n{names.define(text[:-3].strip())}: "
        case "name":
            return names.use(text)
        case "repeat":
            return _repeat(text)
        case "mark":
            return text
        case kind:
            return _characters(text, kind)


def _characters(text: str, kind: str | None) -> str:
    """Convert a string, a set or any character."""
    if kind == "any":
        return _ANY
    if kind == "set":
        return _set(text[1:-1])
    codes = [code for code, _ in _codes(text[1:-1])]
    return f"({' '.join(map(_one, codes))})" if codes else '""'


def _one(code: int) -> str:
    character = chr(code)
    is_plain = character.isascii() and character.isprintable() and character not in '"\\'
    return f'"{character}"' if is_plain else f"/\\u{{{code:x}}}/"


def _set(inner: str) -> str:
    """Convert a set of characters to a regular expression with numeric escapes."""
    is_negated = inner.startswith("^")
    codes = list(_codes(inner.removeprefix("^")))
    if not codes:
        if is_negated:
            return _ANY
        raise ValueError("an empty set of characters")
    parts = []
    place = 0
    while place < len(codes):
        low = high = codes[place][0]
        if codes[place + 1 : place + 2] == [_DASH] and place + 2 < len(codes):
            high = codes[place + 2][0]
            place += 2
        if high < low:
            raise ValueError("a range whose end comes before its begin")
        parts.append(f"\\u{{{low:x}}}-\\u{{{high:x}}}")
        place += 1
    return f"/[{'^' if is_negated else ''}{''.join(parts)}]/"


def _codes(text: str) -> Iterator[tuple[int, bool]]:
    """Code points of a text, and whether each is a plain character, as a range's dash must be.

    Raises:
        ValueError: An unknown escape, or an invalid character.
    """
    for found in _CHARACTER.finditer(text):
        digits = found["x"] or found["u"] or found["U"]
        if digits is not None:
            code = int(digits, 16)
        elif found["plain"] is not None:
            code = ord(found["plain"])
        elif found["escape"] in _ESCAPES:
            code = ord(_ESCAPES[found["escape"]])
        else:
            raise ValueError(f"unknown escape {found[0]!r}")
        if code in _SURROGATES or code > _MAX_CODE:
            raise ValueError(f"{found[0]!r} is no character")
        yield code, found["plain"] is not None


def _repeat(text: str) -> str:
    low, comma, high = (part.strip() for part in text[1:-1].partition(","))
    if not low and not high:
        raise ValueError("a repetition without a number")
    low = low or "0"
    return f"{{{low},{high}}}" if comma else f"{{{low},{low}}}"


def _refuse(grammar: str, place: int) -> NoReturn:
    line = grammar.count("\n", 0, place) + 1
    raise GrammarError(f"line {line}: unexpected {grammar[place : place + 20]!r} in EBNF")
