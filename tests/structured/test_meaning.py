"""What grammars mean: classes of ASCII, any JSON, numbers, and keys that are used up."""

import json
from typing import TYPE_CHECKING, Any

import pytest

from pagedserve.sampling.grammar import compute_masks
from pagedserve.sampling.grammar_compiler import GrammarCompiler
from pagedserve.sampling_params.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@pytest.fixture(scope="module")
def compiler(real_tokenizer: "PreTrainedTokenizerBase") -> GrammarCompiler:
    return GrammarCompiler(real_tokenizer, len(real_tokenizer), [real_tokenizer.eos_token_id])


def keeps_to(compiler: GrammarCompiler, text: str, must_be: dict[str, Any]) -> bool:
    """Whether a text can be written, and ended."""
    states = compiler.compile(StructuredOutputsParams(**must_be)).states(1)
    tokens = compiler.tokenizer(text, add_special_tokens=False).input_ids
    ended = [*tokens, *compiler.eos_token_ids]
    return all(states.at(ended[:end]).admits(token) for end, token in enumerate(ended))


WIDE = "\uff16"  # a digit of another script
TUPLE: dict[str, Any] = {"type": "array", "prefixItems": [{"type": "integer"}], "minItems": 1}
DRAFT_4 = "http://json-schema.org/draft-04/schema#"
ELSEWHERE = {
    "$ref": "#/components/schemas/A",
    "components": {"schemas": {"A": {"type": "string", "format": "date"}}},
}
ANY_LIST = '{"type": "array"}'


@pytest.mark.parametrize(
    ("must_be", "texts", "others"),
    [
        ({"regex": r"\d{3}"}, ["604"], [f"6{WIDE}4", "60"]),
        ({"regex": r"\w+@\w+\.com"}, ["a_1@b.com"], ["é@b.com", f"{WIDE}@b.com"]),
        ({"regex": r"[\w-]+\s[^\W_]"}, ["a-b c"], ["ä b", "a\u00a0b", "a _"]),
        ({"regex": r"\D\W\S"}, [f"{WIDE}é{WIDE}", "a-b"], ["1-b"]),
        ({"regex": r"\\d/é"}, [r"\d/é"], ["1/é"]),
        ({"regex": r"(?u)\d\w"}, ["6a", f"{WIDE}é"], ["aa"]),
        ({"grammar": r'start: N "/" /\w\//' + "\nN: /[\\d]+/"}, ["12/a/"], [f"{WIDE}/a/", "1/é/"]),
        ({"grammar": r"start: /\d/u"}, ["6", WIDE], ["a"]),
        ({"grammar": r'start: "\\d" // /\d/'}, [r"\d"], ["1"]),
        (
            {"json": {"type": "string", "pattern": r"^\d\s\w$"}},
            ['"1 a"'],
            [f'"{WIDE} a"', '"1\u2003a"', '"1 é"'],
        ),
        (
            {"json": {"type": "object", "patternProperties": {r"^\s$": {}}} | {"minProperties": 1}},
            ['{" ":1}'],
            [],
        ),
        ({"json": {}}, ["1", '"a"', "[]", '{"a": null}'], ["a"]),
        ({"json": True}, ["1", "[]"], [""]),
        ({"json": {"const": 2**53 - 1}}, ["9007199254740991"], ["9007199254740992"]),
        ({"json": {"enum": [-(2**53) + 1]}}, ["-9007199254740991"], ["-9007199254740992"]),
        ({"json": {"const": 0.1}}, ["0.1"], ["0.10000001"]),
        # The drafts of these have no such keywords, or are unknown.
        (
            {"json": TUPLE | {"$schema": "http://json-schema.org/draft-07/schema#"}},
            ["[1]"],
            ['["a"]'],
        ),
        ({"json": TUPLE | {"$schema": "https://example.com/draft"}}, ["[1]"], ['["a"]']),
        ({"json": {"allOf": [{"$schema": DRAFT_4, "const": 5}]}}, ["5"], ["6"]),
        # The schema of a reference may be anywhere.
        ({"json": ELSEWHERE}, ['"2023-02-28"'], ['"2023-02-29"', '"0000-01-01"']),
        ({"grammar": f"start: %json {json.dumps(ELSEWHERE)}"}, ['"2023-02-28"'], ['"2023-02-29"']),
        # Keywords that restrict nothing.
        ({"json": {"type": "array", "uniqueItems": False}}, ["[1, 1]"], ["1"]),
        ({"json": {"type": "object", "propertyNames": {"type": "string"}}}, ['{"a": 1}'], ["1"]),
        ({"grammar": "\n" + " " * 60 + 'start: "a"\n'}, ["a"], ["b"]),
        (
            {"grammar": f"start: %json {ANY_LIST}", "disable_any_whitespace": True},
            ["[1,2]"],
            ["[1, 2]"],
        ),
    ],
)
def test_texts_keep_to_what_is_meant(
    compiler: GrammarCompiler, must_be: dict[str, Any], texts: list[str], others: list[str]
) -> None:
    assert [text for text in texts if not keeps_to(compiler, text, must_be)] == []
    assert [text for text in others if keeps_to(compiler, text, must_be)] == []


USED_UP: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "c"],
    "patternProperties": {"^[ac]$": {"minimum": 5}},
    "additionalProperties": False,
}


@pytest.mark.parametrize("kind", ["json", "grammar"])
def test_an_object_whose_pattern_is_used_up_ends(compiler: GrammarCompiler, kind: str) -> None:
    schema = USED_UP if kind == "json" else f"start: %json {json.dumps(USED_UP)}"
    compiled: dict[str, Any] = {kind: schema, "disable_any_whitespace": True}
    for text in ('{"a":6,"c":7}', '{"a":6,"b":1,"c":7.5}'):
        assert keeps_to(compiler, text, compiled), text
    for text in ('{"a":4,"c":7}', '{"a":6,"c":4}', '{"a":6,"c":7,"a":8}', '{"a":6}'):
        assert not keeps_to(compiler, text, compiled), text
    states = compiler.compile(StructuredOutputsParams(**compiled)).states(1)
    for text in ('{"a":6,', '{"a":6,"b":1,'):  # something follows a comma, and no end before it
        state = states.at(compiler.tokenizer(text, add_special_tokens=False).input_ids)
        assert compute_masks([state]).any()
        assert state.fault is None
    last = states.at(compiler.tokenizer('{"a":6,"c":7', add_special_tokens=False).input_ids)
    comma, brace = (compiler.tokenizer(end).input_ids[0] for end in ",}")
    assert last.admits(brace)
    assert not last.admits(comma)


def test_a_pattern_that_names_more_stays(compiler: GrammarCompiler) -> None:
    schema = USED_UP | {"patternProperties": {"^[acd]$": {"type": "integer", "minimum": 5}}}
    compiled: dict[str, Any] = {"json": schema, "disable_any_whitespace": True}
    assert keeps_to(compiler, '{"a":6,"c":7,"d":8}', compiled)
    assert not keeps_to(compiler, '{"a":6,"c":7,"d":4}', compiled)
    assert not keeps_to(compiler, '{"a":6,"c":7,"e":8}', compiled)


def test_choices_mean_themselves_and_are_escaped_once(compiler: GrammarCompiler) -> None:
    texts = ["".join(map(chr, range(32, 127))), r"\\d|"]
    params = StructuredOutputsParams(choice=texts)
    assert params.definition is params.definition  # an event loop asks again and again
    for text in texts:
        assert keeps_to(compiler, text, {"choice": texts})
    for other in (texts[0][:-1], r"\\1", r"\1|", "|"):
        assert not keeps_to(compiler, other, {"choice": texts})
