"""Grammars, schemas and tools: what native code and merging code are given."""

from random import Random
from typing import Any, Final

from tests.hostile.client import chat, completion
from tests.hostile.junk import number, size, text, value

Sent = tuple[str, object]

_KEYWORDS: Final = (
    "$defs", "$ref", "additionalProperties", "allOf", "anyOf", "const", "enum", "exclusiveMaximum",
    "exclusiveMinimum", "format", "items", "maxItems", "maxLength", "maxProperties", "maximum",
    "minItems", "minLength", "minProperties", "minimum", "multipleOf", "not", "oneOf", "pattern",
    "patternProperties", "prefixItems", "properties", "propertyNames", "required", "type",
)  # fmt: skip
_TYPES: Final = ("array", "boolean", "integer", "null", "number", "object", "string")
_REGEXES: Final = (
    "((a?){50}){50}a{2000}", "(a+)+b", "(a|aa)*c", "a{100000}", "[", "(?P<a", r"\p{L}{200}",
    "(?i)" + "k" * 300, r"\d{3}", r"\w+@\w+\.com", "(a{1,100}){1,100}", "()" * 500, "^$", r"\b",
    "(" * 400 + "a" + ")" * 400, "x*" * 1000, r"(?=a)b", r"\1", "[^\x00]", ".{0,5000}",
)  # fmt: skip
# A document that nests a schema in itself, around the innermost one.
_NESTS: Final = (
    ('{"type":"array","items":', "}"),
    ('{"type":"object","required":["a"],"properties":{"a":', "}}"),
    ('{"anyOf":[', "]}"),
    ('{"allOf":[{},', "]}"),
    ('{"$defs":{"a":', "}}"),
)


def _constrained(rng: Random, schema: object) -> Sent:
    """A schema in one of the spellings of it."""
    kind = rng.randrange(4)
    if kind == 0:
        return completion(guided_json=schema)
    if kind == 1:
        return completion(structured_outputs={"json": schema}, n=rng.choice((1, 2)))
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    return (chat if kind == 2 else completion)(response_format=form)


def bounds(rng: Random) -> Sent:
    """Numbers and lengths between bounds of any size, the first of them this one's own crash."""
    if rng.random() < 0.1:
        return _constrained(rng, {"type": "integer", "minimum": -1e19, "maximum": -1e19})
    low, high = number(rng), number(rng)
    names = rng.choice(
        (
            ("integer", "minimum", "maximum"),
            ("number", "exclusiveMinimum", "exclusiveMaximum"),
            ("number", "minimum", "multipleOf"),
            ("string", "minLength", "maxLength"),
            ("array", "minItems", "maxItems"),
            ("object", "minProperties", "maxProperties"),
        )
    )
    return _constrained(rng, dict(zip(names[1:], (low, high), strict=True)) | {"type": names[0]})


def constants(rng: Random) -> Sent:
    """Values that must be written exactly."""
    if rng.random() < 0.5:
        return _constrained(rng, {"const": value(rng)})
    return _constrained(rng, {"enum": [value(rng) for _ in range(size(rng, 2000))]})


def keywords(rng: Random) -> Sent:
    """Keywords with values that they cannot have."""
    return _constrained(rng, random_keywords(rng))


def random_keywords(rng: Random) -> dict[str, Any]:
    """A schema of some keywords with values of any kind."""
    names = rng.sample(_KEYWORDS, rng.randrange(1, 5))
    return {name: value(rng) for name in names}


def references(rng: Random) -> Sent:
    """References in loops, to nowhere, and to what grows with each."""
    names = [f"d{index}" for index in range(size(rng, 300))]
    defs: dict[str, Any] = {}
    for name in names:
        targets = [rng.choice((*names, "nowhere")) for _ in range(rng.randrange(1, 4))]
        defs[name] = {
            rng.choice(("anyOf", "allOf", "oneOf")): [{"$ref": f"#/$defs/{t}"} for t in targets]
        }
    ends = ("#", "#/$defs/d0", "#/properties/a", "http://127.0.0.1:1/x", "file:///etc/passwd")
    return _constrained(rng, {"$ref": rng.choice(ends), "$defs": defs})


def nested(rng: Random) -> Sent:
    """A schema within a schema, up to thousands deep; written by hand, as no library would."""
    before, after = rng.choice(_NESTS)
    depth = size(rng, 5000)
    schema = before * depth + '{"type":"null"}' + after * depth
    return "/v1/completions", f'{{"prompt":"a","max_tokens":4,"guided_json":{schema}}}'.encode()


def wide(rng: Random) -> Sent:
    """An object of many properties, or of patterns of them."""
    names = [f"{text(rng)[:20]}{index}" for index in range(size(rng, 3000))]
    name = rng.choice(("properties", "patternProperties"))
    schema = {"type": "object", name: {each: {"type": rng.choice(_TYPES)} for each in names}}
    return _constrained(rng, schema | {"additionalProperties": False, "required": names[:50]})


def rule_chains(rng: Random) -> Sent:
    """Rules of a grammar that each name the next, and the last one perhaps the first."""
    length = size(rng, 5000)
    rules = "".join(f"r{index}: r{index + 1}\n" for index in range(length))
    last = rng.choice(('"a"', "r0", f'r{length} "a" | "b"', "missing"))
    return _grammar(f"start: r0\n{rules}r{length}: {last}\n")


def odd_grammars(rng: Random) -> Sent:
    """Texts that are nearly a grammar."""
    grammar = 'start: (a | B)* "x"{2,400}\na: /[a-z]+/ B?\nB: "b"+\n%ignore " "\n'
    for _ in range(rng.randrange(6)):
        cut = rng.randrange(len(grammar))
        grammar = (
            grammar[:cut] + rng.choice(("", "(" * 500, text(rng), "{9999999}")) + grammar[cut:]
        )
    return _grammar(grammar)


def _grammar(grammar: str) -> Sent:
    if len(grammar) % 2:
        return completion(guided_grammar=grammar)
    return completion(structured_outputs={"grammar": grammar})


def regexes(rng: Random) -> Sent:
    """Regular expressions that explode, or are none."""
    regex = rng.choice(_REGEXES)
    if rng.random() < 0.3:
        regex = "".join(rng.choice("ab()[]{}*+?|\\^$.,019-") for _ in range(size(rng, 300)))
    if rng.random() < 0.2:
        return _constrained(rng, {"type": "string", "pattern": regex})
    return completion(guided_regex=regex)


def choices(rng: Random) -> Sent:
    """Texts to choose from: many, long, equal, empty."""
    texts = [text(rng) + str(index) for index in range(size(rng, 100_000))]
    if rng.random() < 0.2:
        texts = [rng.choice(texts) * size(rng, 1000)] * size(rng, 100)
    return completion(structured_outputs={"choice": texts})


def contradictions(rng: Random) -> Sent:
    """A grammar, and what forbids every token of it."""
    more = rng.choice(
        (
            {"allowed_token_ids": [rng.randrange(300)]},
            {"logit_bias": {str(token): -100 for token in range(256)}},
            {"bad_words": [chr(code) for code in range(32, 127)]},
            {"guided_regex": "b"},
            {"min_tokens": 4, "stop_token_ids": [*range(256)]},
            {"use_beam_search": True, "best_of": 4, "temperature": 0},
        )
    )
    return completion(guided_choice=["a", "ab"], **more)


def _parameters(rng: Random) -> object:
    item = {"$defs": {"Item": {"type": rng.choice(_TYPES)}}}
    return rng.choice(
        (
            value(rng),
            item | {"properties": {"a": {"$ref": "#/$defs/Item"}}},
            {"properties": {"a": {"$ref": "#"}}, "type": "object"},
            {"properties": {"a": {"type": "string"}, "b": {"$ref": "#/properties/a"}}},
            {"allOf": 5},
            {"type": "object", "patternProperties": {"(": {}}},
        )
    )


def tools(rng: Random) -> Sent:
    """Tools of any name and schema, chosen in any way."""
    name = rng.choice(("f", text(rng), "a" * 300, "f"))
    given: list[Any] = [
        {"type": "function", "function": {"name": name, "parameters": _parameters(rng)}}
        for _ in range(size(rng, 200))
    ]
    if rng.random() < 0.2:
        given.append(value(rng))
    choice = rng.choice(
        ("auto", "none", "required", {"type": "function", "function": {"name": name}}, value(rng))
    )
    fields: dict[str, Any] = {"tools": given, "tool_choice": choice}
    if rng.random() < 0.3:
        fields["response_format"] = rng.choice(({"type": "json_object"}, value(rng)))
    if rng.random() < 0.3:
        fields["stream"] = True
    return chat(**fields)


def earlier_calls(rng: Random) -> Sent:
    """Messages with calls of tools and their results, of any form."""
    call = {"id": text(rng), "type": "function", "function": {"name": "f", "arguments": value(rng)}}
    calls = rng.choice(([], [call], [call] * size(rng, 1000), value(rng)))
    messages = [
        {"role": "user", "content": value(rng)},
        {"role": "assistant", "content": rng.choice((None, text(rng))), "tool_calls": calls},
        {"role": "tool", "tool_call_id": value(rng), "content": value(rng)},
    ]
    return chat(messages=messages)
