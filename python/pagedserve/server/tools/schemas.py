"""JSON schema of tool calls, each valid for its tool.

The schema of each tool has a separate entry under ``$defs``, with its name if possible, which
errors show.  Its references are rewritten to it: two tools may define the same name, and refer to
their root or to any position in it.
"""

import re
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pagedserve.errors import RequestError
from pagedserve.server.tools.readers import Schemas

# Keywords whose values are schemas by name; such a name may equal a keyword.
_BY_NAMES: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
# Keywords whose values are data.
_DATA: Final = frozenset({"enum", "const", "default", "examples", "example", "required"})
_OBJECT: Final = "object"
# Types of JSON; a schema may list several.
_NUM_TYPES: Final = 7
# Tool names that are the same in a JSON pointer, a reference and an anchor.
_PLAIN: Final = re.compile(r"[A-Za-z0-9_-]+")


def check_parameters(name: str, schema: Mapping[str, Any]) -> None:
    """Refuse parameters that are not an object, for which no arguments are valid.

    Raises:
        RequestError: The type is not object.
    """
    types = _OBJECT if schema.get("type") is None else schema["type"]
    if _OBJECT not in (types[:_NUM_TYPES] if isinstance(types, list) else [types]):
        raise RequestError(
            f"tools has {name}, whose parameters have the type {reprlib.repr(types)}; arguments "
            "are an object: the type must be 'object', or left out",
            param="tools",
        )


def schema_of_object(properties: dict[str, Any]) -> dict[str, Any]:
    """Schema of an object with these properties, all of them and no others."""
    return {
        "type": _OBJECT,
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def schema_of_arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Schema of a tool's parameters, restricted to objects."""
    return {**schema, "type": _OBJECT}


def schema_of_calls(schemas: Schemas, *, several: bool) -> dict[str, Any]:
    """Schema of a list of calls.

    Args:
        schemas: Schemas of the tools; at least one.
        several: Whether the list may have more than one call.

    Raises:
        RequestError: Two tools have different schemas with the same ``$id``.
    """
    call = schema_of_call(schemas, key="parameters")
    most = {} if several else {"maxItems": 1}
    return {
        "type": "array",
        "minItems": 1,
        **most,
        "items": {"anyOf": call["anyOf"]},
        "$defs": call["$defs"],
    }


def schema_of_call(schemas: Schemas, *, key: str) -> dict[str, Any]:
    """Schema of one call: an object with the name of a tool, and its arguments.

    Args:
        schemas: Schemas of the tools; at least one.
        key: Key of the arguments.

    Raises:
        RequestError: Two tools have different schemas with the same ``$id``.
    """
    _check_ids(schemas)
    calls: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    for number, (name, schema) in enumerate(schemas.items()):
        place = name if _PLAIN.fullmatch(name) else f"tool.{number}"
        definitions[place] = _moved(schema, place)
        arguments = {"$ref": f"#/$defs/{place}"}
        if schema.get("type") != _OBJECT:
            arguments["type"] = _OBJECT
        calls.append(schema_of_object({"name": {"const": name}, key: arguments}))
    return {"anyOf": calls, "$defs": definitions}


def _moved(schema: Any, place: str) -> Any:
    """Rewrite references to the root of a schema to its new position."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if _has_id(schema):  # its references are relative to it, at any position
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str):
            moved[key] = _moved_reference(value, place)
        elif key == "$anchor" and isinstance(value, str):
            moved[key] = f"{place}.{value}"
        elif key in _BY_NAMES and isinstance(value, dict):
            moved[key] = {name: _moved(part, place) for name, part in value.items()}
        else:
            moved[key] = value if key in _DATA else _moved(value, place)
    return moved


def _moved_reference(reference: str, place: str) -> str:
    """Rewrite a reference to a moved root, with its escaping."""
    if reference == "#" or reference.startswith("#/"):
        return f"#/$defs/{place}{reference[1:]}"
    return f"#{place}.{reference[1:]}" if reference.startswith("#") else reference


def _has_id(schema: Mapping[str, Any]) -> bool:
    name = schema.get("$id")
    return isinstance(name, str) and not name.startswith("#")


def _check_ids(schemas: Schemas) -> None:
    known: dict[str, Any] = {}
    for schema in schemas.values():
        for name, part in dict(_with_ids(schema)).items():
            if known.setdefault(name, part) != part:
                raise RequestError(
                    f"tools has two different schemas with the $id {name!r:.80}; each must have "
                    "its own",
                    param="tools",
                )


def _with_ids(schema: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Subschemas that have an ``$id``."""
    if isinstance(schema, dict) and _has_id(schema):
        yield schema["$id"], schema
    if isinstance(schema, (dict, list)):
        for part in schema.values() if isinstance(schema, dict) else schema:
            yield from _with_ids(part)
