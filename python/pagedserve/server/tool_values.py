"""Values of tool arguments: strict JSON, and text converted by its schema.

Untyped text, as in tagged formats, is converted by the whole schema: ``type``, ``enum``, ``const``,
``anyOf``, ``oneOf``, ``allOf``, ``not`` and references into the schema of the tool.  Patterns are
not evaluated: a client's may run indefinitely.

Invariant: the result of ``dumps`` is JSON by RFC 8259, without NaN and lone surrogates.

Costs: one visit of each schema that a value's schema refers to.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

from pagedserve.references import resolved

Schema: TypeAlias = Mapping[str, Any]

# Python's literals, which templates and models write too.
_CONSTANTS: Final = {"True": True, "False": False, "None": None}
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_KINDS: Final[dict[type, tuple[str, ...]]] = {
    type(None): ("null",),
    bool: ("boolean",),
    str: ("string",),
    int: ("integer", "number"),
    float: ("number",),
    dict: ("object",),
    list: ("array",),
}
_ALTERNATIVES: Final = ("anyOf", "oneOf")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a JSON number")
    return number


# Accepts line breaks in strings: models write them.
DECODER: Final = json.JSONDecoder(parse_float=_finite, parse_constant=_finite, strict=False)


def dumps(value: object) -> str:
    """Serialize a value as JSON.

    Raises:
        ValueError: A number is not finite.
        TypeError: JSON has no such type.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def typed_arguments(texts: Mapping[str, str], schema: Schema) -> dict[str, Any]:
    """Convert the arguments of a call from text.

    Args:
        texts: Values by the names of the arguments.
        schema: Schema of all arguments.
    """
    return {
        name: typed(text, {"anyOf": [*_schemas_of(name, schema, schema, set())]}, schema)
        for name, text in texts.items()
    }


def typed(text: str, schema: object, root: Schema) -> Any:
    """Convert a text to a value.

    It stays a string if the schema accepts strings, except for ``null`` if the schema accepts that
    too; else it becomes JSON that the schema accepts.  If the schema is silent, objects and lists
    are parsed and everything else stays a string.

    Args:
        text: Text of the model.
        schema: Schema of the value.
        root: Schema that references refer to.
    """
    try:
        value = _CONSTANTS[text] if text in _CONSTANTS else DECODER.decode(text)
    except (ValueError, RecursionError):
        return text
    as_text, as_value = _names(text, schema, root, {}), _names(value, schema, root, {})
    if as_value and (not as_text or text == "null"):
        return value
    says_nothing = as_text is None and as_value is None
    return value if says_nothing and isinstance(value, (dict, list)) else text


def _names(value: object, schema: object, root: Schema, known: dict[str, Any]) -> bool | None:
    """Whether a schema accepts values of this type; None if it does not restrict them.

    Args:
        value: A value.
        schema: Schema, interpreted as far as valid: a client may send anything.
        root: Schema that references refer to.
        known: Results by reference; None while a reference is being evaluated.
    """
    if not isinstance(schema, Mapping):
        return False if schema is False else None
    if value is None and schema.get("nullable") is True:
        return True
    found = [_is_of_types(value, schema), *_in_list(value, schema), _by_not(value, schema)]
    for key in _ALTERNATIVES:
        if isinstance(schema.get(key), list) and schema[key]:
            each = [_names(value, part, root, known) for part in schema[key]]
            found.append(True if True in each else None if None in each else False)
    if isinstance(schema.get("allOf"), list):
        found += [_names(value, part, root, known) for part in schema["allOf"]]
    if isinstance(reference := schema.get("$ref"), str):
        if reference not in known:
            known[reference] = None
            known[reference] = _names(value, resolved(reference, root), root, known)
        found.append(known[reference])
    return False if False in found else True if True in found else None


def _is_of_types(value: object, schema: Schema) -> bool | None:
    types = schema.get("type")
    named = types if isinstance(types, list) else [types]
    known = [name for name in named if isinstance(name, str)]
    return not {*known}.isdisjoint(_kinds_of(value)) if known else None


def _kinds_of(value: object) -> tuple[str, ...]:
    """JSON schema types of a value."""
    if isinstance(value, float) and value.is_integer():
        return ("integer", "number")
    return _KINDS[type(value)]


def _in_list(value: object, schema: Schema) -> Iterator[bool]:
    if isinstance(values := schema.get("enum"), list):
        yield any(_is_equal(value, entry) for entry in values)
    if "const" in schema:
        yield _is_equal(value, schema["const"])


def _by_not(value: object, schema: Schema) -> bool | None:
    """Result of a ``not`` that is simple enough to be evaluated exactly."""
    excluded = schema.get("not")
    if not isinstance(excluded, Mapping) or len(excluded) != 1:
        return None
    in_list = [*_in_list(value, excluded), _is_of_types(value, excluded)]
    return False if True in in_list else None


def _is_equal(value: object, entry: object) -> bool:
    return value == entry and isinstance(value, bool) == isinstance(entry, bool)


def _schemas_of(name: str, schema: object, root: Schema, seen: set[str]) -> Iterator[Any]:
    """Schemas of an argument, anywhere in that of all arguments."""
    if not isinstance(schema, Mapping):
        return
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        yield properties[name]
    else:
        patterns = schema.get("patternProperties")
        yield from patterns.values() if isinstance(patterns, Mapping) else ()
        more = schema.get("additionalProperties")
        if isinstance(more, Mapping):
            yield more
    for key in (*_ALTERNATIVES, "allOf"):
        for part in schema[key] if isinstance(schema.get(key), list) else ():
            yield from _schemas_of(name, part, root, seen)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        seen.add(reference)
        yield from _schemas_of(name, resolved(reference, root), root, seen)
