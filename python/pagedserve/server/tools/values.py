"""Values of tool arguments: strict JSON, and text converted by its schema.

Untyped text, as in tagged formats, is converted by the whole schema: ``type``, ``enum``, ``const``,
``anyOf``, ``oneOf``, ``allOf``, ``not`` and references into the schema of the tool.  Patterns are
not evaluated: a client's may run indefinitely.

Invariants:

1. Results are JSON by RFC 8259, without NaN and lone surrogates.
2. What the model wrote as JSON stays as it wrote it, so that no number changes.  Only characters
   that JSON does not allow in strings, such as line breaks, become escapes.

Costs: one visit of each schema that a value's schema refers to.
"""

import ast
import json
import math
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Final, NoReturn, TypeAlias

from pagedserve.references import resolved

Schema: TypeAlias = Mapping[str, Any]

# Python's literals, which templates and models write too.
_CONSTANTS: Final = {"True": True, "False": False, "None": None}
_BOOLEANS: Final = ("true", "false")
# Characters that strings of JSON may have as escapes alone.
_ESCAPED: Final = re.compile("[\x00-\x1f\ud800-\udfff]")
_STRING: Final = re.compile(r'"(?:[^"\\]++|\\.)*+"')
# Digits of an integer that Python converts.
_MAX_DIGITS: Final = sys.int_info.default_max_str_digits
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


def _integer(text: str) -> int | float:
    return int(text) if len(text) <= _MAX_DIGITS else float(text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


# Accepts line breaks in strings: models write them.  Numbers beyond the limits are infinite.
DECODER: Final = json.JSONDecoder(parse_int=_integer, parse_constant=_refuse, strict=False)


def as_written(text: str) -> str:
    """JSON of a text that ``DECODER`` accepts."""
    if not _ESCAPED.search(text):
        return text
    return _STRING.sub(lambda found: _ESCAPED.sub(_escape, found[0]), text)


def _escape(found: "re.Match[str]") -> str:
    return f"\\u{ord(found[0]):04x}"


def dumps(value: object) -> str:
    """Serialize a value as JSON.

    Raises:
        ValueError: A number is not finite.
        TypeError: JSON has no such type.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _ESCAPED.sub(_escape, text)


def typed_arguments(texts: Mapping[str, str], schema: Schema) -> str:
    """JSON of the arguments of a call whose values are untyped text.

    Args:
        texts: Values by the names of the arguments.
        schema: Schema of all arguments.
    """
    values = (
        f"{dumps(name)}: "
        + typed(text, {"anyOf": [*_schemas_of(name, schema, schema, set())]}, schema)
        for name, text in texts.items()
    )
    return f"{{{', '.join(values)}}}"


def typed(text: str, schema: object, root: Schema) -> str:
    """JSON of a value that is written as untyped text.

    It is a string if the schema accepts strings, except for ``null`` if the schema accepts that
    too; else it is the text, as JSON that the schema accepts, or in Python's syntax, which models
    write too.  If the schema is silent, objects and lists are JSON and everything else is a string.

    Args:
        text: Text of the model.
        schema: Schema of the value.
        root: Schema that references refer to.
    """
    try:
        value = _CONSTANTS[text] if text in _CONSTANTS else DECODER.decode(text)
    except (ValueError, RecursionError):
        accepts_text = _names(text, schema, root, {}) is not False
        return dumps(text) if accepts_text else _of_python(text, schema, root)
    as_text, as_value = _names(text, schema, root, {}), _names(value, schema, root, {})
    says_nothing = as_text is None and as_value is None
    is_json = bool(as_value) and (not as_text or text == "null")
    if not is_json and not (says_nothing and isinstance(value, (dict, list))):
        return dumps(text)
    return dumps(value) if text in _CONSTANTS else as_written(text.strip())


def _of_python(text: str, schema: object, root: Schema) -> str:
    """JSON of a literal of Python, or a boolean in any case, if the schema accepts its type."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the code is the model's
            literal = text if text.lower() not in _BOOLEANS else text.capitalize()
            value = ast.literal_eval(literal.strip())
        if _names(value, schema, root, {}):
            return dumps(value)
    except (SyntaxError, ValueError, TypeError, KeyError, MemoryError, RecursionError):
        pass
    return dumps(text)


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
    if isinstance(value, float) and (value.is_integer() or math.isinf(value)):
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
