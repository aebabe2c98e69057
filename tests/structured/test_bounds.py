"""Grammars that a client may send to end, fill or stop the process: each is refused by name."""

import json
import time
from collections.abc import Iterable, Iterator
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from pagedserve.errors import RequestError
from pagedserve.sampling import sources
from pagedserve.sampling.compile_process import _Running
from pagedserve.sampling.compile_worker import Compilation
from pagedserve.sampling.grammar_compiler import GrammarCompiler
from pagedserve.sampling.lark import MAX_RULE_CHAIN
from pagedserve.sampling.schemas import (
    MAX_COUNT,
    MAX_DEPTH,
    MAX_EXACT,
    MAX_REF_DEPTH,
    GrammarError,
    TrialsSpentError,
)
from pagedserve.sampling.sources import GrammarKey, Trials, compiled_source
from pagedserve.sampling_params.structured_outputs import (
    MAX_CHARS,
    MAX_CHOICES,
    StructuredOutputsParams,
)
from tests.hostile.grammar_kinds import random_keywords
from tests.support.examples import examples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@pytest.fixture(scope="module")
def compiler(real_tokenizer: "PreTrainedTokenizerBase") -> Iterator[GrammarCompiler]:
    """Its process survives every test but those that kill it."""
    made = GrammarCompiler(real_tokenizer, len(real_tokenizer), [real_tokenizer.eos_token_id])
    yield made
    made.compile(StructuredOutputsParams(regex="the last"))


def behind_escapes(number: int) -> dict[str, Any]:
    """As `referring`, where each reference has an escape."""
    schema = json.dumps(referring(number)).replace("#/$defs", "#/%24defs")
    return dict(json.loads(schema))


def rules(number: int) -> str:
    """A rule ``start``, and others that make a chain of ``number`` with it."""
    chain = "".join(f"r{i}: r{i + 1}\n" for i in range(1, number - 1))
    return f'start: r1\n{chain}r{number - 1}: "x"\n'


def nested(depth: int) -> dict[str, Any]:
    return {"type": "array", "items": nested(depth - 1)} if depth > 1 else {"type": "null"}


def referring(number: int) -> dict[str, Any]:
    """A schema that refers to another, ..., to the last of ``number``."""
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1, number - 1)}
    return {"$ref": "#/$defs/d1", "$defs": {**chain, f"d{number - 1}": {"type": "null"}}}


def multiplied(levels: int) -> dict[str, Any]:
    """A schema of 100,000 characters whose patterns put it into each of 26 properties per level."""
    names = "abcdefghijklmnopqrstuvwxyz"
    schema: dict[str, Any] = {"const": "x" * 100_000}
    for _ in range(levels):
        schema = {
            "properties": dict.fromkeys(names, True),
            "patternProperties": {"^[a-z]$": schema},
        }
    return schema


def both(terminals: Iterable[str]) -> str:
    """A grammar of the texts that match all terminals."""
    return "start: ALL\nALL: " + " & ".join(terminals)


def many(before: str, number: int, after: str = "") -> dict[str, Any]:
    """Schemas by name that allow anything."""
    return {f"{before}{index}{after}": {} for index in range(number)}


def inexact(**schema: Any) -> tuple[dict[str, Any], str]:
    return {"json": schema}, "cannot be kept exactly; numbers must be from -9007199254740991 to"


REFUSED: list[tuple[dict[str, Any], str]] = [
    # Each of these ended the process.
    inexact(type="integer", minimum=-1e19, maximum=-1e19),
    ({"grammar": rules(3000)}, rf"chain of rules.*at most {MAX_RULE_CHAIN} rules"),
    ({"grammar": f"root ::= start\n{rules(3000).replace(':', ' ::=')}"}, "chain of rules"),
    ({"grammar": f'root ::= {"(" * 30000}"a"{")" * 30000}'}, "too deeply nested"),
    ({"grammar": rules(3000).replace("r", "R").replace("staRt", "start")}, "chain of rules"),
    ({"grammar": rules(3000).replace(":", "[lazy]:").replace("rt[lazy]", "rt")}, "chain of rules"),
    ({"grammar": 'start: %json {"type":"integer","maximum":-1e19}'}, "at #/maximum: .*exactly"),
    ({"json": referring(5000)}, rf"chain of more than {MAX_REF_DEPTH} levels"),
    ({"json": behind_escapes(5000)}, rf"chain of more than {MAX_REF_DEPTH} levels"),
    ({"json": {"type": "string", "minLength": "é" * 200}}, "cannot be compiled|Expected positive"),
    # These wrote other numbers than those that they name.
    inexact(const=MAX_EXACT + 2),
    inexact(enum=[1, {"a": [2**60]}]),
    inexact(type="number", minimum=1e300),
    inexact(type="integer", exclusiveMaximum=-(2**63)),
    inexact(type="number", multipleOf=1e-300),
    inexact(properties={"default": {"const": 2**60}}),
    inexact(**{"$ref": "#/default", "default": {"const": 2**60}}),
    inexact(const=int("9" * 300)),
    ({"json": '{"const": 1e400}'}, "json is no JSON: Out of range"),
    ({"json": {"const": float("nan")}}, "json is no JSON: Out of range"),
    # These took seconds or gigabytes, or ended in an error of the server.
    ({"regex": "((a?){50}){50}a{2000}"}, "regex cannot be used: lexer error: too many"),
    (
        {"regex": "(a{1000}){1000}"},
        "cannot be used: (lexer error: too many|it takes more than 2 s)",
    ),
    (  # in the words of the library, with its backtrace
        {"grammar": "root ::= " + " | ".join(f'"w{i}"' for i in range(20_000))},
        "cannot be used: it (has more than 65,525 symbols|takes more than 2 s)",
    ),
    ({"grammar": both(f"/.*a{i}.*/" for i in range(30))}, "takes more than 2 s of processor time"),
    ({"json": multiplied(3)}, "takes more than 1024 MiB of memory"),
    ({"json": {"properties": many("a", 10_000)}}, "nested too deeply: .* stack"),
    (
        {"json": {"properties": many("a", 64), "patternProperties": many("^a", 64, "$")}},
        "it must have fewer",
    ),
    ({"grammar": f"start: %llguidance {'[' * 988}{']' * 988}"}, "nested too deeply|recursion"),
    ({"choice": ["a"] * (MAX_CHOICES + 1)}, f"has {MAX_CHOICES + 1} texts; at most"),
    ({"choice": ["a" * MAX_CHARS, "b"]}, f"has {MAX_CHARS + 1} characters; at most"),
    ({"json": {"allOf": 5, "format": "date"}}, "allOf must be an array"),
    ({"json": {"$defs": [], "type": "x"}}, "Invalid type: x"),
    ({"json": {"definitions": 3, "type": "x"}}, "Invalid type: x"),
    ({"json": {"patternProperties": [], "properties": 3, "required": 2}}, "must be an object"),
    ({"json": {"type": "array", "prefixItems": 3, "items": [[]]}}, "must be an array"),
    ({"json": {"patternProperties": {"^a": {}}, "required": [["a"]]}}, "Expected string for"),
    # These say what is accepted.
    ({"json": nested(MAX_DEPTH + 1)}, rf"nested deeper than {MAX_DEPTH} levels"),
    ({"json": "[" * 100_000}, "nested too deeply|no JSON"),
    ({"json": {"type": "string", "maxLength": MAX_COUNT + 1}}, rf"must be at most {MAX_COUNT}"),
    ({"json": {"type": "array", "minItems": 1e300}}, "minItems is 1e.300; it must be at most"),
    ({"json": {"type": "string", "maxLength": -1}}, "Expected positive integer"),
    ({"json": {"type": "number", "multipleOf": 0}}, "multipleOf is 0; it must be greater than 0"),
    ({"json": {"type": "string", "pattern": "(?=a)b"}}, "look-ahead"),
    ({"json": {"type": "string", "pattern": r"(a)\1"}}, "backreferences are not supported"),
    ({"json": {"type": "string", "format": "foo"}}, "Unknown format: foo"),
    ({"json": {"propertyNames": {"pattern": "a"}}}, "Unimplemented keys"),
    ({"json": {"type": "object", "patternProperties": {f"^{i}$": {} for i in range(99)}}}, "99 pa"),
    ({"json": {"$ref": "#"}}, "no output can match it"),
    ({"json": {"allOf": [{"$ref": "#"}]}}, "no output can match it"),
    ({"json": {"$ref": "http://127.0.0.1:1/x"}}, "does not fetch resources"),
    ({"json": '{"const": "\\ud800"}'}, "json cannot be used"),
    ({"choice": ["\ud800"]}, "valid Unicode"),
    ({"grammar": 'start: start "a"'}, "no output can match it"),
    ({"grammar": "start: <|no such token|>"}, "grammar cannot be used"),
    ({"grammar": "start: <[1-4000000000]>"}, "Token range end too large"),
    ({"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}, "too deeply nested"),
    ({"grammar": "start: %json {"}, "%json is followed by no JSON"),
    ({"regex": "(" * 5000 + ")" * 5000}, "regex cannot be used"),
    ({"regex": ""}, r"structured_outputs\.regex is ''; it must be a non-empty"),
    ({"choice": []}, r"structured_outputs\.choice has no texts; it must have at least one"),
]
TAKEN: list[dict[str, Any]] = [
    {"grammar": rules(MAX_RULE_CHAIN)},
    {"json": nested(MAX_DEPTH)},
    {"json": referring(MAX_REF_DEPTH // 2)},
    {"json": {"enum": [MAX_EXACT, -MAX_EXACT, 0.1, 1e-22, 1.5e10]}},
    {"json": {"type": "integer", "minimum": -MAX_EXACT, "maximum": MAX_EXACT}},
    {"json": {"type": "integer", "default": 2**60, "examples": [1e300]}},
    {"json": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}},
    {"json": {"type": "number", "minimum": -1.797e308, "maximum": 1.797e308}},
    {"json": {"type": "number", "minimum": 0.1, "maximum": 0.30000000000000004}},
    {"json": {"type": "number", "exclusiveMinimum": 5e-324, "exclusiveMaximum": 2**64}},
    {"json": {"type": "string", "minLength": 10**9, "maxLength": MAX_COUNT}},
    {"json": {"type": "array", "minItems": 10**9}},
    {"choice": [f"text {index}" for index in range(MAX_CHOICES)]},
    {"regex": "|".join(f"a{index}" for index in range(30_000))},
    {"grammar": 'start: start "a" | "a"'},
    {"grammar": 'start: "a"~0..1000000000'},
    {"grammar": 'start: "a"\n%ignore ""'},
]


@pytest.mark.parametrize(("must_be", "refusal"), REFUSED, ids=range(len(REFUSED)))
def test_what_would_harm_the_process_is_refused(
    compiler: GrammarCompiler, must_be: dict[str, Any], refusal: str
) -> None:
    for _ in range(2):  # what is kept of it says the same
        with pytest.raises(RequestError, match=refusal) as refused:
            compiler.compile(StructuredOutputsParams(**must_be))
        assert refused.value.param == "structured_outputs"
        assert len(str(refused.value)) < 1100


@pytest.mark.parametrize("must_be", TAKEN, ids=range(len(TAKEN)))
def test_what_is_just_within_the_bounds_is_taken(
    compiler: GrammarCompiler, must_be: dict[str, Any]
) -> None:
    assert compiler.compile(StructuredOutputsParams(**must_be)).states(1).at([]).fault is None


def test_keywords_with_random_values_compile_or_are_refused(compiler: GrammarCompiler) -> None:
    source = Random(3)
    num_refused = 0
    for _ in range(examples(700, all_of_them=20_000)):
        try:
            compiler.compile(StructuredOutputsParams(json=random_keywords(source)))
        except RequestError:
            num_refused += 1
    assert num_refused > 0


def refused_after(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, schema: dict[str, Any], most: int
) -> tuple[GrammarError, int]:
    """The error of a schema that may have so many compilations, and how many it had."""
    num_trials = 0

    def counted(source: str) -> str:
        nonlocal num_trials
        num_trials += 1
        return Compilation(compiler._vocabulary).fault_of(source)

    compiler.compile(StructuredOutputsParams(regex="the vocabulary is known"))
    monkeypatch.setattr(sources, "MAX_TRIALS", most)
    key = GrammarKey("json", json.dumps(schema), False, False)
    with pytest.raises(GrammarError) as refused:
        compiled_source(key, Trials(counted))
    return refused.value, num_trials


def test_the_trials_of_patterns_are_bounded(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = {"properties": many("a", 9), "patternProperties": many("^a", 9, "$")}
    error, num_trials = refused_after(compiler, monkeypatch, schema, 20)
    assert "takes more than 20 compilations or 10 s of processor time; it must" in str(error)
    assert num_trials == 20


def test_the_trials_of_a_place_are_bounded(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = {"properties": {**many("a", 99), "b": {"format": "foo"}}}
    error, num_trials = refused_after(compiler, monkeypatch, schema, 20)
    assert str(error).startswith("Unknown format: foo")
    assert error.place == "#"
    assert num_trials == 20


def test_the_processor_time_of_trials_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(source: str) -> str:
        del source
        begin = time.process_time()
        while time.process_time() < begin + 0.2:
            pass
        return ""

    monkeypatch.setattr(sources, "MAX_TRIAL_SECONDS", 0.1)
    trials = Trials(slow)
    assert trials.part_fault({}) == ""
    with pytest.raises(TrialsSpentError):
        trials.part_fault({})
    assert Trials(slow).part_fault({}) == "", "of another grammar"


HOME = {"type": "string"}
WRONG = {"pattern": "(?=a)b"}


@pytest.mark.parametrize(
    ("schema", "refusal"),
    [
        (
            {"properties": {"home": HOME, "work": {"$ref": "#/properties/home"}, "z": WRONG}},
            "at #/properties/z: regex parse error",
        ),
        (
            {
                "$defs": {"a": HOME},
                "properties": {"x": {"$ref": "#/$defs/a", "$defs": {"b": HOME}}, "z": WRONG},
            },
            "at #/properties/z: regex parse error",
        ),
        ({"properties": {"child": {"$ref": "#"}, "z": WRONG}}, "at #/properties/z: regex"),
        ({"items": {"$ref": "#/$defs/a"}, "$defs": {"a": WRONG}}, r"at #/\$defs/a: regex"),
        (
            {"properties": {"a": HOME, "z": {"$ref": "#/properties/b"}}},
            "at #/properties/z: Pointer '/properties/b' does not exist",
        ),
    ],
)
def test_the_place_of_a_fault_is_where_it_is(
    compiler: GrammarCompiler, schema: dict[str, Any], refusal: str
) -> None:
    with pytest.raises(RequestError, match=refusal):
        compiler.compile(StructuredOutputsParams(json=schema))


def test_a_grammar_that_is_known_costs_nothing(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames: list[dict[str, Any]] = []
    ask = _Running.ask

    def counted(running: _Running, frame: dict[str, Any]) -> dict[str, Any] | int:
        frames.append(frame)
        return ask(running, frame)

    compiler.compile(StructuredOutputsParams(regex="the process is started"))
    monkeypatch.setattr(_Running, "ask", counted)
    for pattern in ("once", "once", "twice", "once"):
        compiler.compile(StructuredOutputsParams(regex=pattern))
    for _ in range(3):
        with pytest.raises(RequestError):
            compiler.compile(StructuredOutputsParams(regex="(("))
    assert [frame["grammar"].definition for frame in frames] == ["once", "twice", "(("]
