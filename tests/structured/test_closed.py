"""Objects of a closed schema have the properties that it names, and none that it does not."""

import copy
import json
from functools import partial
from typing import Any

import jsonschema
import pytest

from pagedserve.sampling.lark import prepare_lark
from pagedserve.sampling.schemas import prepare_schema

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
B: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "integer"}}}
REF = {"$ref": "#/$defs/A"}
DEFS = {"$defs": {"A": A}}


def is_valid(schema: Any, document: object) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(document))


@pytest.mark.parametrize(
    ("schema", "named", "unnamed"),
    [
        (A, [{}, {"a": 1}], [{"x": 1}, {"a": 1, "x": 1}]),
        ({"properties": {"o": A}}, [{"o": {"a": 1}}], [{"o": {"x": 1}}, {"x": 1}]),
        ({"items": A}, [[{"a": 1}, {}]], [[{"x": 1}]]),
        ({"anyOf": [A, B]}, [{"a": 1}, {"b": 1}], [{"x": 1}, {"a": 1, "b": 1}]),
        ({"allOf": [REF], **DEFS}, [{"a": 1}], [{"x": 1}]),
        ({"properties": {"o": REF}, **DEFS}, [{"o": {"a": 1}}], [{"o": {"x": 1}}]),
        ({"additionalProperties": A}, [{"y": {"a": 1}}], [{"y": {"x": 1}}]),
    ],
)
def test_other_properties_are_excluded(schema: Any, named: list[Any], unnamed: list[Any]) -> None:
    closed = prepare_schema(copy.deepcopy(schema), is_closed=True)
    for document in named:
        assert is_valid(schema, document)
        assert is_valid(closed, document), document
    for document in unnamed:
        assert is_valid(schema, document)
        assert not is_valid(closed, document), document


@pytest.mark.parametrize(
    ("schema", "document"),
    [
        ({"allOf": [A, B]}, {"a": 1, "b": 1}),
        ({**A, "allOf": [B]}, {"a": 1, "b": 1}),
        ({**A, "anyOf": [B, {"required": ["c"]}]}, {"a": 1, "b": 1}),
        ({**B, **REF, **DEFS}, {"a": 1, "b": 1}),
        ({"allOf": [{"allOf": [REF]}, {"anyOf": [B]}], **DEFS}, {"a": 1, "b": 1}),
        ({"properties": {"o": REF, "p": {**REF, **B}}, **DEFS}, {"p": {"a": 1, "b": 1}}),
        ({"not": {"properties": {"a": {"const": 1}}, "required": ["a"]}}, {"a": 2, "b": 1}),
        ({"properties": {"x": A}, "patternProperties": {"x": B}}, {"x": {"a": 1, "b": 1}}),
        ({**A, "additionalProperties": True}, {"x": 1}),
    ],
)
def test_schemas_of_one_value_do_not_exclude_one_another(schema: Any, document: object) -> None:
    assert is_valid(schema, document)
    assert is_valid(prepare_schema(copy.deepcopy(schema), is_closed=True), document)


def test_schemas_of_a_grammar_are_closed() -> None:
    grammar = f"start: %json {json.dumps(A)}"
    assert prepare_lark(grammar) == grammar
    closed = prepare_lark(grammar, partial(prepare_schema, is_closed=True))
    assert closed == f"start: %json {json.dumps({**A, 'additionalProperties': False})}"
