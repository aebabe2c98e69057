"""Preprocessing of Lark and EBNF grammars for llguidance: bounds, JSON schemas, ASCII classes.

llguidance compiles a rule during that of the rule that names it, recursively: a chain of rules
needs stack in proportion to its length.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from pagedserve.sampling.ebnf import is_ebnf, lark_of_ebnf
from pagedserve.sampling.regexes import ascii_classes
from pagedserve.sampling.schemas import GrammarError, prepare_schema

# Maximum length of a chain of rules and terminals that name one another.
MAX_RULE_CHAIN: Final = 200
# Relevant lexemes, as in llguidance's lexer.
_LEXEME: Final = re.compile(
    r"""(?P<comment>(?:\#|//)[^\n]*)
      | (?P<string>"(?:\\.|[^"\\\x00-\x1f\x7f])*"i?)
      | (?P<regexp>/(?:\\.|[^/\\])+/[imslux]*)
      | (?P<json>%json\b)
      | (?P<object>%(?:regex|llguidance)\b)
      | (?P<define>[!?_]*[A-Za-z][\w-]*(?:::\w+|\.-?\d+|\[[^]\n]*]|{[^}\n]*})*\s*:(?!:))
      | (?P<name>_*[A-Za-z][\w-]*)""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_NAME: Final = re.compile(r"[\w-]+", re.ASCII)
_DECODER: Final = json.JSONDecoder()


@dataclass(slots=True)
class _Rules:
    """Names that each rule and terminal refers to, in order."""

    named_by: dict[str, list[str]] = field(default_factory=dict)
    current: list[str] = field(default_factory=list)

    def define(self, lexeme: str) -> None:
        """Start the rule that a lexeme defines."""
        name = _NAME.match(lexeme.lstrip("!?"))
        self.current = self.named_by.setdefault(name[0] if name else "", [])

    def check_chains(self) -> None:
        """Visit the rules in llguidance's order, each where it is first named.

        Raises:
            GrammarError: A chain is too long.
        """
        seen = set[str]()
        for root in ("start", *self.named_by):
            chain = [iter([root])]
            while chain:
                name = next(chain[-1], None)
                if name is None:
                    chain.pop()
                elif name in self.named_by and name not in seen:
                    seen.add(name)
                    chain.append(iter(self.named_by[name]))
                    if len(chain) > MAX_RULE_CHAIN + 1:
                        raise GrammarError(
                            f"a chain of rules, each named by the one before, ends beyond "
                            f"{name!r}; at most {MAX_RULE_CHAIN} rules are accepted"
                        )


def prepare_lark(grammar: str, convert: Callable[[Any], Any] = prepare_schema) -> str:
    """Convert a grammar in Lark's syntax or EBNF to llguidance's input.

    Args:
        grammar: The grammar.
        convert: Converts a JSON schema of the grammar, which it may modify.

    Raises:
        GrammarError: The grammar exceeds a bound, or an EBNF syntax error.
    """
    if is_ebnf(grammar):
        grammar = lark_of_ebnf(grammar)
    rules = _Rules()
    prepared = "".join(_prepared(grammar, rules, convert))
    rules.check_chains()
    return prepared


def _prepared(grammar: str, rules: _Rules, convert: Callable[[Any], Any]) -> Iterator[str]:
    end = 0
    while (lexeme := _LEXEME.search(grammar, end)) is not None:
        yield grammar[end : lexeme.start()]
        end, text = lexeme.end(), lexeme[0]
        if lexeme.lastgroup == "name":
            rules.current.append(text)
        elif lexeme.lastgroup == "define":
            rules.define(text)
        elif lexeme.lastgroup == "regexp":
            text = _with_ascii_classes(text)
        elif lexeme.lastgroup in ("json", "object"):
            try:
                value, end = _DECODER.raw_decode(grammar, _skip_space(grammar, end))
            except (ValueError, RecursionError) as error:
                raise GrammarError(f"{text} is followed by no JSON: {error}") from error
            if lexeme.lastgroup == "json":
                value = convert(value)
            text = f"{text} {json.dumps(value)}"
        yield text
    yield grammar[end:]


def _with_ascii_classes(regexp: str) -> str:
    pattern, _, flags = regexp[1:].rpartition("/")
    return regexp if "u" in flags else f"/{ascii_classes(pattern)}/{flags}"


def _skip_space(text: str, start: int) -> int:
    return next((i for i in range(start, len(text)) if not text[i].isspace()), len(text))
