"""Each call of a list is valid for its own tool, and whatever is valid for it may be written."""

import json
import random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import ValidationError

from pagedserve import RequestError
from pagedserve.server.chat.answer_reader import (
    check_tools,
    forced_by_choice,
    held_by_format,
    is_chosen_by_model,
)
from pagedserve.server.chat.protocol import ChatBody
from pagedserve.server.http.bounds import MAX_DEPTH
from pagedserve.server.tools.fields import FunctionTool
from pagedserve.server.tools.formats import TOOL_FORMATS
from pagedserve.server.tools.schemas import schema_of_calls

ITEM = {"type": "object", "additionalProperties": False}


def closed(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A schema of objects that have all these properties, and no other."""
    required = [name for name in properties if name != "next"]
    return {**ITEM, "properties": properties, "required": required, **more}


# By tool: the parameters, arguments that are valid, and such that are not.
TOOLS: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "buy": (
        closed({"item": {"$ref": "#/$defs/Item"}}, **{"$defs": {"Item": {"enum": ["tea"]}}}),
        [{"item": "tea"}],
        [{"item": 7}],
    ),
    "count": (
        closed({"item": {"$ref": "#/$defs/Item"}}, **{"$defs": {"Item": {"enum": [7]}}}),
        [{"item": 7}],
        [{"item": "tea"}],
    ),
    "old": (
        closed({"x": {"$ref": "#/definitions/Item"}}, definitions={"Item": {"const": True}}),
        [{"x": True}],
        [{"x": 7}, {"x": "tea"}],
    ),
    "tree": (
        closed({"v": {"enum": [1, 2]}, "next": {"$ref": "#"}}),
        [{"v": 1}, {"v": 1, "next": {"v": 2, "next": {"v": 1}}}],
        [{"v": 1, "next": [{"name": "tree", "parameters": {"v": 1}}]}],
    ),
    "same": (
        closed({"a": {"enum": ["x"]}, "b": {"$ref": "#/properties/a"}}),
        [{"a": "x", "b": "x"}],
        [{"a": "x", "b": 1}],
    ),
    "named": (
        closed(
            {"$ref": {"const": 1}, "enum": {"$ref": "#/properties/%24ref"}, "p": {"const": 3}},
        ),
        [{"$ref": 1, "enum": 1, "p": 3}],
        [{"$ref": 1, "enum": 2, "p": 3}],
    ),
    "escaped": (
        closed(
            {
                "a": {"$ref": "#/$defs/a~1b"},
                "b": {"$ref": "#/$defs/a~0b"},
                "c": {"$ref": "#/$defs/a%25b"},
            },
            **{"$defs": {"a/b": {"const": 1}, "a~b": {"const": 2}, "a%b": {"const": 3}}},
        ),
        [{"a": 1, "b": 2, "c": 3}],
        [{"a": 2, "b": 2, "c": 3}],
    ),
    "deep": (
        closed(
            {
                "a": {"$ref": "#/$defs/Outer/$defs/Inner"},
                "b": {"$ref": "#/$defs/List/prefixItems/1"},
            },
            **{
                "$defs": {
                    "Outer": {"$defs": {"Inner": {"$ref": "#/$defs/Item"}}},
                    "Item": {"const": "in"},
                    "List": {"prefixItems": [{}, {"const": "on"}]},
                }
            },
        ),
        [{"a": "in", "b": "on"}],
        [{"a": "on", "b": "in"}],
    ),
    "anchored": (
        closed({"a": {"$ref": "#I"}}, **{"$defs": {"I": {"$anchor": "I", "const": 1}}}),
        [{"a": 1}],
        [{"a": 2}],
    ),
    "anchored_too": (
        closed({"a": {"$ref": "#I"}}, **{"$defs": {"I": {"$anchor": "I", "const": 2}}}),
        [{"a": 2}],
        [{"a": 1}],
    ),
    "identified": (
        closed(
            {"a": {"$ref": "#/$defs/I"}, "b": {"$ref": "https://example.org/s#/$defs/I"}},
            **{"$id": "https://example.org/s", "$defs": {"I": {"const": 5}}},
        ),
        [{"a": 5, "b": 5}],
        [{"a": 6, "b": 5}],
    ),
    "data": (
        closed(
            {"a": {"const": {"$ref": "#/x"}}, "b": {"$ref": "#/$defs/I"}},
            **{"$defs": {"I": {"enum": [{"$ref": "#"}], "default": {"$ref": "#"}}}},
        ),
        [{"a": {"$ref": "#/x"}, "b": {"$ref": "#"}}],
        [{"a": {"$ref": "#/$defs/tool11/x"}, "b": {"$ref": "#"}}],
    ),
    "untyped": (
        {"properties": {"z": {"const": 1}}, "required": ["z"], "additionalProperties": False},
        [{"z": 1}],
        ["text", 5, None, []],
    ),
    "referring": (
        {"$ref": "#/$defs/A", "$defs": {"A": closed({"z": {"const": 2}})}},
        [{"z": 2}],
        ["text", {"z": 1}],
    ),
    "nullable": (
        {"type": ["object", "null"], **closed({"z": {"const": 3}}) | {"type": ["object", "null"]}},
        [{"z": 3}],
        [None],
    ),
}
SCHEMAS = {name: schema for name, (schema, _, _) in TOOLS.items()}
VOCABULARY = LLTokenizer("byte")


def matcher(schema: dict[str, Any]) -> LLMatcher:
    source = LLMatcher.grammar_from_json_schema(
        json.dumps(schema), defaults={"whitespace_flexible": False}
    )
    found = LLMatcher(VOCABULARY, source, log_level=0)
    assert not found.is_error(), found.get_error()
    return found


def may_be_written(start: LLMatcher, value: object) -> bool:
    grammar = start.deep_copy()
    tokens = VOCABULARY.tokenize_str(json.dumps(value, separators=(",", ":")))
    return grammar.try_consume_tokens(tokens) == len(tokens) and grammar.is_accepting()


def test_each_tool_keeps_its_own_schema() -> None:
    start = matcher(schema_of_calls(SCHEMAS, several=True))
    for name, (schema, valid, invalid) in TOOLS.items():
        for arguments in valid:
            jsonschema.Draft202012Validator(schema).validate(arguments)
            assert may_be_written(start, [{"name": name, "parameters": arguments}]), name
        for arguments in invalid:
            assert not may_be_written(start, [{"name": name, "parameters": arguments}]), name


def test_calls_of_all_tools_stand_in_one_list() -> None:
    calls = [{"name": name, "parameters": valid[-1]} for name, (_, valid, _) in TOOLS.items()]
    assert may_be_written(matcher(schema_of_calls(SCHEMAS, several=True)), calls)
    alone = matcher(schema_of_calls(SCHEMAS, several=False))
    assert may_be_written(alone, calls[:1])
    assert not may_be_written(alone, calls[:2])
    assert not may_be_written(alone, [])


def test_random_calls_are_valid_for_their_own_tool() -> None:
    start = matcher(schema_of_calls(SCHEMAS, several=True))
    chance, called = random.Random(0), set()
    for _ in range(150):
        grammar, text = start.deep_copy(), b""
        while not grammar.is_stopped() and not (grammar.is_accepting() and chance.random() < 0.3):
            forced = grammar.compute_ff_tokens()
            mask = grammar.compute_bitmask()
            allowed = [token for token in range(256) if mask[token // 8] >> token % 8 & 1]
            token = forced[0] if forced else chance.choice(allowed)
            grammar.consume_tokens([token])
            text += bytes([token])
            assert len(text) < 5000
        for call in json.loads(text):
            called.add(call["name"])
            jsonschema.Draft202012Validator(SCHEMAS[call["name"]]).validate(call["parameters"])
    assert called == SCHEMAS.keys()


def body(*schemas: Any, choice: Any = "required") -> ChatBody:
    tools = [
        {"type": "function", "function": {"name": f"f{number}", "parameters": schema}}
        for number, schema in enumerate(schemas)
    ]
    return ChatBody.model_validate({"messages": [], "tools": tools, "tool_choice": choice})


def test_two_schemas_of_one_id_are_refused() -> None:
    one = {"$id": "https://example.org/s", "type": "object"}
    other = {**one, "properties": {"a": {"const": 1}}}
    assert forced_by_choice(body(one, one)) is not None
    with pytest.raises(RequestError, match=r"two different schemas with the \$id") as refusal:
        forced_by_choice(body(one, other))
    assert refusal.value.param == "tools"


@pytest.mark.parametrize("num_levels", [MAX_DEPTH - 1, MAX_DEPTH, 5000])
def test_parameters_that_are_nested_too_deeply_are_refused(num_levels: int) -> None:
    deep: Any = {}
    for _ in range(num_levels - 1):
        deep = {"items": deep}
    given = body({"type": "object"})  # whose schemas are in a mapping by name
    assert given.tools is not None
    (tool,) = given.tools
    assert isinstance(tool, FunctionTool)
    tool.function.parameters = deep
    if num_levels < MAX_DEPTH:
        assert forced_by_choice(given) is not None
    else:
        with pytest.raises(RequestError, match=f"tools is nested deeper than {MAX_DEPTH} lists"):
            forced_by_choice(given)


@pytest.mark.parametrize("choice", ["required", "auto", None])
@pytest.mark.parametrize("kind", ["string", ["array", "null"], 5, []])
def test_parameters_of_another_type_are_refused(kind: Any, choice: str | None) -> None:
    with pytest.raises(RequestError, match=r"tools has f1, whose parameters .* an object"):
        check_tools(body({"type": "object"}, {"type": kind}, choice=choice))


def test_further_fields_of_a_tool_are_passed_over() -> None:
    function = {"name": "f", "strict": False, "cache_control": {"type": "ephemeral"}}
    tools = [{"type": "function", "function": function, "cache_control": {"type": "ephemeral"}}]
    (tool,) = ChatBody.model_validate({"messages": [], "tools": tools}).usable_tools
    shown = {"type": "function", "function": {"name": "f", "strict": False}}
    assert tool.for_template() == shown


def test_parameters_whose_type_is_null_are_an_object() -> None:
    check_tools(body({"type": None}))


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_calls_are_those_of_allowed_tools() -> None:
    given = body({}, {}, {}, choice=allowed("required", "f0", "f2"))
    check_tools(given)
    assert [tool.name for tool in given.usable_tools] == ["f0", "f2"]
    forced = forced_by_choice(given)
    assert forced is not None
    assert forced.json is not None
    start = matcher(json.loads(forced.json))
    for name, may_be in (("f0", True), ("f1", False), ("f2", True)):
        assert may_be_written(start, [{"name": name, "parameters": {}}]) == may_be
    free = body({}, {}, choice=allowed("auto", "f1"))
    assert forced_by_choice(free) is None
    assert is_chosen_by_model(free)
    held = held_by_format(free, TOOL_FORMATS["generic"])
    assert held is not None
    assert held.grammar is not None
    assert '"f1"' in held.grammar
    assert '"f0"' not in held.grammar
    with pytest.raises(RequestError, match="tool_choice names 'g'; tools has f0"):
        check_tools(body({}, choice=allowed("auto", "f0", "g")))
    for wrong in (allowed("none", "f0"), allowed("auto")):
        with pytest.raises(ValidationError):
            body({}, choice=wrong)


@pytest.mark.parametrize("choice", ["required", {"function": {"name": "f0"}}])
@pytest.mark.parametrize(
    "schema", [None, {}, {"properties": {"a": {}}}, {"type": ["null", "object"]}]
)
def test_arguments_are_an_object_whatever_the_schema_leaves_open(schema: Any, choice: Any) -> None:
    given = body(schema, choice=choice)
    check_tools(given)
    forced = forced_by_choice(given)
    assert forced is not None
    assert forced.json is not None
    start = matcher(json.loads(forced.json))

    def called(arguments: object) -> Any:
        is_list = choice == "required"
        return [{"name": "f0", "parameters": arguments}] if is_list else arguments

    assert may_be_written(start, called({}))
    wrong: list[Any] = ["a", 1, None, []]
    assert not any(may_be_written(start, called(value)) for value in wrong)


def test_hundreds_of_tools_are_taken_and_a_wrong_name_is_answered_briefly() -> None:
    schemas = [closed({"a": {"$ref": "#/$defs/I"}}, **{"$defs": {"I": {"const": 1}}})] * 600
    given = body(*schemas)
    check_tools(given)
    forced = forced_by_choice(given)
    assert forced is not None
    assert forced.json is not None
    start = matcher(json.loads(forced.json))
    assert may_be_written(start, [{"name": "f599", "parameters": {"a": 1}}])
    with pytest.raises(RequestError, match=r"tools has f0, f1, .*, and 584 more$"):
        check_tools(body(*schemas, choice={"function": {"name": "f1000"}}))


@pytest.mark.parametrize(
    ("name", "place"), [("get_weather", "get_weather"), ("a/b ~%24", "tool.1"), ("1-x", "1-x")]
)
def test_a_refusal_can_name_the_tool(name: str, place: str) -> None:
    schema = closed({"next": {"$ref": "#/$defs/x"}}, **{"$defs": {"x": {"format": "foo"}}})
    calls = schema_of_calls({"other": {}, name: schema}, several=True)
    assert calls["$defs"][place]["properties"]["next"] == {"$ref": f"#/$defs/{place}/$defs/x"}
    error = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(calls)))
    assert "Unknown format: foo" in error
    calls["$defs"][place]["$defs"]["x"] = {"type": "string"}
    assert not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(calls)))
