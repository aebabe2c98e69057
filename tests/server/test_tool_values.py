"""Values that are written as texts have the types that the whole schema says."""

import json
from typing import Any

import pytest

from pagedserve.server.tools.formats import TOOL_FORMATS
from pagedserve.server.tools.values import typed, typed_arguments

ROOT: dict[str, Any] = {
    "type": "object",
    "properties": {"plain": {"type": "string"}, "number": {"type": "number"}},
    "$defs": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "a/b~c%d": {"type": "string"},
        "loop": {"$ref": "#/$defs/loop"},
        "wide": {"anyOf": [{"$ref": "#/$defs/wide"}] * 40},
        "listed": {"anyOf": [{"$ref": "#/$defs/count"}, {"$ref": "#/$defs/text"}]},
    },
    "definitions": {"old": {"type": "string"}},
}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": ["string", "integer"]},
        {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        {"oneOf": [{"type": "string"}, {"type": "null"}]},
        {"allOf": [{"type": "string"}, {"maxLength": 9}]},
        {"allOf": [{"anyOf": [{"type": "string"}, {"type": "integer"}]}, {"type": "string"}]},
        {"$ref": "#/$defs/text"},
        {"$ref": "#/definitions/old"},
        {"$ref": "#/properties/plain"},
        {"$ref": "#/$defs/a~1b~0c%25d"},
        {"$ref": "#/$defs/listed"},
        {"enum": ["12345", "x"]},
        {"enum": ["12345", 12345]},
        {"const": "12345"},
        {"type": "string", "enum": ["x"]},
        {"type": "boolean"},
        {"type": "array"},
        {"not": {"type": "integer"}},
        {"description": "it says nothing"},
        {},
        True,
        False,
        {"$ref": "#/$defs/loop"},
        {"$ref": "#/$defs/wide"},
        {"$ref": "#/$defs/none"},
        {"$ref": "#anchor"},
        {"$ref": "http://example.org/schema"},
        {"$ref": 5, "anyOf": 5, "allOf": {}, "enum": 5, "type": 5, "oneOf": [], "not": 5},
    ],
)
def test_digits_stay_a_text_unless_the_schema_names_numbers_alone(schema: Any) -> None:
    assert typed("12345", schema, ROOT) == '"12345"'


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("12345", {"type": "integer"}, 12345),
        ("12345", {"type": ["integer", "null"]}, 12345),
        ("12345", {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/count"}]}, 12345),
        ("12345", {"$ref": "#/properties/number"}, 12345),
        ("12345", {"enum": ["a", 12345]}, 12345),
        ("12345", {"const": 12345}, 12345),
        ("12345", {"not": {"type": "string"}, "type": ["string", "integer"]}, 12345),
        ("1", {"enum": [True]}, "1"),
        ("5.0", {"type": "integer"}, 5.0),
        ("5.5", {"type": "integer"}, "5.5"),
        (" 5 ", {"type": "number"}, 5),
        ("true", {"type": "boolean"}, True),
        ("True", {"type": "boolean"}, True),
        ("true", {"type": "integer"}, "true"),
        ("true", {"type": ["string", "boolean"]}, "true"),
        ("true", {}, "true"),
        ("null", {"type": ["string", "null"]}, None),
        ("None", {"type": ["string", "null"]}, "None"),
        ("None", {"type": ["integer", "null"]}, None),
        ("null", {"type": "integer", "nullable": True}, None),
        ("null", {"type": "string"}, "null"),
        ("null", {"enum": ["null", "x"]}, "null"),
        ("NaN", {"type": "number"}, "NaN"),
        ("-Infinity", {"type": ["number"]}, "-Infinity"),
        ("[1, NaN]", {"type": "array"}, "[1, NaN]"),
        ("9" * 5000, {"type": "string"}, "9" * 5000),
        ("[" * 5000, {"type": "array"}, "[" * 5000),
        ("[1]", {"type": "array"}, [1]),
        ('{"a": 1}', {"type": "object"}, {"a": 1}),
        ('{"a": 1}', {"type": ["object", "string"]}, '{"a": 1}'),
        ('{"a": 1}', {}, {"a": 1}),
        ('"x"', {"type": "string"}, '"x"'),
        ('"x"', {"enum": ["x"]}, "x"),
        ("x", {"type": "integer"}, "x"),
        ("", {"type": "integer"}, ""),
    ],
)
def test_a_text_is_what_its_schema_names(text: str, schema: Any, value: object) -> None:
    found = json.loads(typed(text, schema, ROOT), parse_constant=pytest.fail)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("1e999", "number"),
        ("1e999", "integer"),
        ("9" * 5000, "integer"),
        ("-9" + "9" * 5000, "number"),
        ("12345678901234567890", "integer"),
        ("1.0", "integer"),
        ("1E2", "integer"),
        ("-0", "integer"),
        ("0.1000000000000000055", "number"),
        ('[ 1e999,\n{"a":-0} ]', "array"),
    ],
)
def test_numbers_stay_as_they_are_written(text: str, kind: str) -> None:
    assert typed(f" {text}\n", {"type": kind}, ROOT) == text
    assert typed(f" {text}\n", {"type": "string"}, ROOT) == json.dumps(f" {text}\n")


def test_what_json_does_not_allow_in_strings_is_escaped() -> None:
    assert typed('{"a":\n"b\tc\n"}', {"type": "object"}, ROOT) == '{"a":\n"b\\u0009c\\u000a"}'
    assert typed("\ud800", {}, ROOT) == '"\\ud800"'


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"code": {"type": "integer"}}},
        {"allOf": [{"properties": {"code": {"type": "integer"}}}]},
        {"anyOf": [{"properties": {"code": {"const": 7}}}, {"required": ["x"]}]},
        {
            "$ref": "#/$defs/arguments",
            "$defs": {"arguments": {"properties": {"code": {"const": 7}}}},
        },
        {"additionalProperties": {"type": "integer"}},
        {"patternProperties": {"^c": {"type": "integer"}}, "additionalProperties": False},
    ],
)
def test_the_schema_of_an_argument_is_found_wherever_it_stands(schema: dict[str, Any]) -> None:
    assert typed_arguments({"code": "7", "name": "x"}, schema) == '{"code": 7, "name": "x"}'


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"properties": []},
        {"properties": {"code": 5}},
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}]},
    ],
)
def test_a_schema_that_says_nothing_leaves_digits_a_text(schema: dict[str, Any]) -> None:
    assert typed_arguments({"code": "7"}, schema) == '{"code": "7"}'


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
def test_tagged_formats_take_types_from_the_whole_schema(name: str) -> None:
    text = {
        "qwen3_coder": (
            "<function=f><parameter=a>12345</parameter><parameter=b>NaN</parameter></function>"
        ),
        "glm45": (
            "f<arg_key>a</arg_key><arg_value>12345</arg_value>"
            "<arg_key>b</arg_key><arg_value>NaN</arg_value>"
        ),
    }[name]
    either = {"anyOf": [{"type": "string"}, {"type": "integer"}]}
    schema = {"type": "object", "properties": {"a": either, "b": {"type": "number"}}}
    (call,) = TOOL_FORMATS[name].read(text, {"f": schema})
    assert call.arguments == '{"a": "12345", "b": "NaN"}'


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("{'a': None, 'b': [True]}", "object", {"a": None, "b": [True]}),
        ("['x', 1]", "array", ["x", 1]),
        ("TRUE", "boolean", True),
        ("False", "boolean", False),
        ("['x']", "string", "['x']"),
        ("TRUE", "string", "TRUE"),
        ("{'a'}", "object", "{'a'}"),
        ("[" * 5000, "array", "[" * 5000),
        ("no literal", "object", "no literal"),
    ],
)
def test_python_is_read_where_no_text_is_accepted(text: str, kind: str, value: object) -> None:
    assert json.loads(typed(text, {"type": kind}, {})) == value
