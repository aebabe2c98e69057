"""EBNF grammars: what they accept is what llama.cpp's syntax says, character by character."""

import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from pagedserve.sampling.ebnf import is_ebnf
from pagedserve.sampling.grammar_compiler import GrammarCompiler
from pagedserve.sampling.lark import MAX_RULE_CHAIN, prepare_lark
from pagedserve.sampling.schemas import GrammarError
from pagedserve.sampling_params.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Bytes:
    """A tokenizer whose tokens are bytes."""

    eos_token_id = 256
    bos_token_id = None

    def __init__(self) -> None:
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"<eos>"]
        self.special_token_ids = [256]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


BYTES = LLTokenizer(TokenizerWrapper(Bytes()))


def accepts(grammar: str, text: str) -> bool:
    """Whether a text is whole in a grammar."""
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(prepare_lark(grammar)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    if matcher.validate_tokens(tokens) < len(tokens):
        return False
    matcher.consume_tokens(tokens)
    return matcher.is_accepting()


JSON_PAIRS = r"""
# objects of strings
root ::= "{" ws (pair ("," ws pair)*)? "}"
pair ::= string ":" ws string
string ::= "\"" [^"\\\x00-\x1F]* "\"" # no escapes
ws ::= [ \t\n]*
"""
SUMS = """root ::= expr
expr ::= term (("+" | "-") term)*
term ::= num | "(" expr ")"
num ::= [0-9]+
"""


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        (SUMS, ["1", "12+3", "(1-2)+3", "((7))"], ["(1", "1+", "()", ""]),
        (JSON_PAIRS, ["{}", '{ "a": "b"}', '{"a":"b",\t"c":"é"}'], ['{"a"}', '{"a":"b",}']),
        # A longest lexeme would take what the rest needs.
        ('root ::= "a"* "ab" | name "x"\nname ::= [a-z]+', ["ab", "aaab", "xx", "abx"], ["x", "a"]),
        (r'root ::= "\n" "\x41" "\u00e9" "\U0001F600" .', ["\nAé😀\n", "\nAé😀é"], ["\nAé😀"]),
        (r"root ::= [-a]{2} [^\]^-] [\-z]", ["-ab-", "a-\nz"], ["-a]z", "-a^z", "aabq"]),
        (
            'root ::= "ab"{2,3} "c"{1,} "d"{,1} "e"{2}',
            ["ababcee", "abababccdee"],
            ["abcee", "ababee"],
        ),
        ('root ::= a-B{2} a_b\na-B ::= "q"\na_b ::= "r" | ""', ["qqr", "qq"], ["qr", "qqq"]),
        ('root ::=\n  "a"\n  | # or\n  ("b"\n "c")', ["a", "bc"], ["ab", "b"]),
        ('start ::= "a"\nroot ::= start root | ""', ["", "aaa"], ["b"]),
    ],
)
def test_grammars_accept_their_strings(grammar: str, texts: list[str], others: list[str]) -> None:
    assert is_ebnf(grammar)
    assert [text for text in texts if not accepts(grammar, text)] == []
    assert [text for text in others if accepts(grammar, text)] == []


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> tuple[str, str]:
    """An expression over a, b and c in EBNF, and the same as a regular expression."""
    kind = draw(st.sampled_from(["text", "set"] + ["sequence", "choice", "repeat"] * (depth > 0)))
    if kind == "text":
        text = draw(st.text("abc", max_size=3))
        return f'"{text}"', f"(?:{text})"
    if kind == "set":
        inner = draw(st.sampled_from(["a-b", "abc", "^a", "c", "^b-c"]))
        return f"[{inner}]", f"[{inner}]"
    ebnf, regex = draw(expressions(depth - 1))
    if kind == "repeat":
        mark = draw(st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,}"]))
        return f"({ebnf}){mark}", f"(?:{regex}){mark}"
    other_ebnf, other_regex = draw(expressions(depth - 1))
    between = "|" if kind == "choice" else " "
    return f"({ebnf} {between} {other_ebnf})", f"(?:{regex}{between.strip()}{other_regex})"


@given(expressions(), st.lists(st.text("abc", max_size=6), min_size=1, max_size=8))
def test_regular_grammars_accept_what_their_regular_expression_does(
    pair: tuple[str, str], texts: list[str]
) -> None:
    ebnf, regex = pair
    for text in texts:
        assert accepts(f"root ::= {ebnf}", text) == (re.fullmatch(regex, text) is not None), text


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ('rot ::= "a"', "rule 'root' is not defined"),
        ("root ::= a", "rule 'a' is not defined"),
        ('root ::= "a"\nroot ::= "b"', "rule 'root' is defined twice"),
        ('root ::= "a', r"line 1: unexpected '\"a' in EBNF"),
        ('root ::= "a"\n  @b', "line 2: unexpected '@b'"),
        ("root ::= []", "an empty set of characters"),
        ("root ::= [b-a]", "a range whose end comes before its begin"),
        (r'root ::= "\q"', r"unknown escape '\\\\q'"),
        (r'root ::= "\uD800"', "is no character"),
        ('root ::= "a"{}', "a repetition without a number"),
    ],
)
def test_what_is_no_grammar_is_refused(grammar: str, said: str) -> None:
    with pytest.raises(GrammarError, match=said):
        prepare_lark(grammar)


def test_the_bounds_of_lark_hold() -> None:
    chain = "\n".join(f"r{i} ::= r{i + 1}" for i in range(MAX_RULE_CHAIN))
    with pytest.raises(GrammarError, match="a chain of rules"):
        prepare_lark(f'root ::= r0\n{chain}\nr{MAX_RULE_CHAIN} ::= "x"')


@pytest.mark.parametrize("grammar", ['start: "root ::= x"', '// root ::= "a"\nstart: "b"'])
def test_lark_stays_lark(grammar: str) -> None:
    assert not is_ebnf(grammar)
    assert prepare_lark(grammar) == grammar


def test_a_request_may_have_one(real_tokenizer: "PreTrainedTokenizerBase") -> None:
    compiler = GrammarCompiler(real_tokenizer, len(real_tokenizer), [real_tokenizer.eos_token_id])
    states = compiler.compile(StructuredOutputsParams(grammar=SUMS)).states(1)
    tokens = real_tokenizer("(12+3)", add_special_tokens=False).input_ids
    assert all(states.at(tokens[:end]).admits(token) for end, token in enumerate(tokens))
