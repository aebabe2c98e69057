"""Preprocessing of JSON schemas for llguidance: bounds, exact numbers, dates, ASCII classes.

Everything is traversed without recursion until the depth is known to be bounded.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, Final, TypeAlias

from pagedserve.references import resolved
from pagedserve.sampling.regexes import ascii_classes

Schema: TypeAlias = dict[str, Any]
# A position in a document: the parent's, and the key or the index within it.
_Place: TypeAlias = "tuple[_Place, str | int] | None"

# Nesting depth of objects and lists; llguidance's parser accepts some more.
MAX_DEPTH: Final = 120
# Length of a chain of schemas that refer to one another by $ref, including nested ones.
MAX_REF_DEPTH: Final = 300
# Integers up to it, and the digits of a number without its point, are exact in binary floating
# point, in which llguidance stores numbers; so are 22 decimals of such.
MAX_EXACT: Final = 2**53 - 1
MAX_DECIMALS: Final = 22
# Maximum of minLength, maxItems, ...
MAX_COUNT: Final = 2**31 - 1
# Maximum characters of a position in an error.
_MAX_PLACE_CHARS: Final = 300
# Maximum schemas that are compiled to find the invalid part.
_MAX_TRIED_CHARS: Final = 1 << 20
# Maximum patternProperties in a schema.
MAX_PATTERN_PROPERTIES: Final = 64
# Keys of a JSON schema whose values are schemas, lists of them, or mappings to them.
_SCHEMA_KEYS: Final = (
    *("items", "additionalItems", "additionalProperties"),
    *("not", "if", "then", "else", "contains"),
)
_LIST_KEYS: Final = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_MAPPING_KEYS: Final = (
    *("$defs", "definitions", "properties", "patternProperties"),
    *("dependentSchemas", "dependencies"),
)
# Keys whose schemas are for the same value as the schema that has them.
_UNIONS: Final = ("anyOf", "oneOf", "allOf")
_IN_PLACE_KEYS: Final = (
    *_UNIONS,
    *("not", "if", "then", "else", "dependentSchemas", "dependencies"),
)
# Keys whose schemas are for properties by their names.
_PROPERTY_KEYS: Final = ("properties", "patternProperties")
# Keys whose values do not restrict documents.
_ANNOTATIONS: Final = ("default", "examples")
# Keys of a schema that its parts are compiled with.
_SHARED_KEYS: Final = ("$defs", "definitions", "x-guidance")
# Values of keywords that llguidance refuses, though they restrict no document.
_NO_EFFECT: Final[dict[str, tuple[Any, ...]]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {"type": "string"}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "dependentRequired": ({},),
}
# Options of llguidance for JSON without whitespace between its tokens.
NO_SPACE: Final = {"whitespace_flexible": False}
_DATA_KEYS: Final = ("const", "enum")
# Bounds of numbers, and the rounding that keeps every text valid.
_BOUND_KEYS: Final = {
    **dict.fromkeys(("minimum", "exclusiveMinimum"), ROUND_CEILING),
    **dict.fromkeys(("maximum", "exclusiveMaximum"), ROUND_FLOOR),
}
# Enough digits for any number with the maximum of decimals.
_DECIMAL: Final = Context(prec=60)
_COUNT_KEYS: Final = (
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
)
# Years except 0; days that each of them has, and 29 February with the leap years.
_YEAR: Final = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_FOURTH: Final = "(0[48]|[2468][048]|[13579][26])"
_REAL_DATE: Final = (
    f"^({_YEAR}-((0[13-9]|1[0-2])-[0-9]{{2}}|02-([01][0-9]|2[0-8]))"
    f"|([0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)"
)


class GrammarError(Exception):
    """The reason why a grammar cannot be used.

    Attributes:
        place: Position as a JSON pointer; empty if it is not known.
    """

    def __init__(self, reason: str, place: str = "") -> None:
        super().__init__(reason)
        self.place = place


class TrialsSpentError(GrammarError):
    """The grammar has used all its compilations."""


def prepare_schema(schema: Any, *, is_closed: bool = False) -> Any:
    """Convert a schema for llguidance; may modify the given one.

    Args:
        schema: Schema of a document.
        is_closed: Whether its objects may have only the properties that they name.

    Raises:
        GrammarError: A bound is exceeded, with the position.
    """
    check_schema(schema)
    if not isinstance(schema, dict):
        return schema
    if is_closed:
        _close(schema)
    for part in _reachable(schema):
        _rewrite(part)
    return schema


def check_schema(schema: Any) -> None:
    """Check the bounds of a schema; rounds bounds of numbers that are not exact.

    Raises:
        GrammarError: A bound is exceeded, with the position.
    """
    num_patterns = _check_values(schema, None)
    for ref in _check_refs(schema):
        if not set(_ANNOTATIONS).isdisjoint(ref.split("/")):  # a schema where none is searched
            num_patterns += _check_values(resolved(ref, schema), (None, ref))
    if num_patterns > MAX_PATTERN_PROPERTIES:
        raise GrammarError(
            f"it has {num_patterns} patternProperties; at most {MAX_PATTERN_PROPERTIES} are "
            "accepted"
        )


def _check_values(schema: Any, start: _Place) -> int:
    """Check the depth and the numbers of a schema; return the number of patternProperties.

    Raises:
        GrammarError: A bound is exceeded, with the position.
    """
    num_patterns = 0
    # Each value with its position, its depth, and its kind.
    stack: list[tuple[Any, _Place, int, str]] = [(schema, start, 1, "schema")]
    while stack:
        value, place, depth, kind = stack.pop()
        if depth > MAX_DEPTH and isinstance(value, dict | list):
            raise GrammarError(f"it is nested deeper than {MAX_DEPTH} levels", _pointer(place))
        if kind == "schema" and isinstance(value, dict):
            _check_keywords(value, place)
            if isinstance(patterns := value.get("patternProperties"), dict):
                num_patterns += len(patterns)
        elif not isinstance(value, dict | list):
            _check_number(value, place)
        children = _children(value, kind)
        stack += [(child, (place, key), depth + 1, kind) for key, child, kind in children]
    return num_patterns


def _children(value: Any, kind: str) -> Iterator[tuple[str | int, Any, str]]:
    """Values within a value: their part of a JSON pointer, and their kind."""
    if isinstance(value, list):
        yield from ((index, child, kind) for index, child in enumerate(value))
    elif isinstance(value, dict):
        for key, child in value.items():
            if kind == "data":
                yield key, child, "data"
            elif kind == "names":
                yield key, child, "schema"
            elif key in _MAPPING_KEYS:
                yield key, child, "names"
            elif key not in _ANNOTATIONS:
                yield key, child, "data" if key in _DATA_KEYS else "schema"


def _check_keywords(schema: Schema, place: "_Place") -> None:
    """Check the numbers of one schema's keywords, and round its bounds."""
    for key, rounding in _BOUND_KEYS.items():
        bound = schema.get(key)
        if isinstance(bound, int | float) and not isinstance(bound, bool):
            schema[key] = _inward(bound, rounding)
    for key in _COUNT_KEYS:
        count = schema.get(key)
        if isinstance(count, int | float) and count > MAX_COUNT:
            raise GrammarError(f"{key} is {count}; it must be at most {MAX_COUNT}", _pointer(place))
    multiple = schema.get("multipleOf")
    if isinstance(multiple, int | float) and not multiple > 0:
        raise GrammarError(f"multipleOf is {multiple}; it must be greater than 0", _pointer(place))


def _check_number(value: object, place: "_Place") -> None:
    """Refuse a number that is not exact in binary floating point."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise GrammarError(f"it is {value}, which is not a JSON number", _pointer(place))
    if not _is_exact(value):
        raise GrammarError(
            f"{_short(value)} cannot be kept exactly; numbers must be from -{MAX_EXACT} to "
            f"{MAX_EXACT}, their digits without the point too, with at most {MAX_DECIMALS} "
            "decimals",
            _pointer(place),
        )


def _inward(bound: float, rounding: str) -> float:
    """The next exact number within a bound; the bound itself if there is none.

    In schemas that llguidance accepts, no bound is inverted (``not``).
    """
    if not Decimal(bound).is_finite() or _is_exact(bound):
        return bound
    if abs(bound) > MAX_EXACT:
        is_inward = (bound < 0) == (rounding == ROUND_CEILING)
        most = MAX_EXACT if bound > 0 else -MAX_EXACT
        return most if is_inward else bound
    number = Decimal(repr(bound))
    for decimals in range(MAX_DECIMALS, 0, -1):
        unit = Decimal(1).scaleb(-decimals)
        rounded = float(number.quantize(unit, rounding=rounding, context=_DECIMAL))
        shown = Decimal(repr(rounded))
        is_inward = shown >= number if rounding == ROUND_CEILING else shown <= number
        if is_inward and _is_exact(rounded):
            return rounded
    return int(number.to_integral_value(rounding=rounding))


def _is_exact(value: float) -> bool:
    digits, decimals = _digits(value)
    return digits <= MAX_EXACT and decimals <= MAX_DECIMALS


def _digits(value: float) -> tuple[int, int]:
    """Digits of a number without its point, as one integer, and the number of decimals."""
    if isinstance(value, int):
        return abs(value), 0
    _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    number = int("".join(map(str, digits)))
    decimals = -int(exponent)
    return (number, decimals) if decimals > 0 else (number * 10**-decimals, 0)


def _short(value: float) -> str:
    """Format a number for an error; long integers are described."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return "an integer of more than 40 digits"
    return str(value)


def _check_refs(schema: Any) -> set[str]:
    """Follow each reference where it first occurs, recursively as llguidance does.

    Returns:
        All references.

    Raises:
        GrammarError: References and schemas are nested too deeply.
    """
    seen = set[str]()
    levels = [iter([schema])]
    while levels:
        value = next(levels[-1], _END)
        if value is _END:
            levels.pop()
            continue
        if len(levels) > MAX_REF_DEPTH:
            raise GrammarError(
                "its schemas refer to one another in a chain of more than "
                f"{MAX_REF_DEPTH} levels; fewer are accepted"
            )
        inner: list[Any] = []
        if isinstance(value, list):
            inner = value
        elif isinstance(value, dict):
            inner = [v for k, v in value.items() if k not in ("$defs", "definitions")]
            ref = value.get("$ref")
            if isinstance(ref, str) and ref not in seen:
                seen.add(ref)
                inner.append(resolved(ref, schema))
        if inner:
            levels.append(iter(inner))
    return seen


_END: Final = object()


def pointed(name: str | int) -> str:
    """Escape a name for a JSON pointer, without spaces."""
    escaped = str(name).replace("~", "~0").replace("/", "~1").replace("%", "%25")
    return re.sub(r"[\s\x00-\x1f\x7f]", lambda found: f"%{ord(found[0]):02X}", escaped)


def _pointer(place: _Place) -> str:
    """Format a position as a JSON pointer; a long one is truncated."""
    names: list[str | int] = []
    while place is not None:
        place, name = place
        names.append(name)
    if names and isinstance(names[-1], str) and names[-1].startswith("#"):
        return str(names[-1])[:_MAX_PLACE_CHARS]
    return "/".join(["#", *(pointed(name) for name in reversed(names))])[:_MAX_PLACE_CHARS]


def parts(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Subschemas except True and False, each with its JSON pointer."""
    found: list[tuple[str, Any]] = []
    for key in _MAPPING_KEYS:  # definitions before references to them
        if isinstance(inner := schema.get(key), dict):
            found += [(f"{key}/{pointed(name)}", part) for name, part in inner.items()]
    found += [(key, schema.get(key)) for key in _SCHEMA_KEYS]
    for key in _LIST_KEYS:
        if isinstance(inner := schema.get(key), list):
            found += [(f"{key}/{index}", part) for index, part in enumerate(inner)]
    yield from ((pointer, part) for pointer, part in found if isinstance(part, dict))


def placed(
    schema: Schema, fault: str, num_chars: int, fault_of: Callable[[Schema], str]
) -> GrammarError:
    """Add to a fault the position of the innermost part of the schema that has it.

    Each part is compiled with the definitions that it may refer to, up to a limit.  A part whose
    fault differs refers to something outside it.

    Args:
        schema: Schema with the fault.
        fault: Error of the schema.
        num_chars: Length of the schema.
        fault_of: Compiles a schema and returns its error; may raise `TrialsSpentError`.
    """
    shared: Schema = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    place, rest = "#", _MAX_TRIED_CHARS
    inner = parts(schema)
    with contextlib.suppress(TrialsSpentError):
        while (found := next(inner, None)) is not None and (rest := rest - num_chars) > 0:
            pointer, part = found
            if _is_same(fault_of({**part, **shared}), fault):
                place, inner = f"{place}/{pointer}", parts(part)
    return GrammarError(fault, place[:_MAX_PLACE_CHARS])


def _is_same(fault: str, other: str) -> bool:
    """Whether two faults are equal except for llguidance's position."""
    return fault.partition("while processing")[0].rstrip() == (
        other.partition("while processing")[0].rstrip()
    )


def _close(root: Schema) -> None:
    """Restrict objects to the properties that they name; modifies the schema.

    A schema stays open if it restricts a value together with another, as the schemas of ``allOf``
    do: closed, each would exclude the properties of the others.
    """
    is_alone_by_id: dict[int, bool] = {}
    seen: list[Schema] = []
    stack: list[tuple[Any, bool]] = [(root, True)]
    while stack:
        schema, is_alone = stack.pop()
        known = is_alone_by_id.get(id(schema))
        if not isinstance(schema, dict) or (known is not None and known <= is_alone):
            continue
        if known is None:
            seen.append(schema)
        is_alone_by_id[id(schema)] = is_alone
        is_alone = is_alone and _num_in_place(schema) <= 1
        stack.append((resolved(schema.get("$ref"), root), is_alone))
        for pointer, part in parts(schema):
            key = pointer.partition("/")[0]
            if key in _IN_PLACE_KEYS:
                stack.append((part, is_alone and key in _UNIONS))
            else:  # a pattern may name the same property as another, or as its name
                may_meet = key in _PROPERTY_KEYS and "patternProperties" in schema
                stack.append((part, not may_meet))
    for schema in seen:
        if "properties" in schema and is_alone_by_id[id(schema)] and _num_in_place(schema) <= 1:
            schema.setdefault("additionalProperties", False)


def _num_in_place(schema: Schema) -> int:
    """Number of schemas that restrict the same value: its own properties, and those within it."""
    every = schema.get("allOf")
    num_parts = len(every) if isinstance(every, list) else 0
    num_keys = sum(key in schema for key in ("$ref", *_IN_PLACE_KEYS) if key != "allOf")
    return num_parts + num_keys + any(key in schema for key in _PROPERTY_KEYS)


def leave_out_patterns(schema: Schema, fault_of: Callable[[Schema], str]) -> None:
    """Remove the patterns that llguidance cannot compile, such as those with look-ahead.

    Properties that a removed pattern of ``patternProperties`` may match have any value.

    Args:
        schema: Modified in place.
        fault_of: Compiles a schema and returns its error; may raise `TrialsSpentError`.
    """
    for part in _reachable(schema):
        pattern, patterns = part.get("pattern"), part.get("patternProperties")
        if isinstance(pattern, str) and fault_of({"type": "string", "pattern": pattern}):
            del part["pattern"]
        patterns = patterns if isinstance(patterns, dict) else {}
        for pattern in list(patterns):
            if fault_of({"type": "string", "pattern": pattern}):
                del patterns[pattern]
                part["additionalProperties"] = True


def leave_out_faults(schema: Schema, fault_of: Callable[[Schema], str]) -> None:
    """Remove the keywords that llguidance refuses, such as null or a reference to nothing.

    Args:
        schema: Schema whose parts are checked, each separately; modified in place.
        fault_of: Compiles a schema and returns its error; may raise `TrialsSpentError`.
    """
    shared: Schema = {key: schema[key] for key in _SHARED_KEYS if key in schema}

    def fault_within(part: Schema) -> str:
        return fault_of({**part, **shared})

    for _, part in parts(schema):
        if fault_within(part):
            for inner in reversed(_reachable(part)):  # innermost ones first
                _leave_out_faults(inner, fault_within)


def _leave_out_faults(schema: Schema, fault_of: Callable[[Schema], str]) -> None:
    """Remove the keywords of a schema that have a fault, or all but the type of an object."""
    held = {"type": "object"} if schema.get("type") == "object" else {}
    while (fault := fault_of(schema)) and schema != held:
        found = (rest for rest in _reduced(schema) if not _is_same(fault_of(rest), fault))
        rest = next(found, held)
        if "properties" in schema and "properties" not in rest:
            rest.pop("additionalProperties", None)
        schema.clear()
        schema.update(rest)


def _reduced(schema: Schema) -> Iterator[Schema]:
    """A schema without one of its required names, and without one of its keywords, the type last.

    Without its type it has no fault if it accepts any number, whatever its properties are.
    """
    given = schema.get("required")
    required = given if isinstance(given, list) else []
    for name in required:
        yield {**schema, "required": [other for other in required if other != name]}
    for key in sorted(schema, key="type".__eq__):
        yield {name: value for name, value in schema.items() if name != key}


def spread_used_patterns(schema: Any, fault_of: Callable[[Schema], str]) -> None:
    """Merge schemas of patterns that match only named properties into those properties.

    An object with a property ``a`` and a pattern ``^a$`` has no further properties, which
    llguidance does not detect: after a comma no token would be allowed.

    Args:
        schema: Modified in place.
        fault_of: Compiles a schema and returns its error; may raise `TrialsSpentError`.
    """
    for part in _reachable(schema):
        _spread_patterns(part, fault_of)


def _spread_patterns(schema: Schema, fault_of: Callable[[Schema], str]) -> None:
    patterns, named = schema.get("patternProperties"), schema.get("properties", {})
    if not isinstance(patterns, dict) or not isinstance(named, dict):
        return
    required = schema.get("required", [])
    given = [*named, *(required if isinstance(required, list) else ())]
    if not all(isinstance(name, str) for name in given):
        return
    names = set(given)
    closed: Schema = {"type": "object", "properties": dict.fromkeys(names, False)}
    closed |= {"minProperties": 1, "additionalProperties": False, "x-guidance": NO_SPACE}
    for pattern, inner in list(patterns.items()) if names else ():
        if fault_of({"type": "string", "pattern": pattern}):
            continue  # an invalid pattern is reported elsewhere
        if not fault_of(closed | {"patternProperties": {pattern: True}}):
            continue
        del patterns[pattern]
        for name in sorted(names):
            if not fault_of({"type": "string", "const": name, "pattern": pattern}):
                named[name] = {"allOf": [named.get(name, True), inner]}
        schema["properties"] = named


def _reachable(root: Any) -> list[Schema]:
    """Schemas of a document and of its references, wherever those are, each once."""
    found: dict[int, Schema] = {}
    stack = [root]
    while stack:
        schema = stack.pop()
        if isinstance(schema, dict) and id(schema) not in found:
            found[id(schema)] = schema
            stack += [resolved(schema.get("$ref"), root), *(part for _, part in parts(schema))]
    return list(found.values())


def _rewrite(schema: Schema) -> None:
    """Rewrite keywords that llguidance interprets differently.

    Dates become those of years 1 to 9999, with 29 February in leap years only: llguidance knows
    only the maximum days of a month.  Patterns get ASCII classes.  By ``$schema`` it would ignore
    keywords that the draft does not have, and refuse unknown drafts.
    """
    schema.pop("$schema", None)
    for name, values in _NO_EFFECT.items():
        if name in schema and schema[name] in values:
            del schema[name]
    if isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"] = ascii_classes(pattern)
    if isinstance(patterns := schema.get("patternProperties"), dict):
        schema["patternProperties"] = {ascii_classes(key): part for key, part in patterns.items()}
    if schema.get("format") in ("date", "date-time") and isinstance(schema.get("allOf", []), list):
        schema["allOf"] = [*schema.get("allOf", ()), {"pattern": _REAL_DATE}]
