"""Structured outputs: the format that the text of a request must match.

Names are vLLM's.  ``pagedserve.sampling.grammar`` compiles the grammars.
"""

import json as json_codec
from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import pagedserve.checks as checks
from pagedserve.errors import RequestError

GrammarKind: TypeAlias = Literal["json", "regex", "lark"]

_KINDS: Final = ("json", "regex", "choice", "grammar", "json_object")
_PARAM: Final = "structured_outputs"
# Schema of any object.
_ANY_OBJECT: Final = '{"type": "object"}'
# Characters with a meaning in a regular expression of Rust's; the backslash, which escapes, first.
_SPECIAL: Final = r"\.+*?()|[]{}^$#&~-"
# Limit for the characters of a schema, regular expression, grammar, or all choices.
MAX_CHARS: Final = 1 << 18
# Limit for the number of choices.
MAX_CHOICES: Final = 10_000


@dataclass(frozen=True, slots=True, init=False)
class StructuredOutputsParams:
    r"""Format that the text of a request must match: exactly one of the first five is given.

    Attributes:
        json: JSON schema, stored as text; given as text, a mapping, or a pydantic model.
        regex: Regular expression of the whole text, in the syntax of Rust's ``regex``; ``\d``,
            ``\w`` and ``\s`` match ASCII only, unless it begins with ``(?u)``.
        choice: Strings, one of which the text must be.
        grammar: Context-free grammar: in Lark's syntax, with ``start`` as the first rule, or in
            EBNF as llama.cpp and XGrammar accept it (``root ::= ...``), with ``root`` as the first
            rule.
        json_object: Whether the text must be a JSON object.
        disable_any_whitespace: Generate JSON without whitespace between its tokens.
        disable_additional_properties: Treat ``additionalProperties`` as false where a schema, also
            one of a grammar, does not set it, except in schemas that are combined by ``allOf`` or
            beside others.
        given_as: Name of the parameter, or of the request field, in errors.

    Raises:
        RequestError: None of the five or several are given, or a value is invalid.
    """

    json: str | None
    regex: str | None
    choice: tuple[str, ...]
    grammar: str | None
    json_object: bool
    disable_any_whitespace: bool
    disable_additional_properties: bool
    given_as: str = field(compare=False)
    # The schema, the grammar, or the regular expression, which also represents choices.  Made once:
    # an event loop needs it several times.
    definition: str = field(init=False, repr=False, compare=False)

    def __init__(  # noqa: PLR0917  # in vLLM's order
        self,
        /,
        json: str | Mapping[str, Any] | type | None = None,
        regex: str | None = None,
        choice: Iterable[str] | None = None,
        grammar: str | None = None,
        json_object: bool | None = None,
        disable_any_whitespace: bool = False,
        disable_additional_properties: bool = False,
        backend: str | None = None,
        disable_fallback: bool | None = None,
        given_as: str = _PARAM,
        **later: object,
    ) -> None:
        del backend, disable_fallback  # vLLM has several backends, this engine one
        object.__setattr__(self, "given_as", given_as)
        for name, value in later.items():
            if value is not None and value is not False:  # off, as vLLM's defaults
                raise RequestError(
                    f"{given_as} has {name}; it is not supported here", param=given_as
                )
        named = partial(_named, given_as)
        values = {
            "json": None if json is None else _schema(named("json"), json, given_as),
            "regex": _text(named("regex"), regex, given_as),
            "choice": _choices(named("choice"), choice, given_as),
            "grammar": _text(named("grammar"), grammar, given_as),
            "json_object": checks.flag(named("json_object"), json_object or False),
            "disable_any_whitespace": checks.flag(
                named("disable_any_whitespace"), disable_any_whitespace
            ),
            "disable_additional_properties": checks.flag(
                named("disable_additional_properties"), disable_additional_properties
            ),
        }
        given = [name for name in _KINDS if values[name]]
        if len(given) != 1:
            shown = " and ".join(given) or "none of them"
            raise RequestError(
                f"{given_as} has {shown}; it must have exactly one of {', '.join(_KINDS)}",
                param=given_as,
            )
        for name, value in values.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "definition", self._define())

    @classmethod
    def from_optional(cls, **given: Any) -> "StructuredOutputsParams | None":
        """Construct from arguments of which all may be None; return None if no format is given."""
        is_given = any(given.get(name) is not None for name in (*_KINDS, "structural_tag"))
        return cls(**given) if is_given else None

    @classmethod
    def of(cls, given: object) -> "StructuredOutputsParams":
        """Return parameters given as such, or as a mapping of their names.

        Raises:
            RequestError: Any other value, or an unknown name.
        """
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            checks.refuse(_PARAM, given, "StructuredOutputsParams or a mapping of their names")
        return cls(**checks.mapping(_PARAM, given))

    @property
    def named(self) -> str:
        """Name of the given one of the five in errors."""
        return _named(self.given_as, next(name for name in _KINDS if getattr(self, name)))

    @property
    def kind(self) -> GrammarKind:
        """Kind of ``definition``."""
        if self.regex is not None or self.choice:
            return "regex"
        return "json" if self.grammar is None else "lark"

    def _define(self) -> str:
        if self.choice:
            return "|".join(map(_escaped, self.choice))
        return self.json or self.regex or self.grammar or _ANY_OBJECT


def _escaped(text: str) -> str:
    """Return a regular expression that only this text matches."""
    for character in _SPECIAL:  # a megabyte in milliseconds; a pattern's ``sub`` takes seconds
        text = text.replace(character, f"\\{character}")
    return text


def _named(given_as: str, name: str) -> str:
    """Name of a value in errors; a request field is called by its name."""
    return f"{_PARAM}.{name}" if given_as == _PARAM else given_as


def _text(name: str, value: object, param: str) -> str | None:
    if value is None:
        return None
    if isinstance(value, str):  # it would be iterated by character
        _check_length(name, len(value), param)
    return checks.text(name, value)


def _check_length(name: str, num_chars: int, param: str) -> None:
    if num_chars > MAX_CHARS:
        raise RequestError(
            f"{name} has {num_chars} characters; at most {MAX_CHARS} are accepted", param=param
        )


def _choices(name: str, value: Any, param: str) -> tuple[str, ...]:
    """Check the strings of a choice; None gives an empty tuple.

    Raises:
        RequestError: It is empty or too long, or has an element that is not a string.
    """
    if value is None:
        return ()
    if isinstance(value, Sized) and len(value) > MAX_CHOICES:
        raise RequestError(
            f"{name} has {len(value)} texts; at most {MAX_CHOICES} are accepted", param=param
        )
    texts = checks.each(checks.text, "a list of texts")(name, value)
    if not texts:
        raise RequestError(f"{name} has no texts; it must have at least one", param=param)
    _check_length(name, sum(map(len, texts)), param)
    return texts


def _schema(name: str, given: object, param: str) -> str:
    """Return a JSON schema as text.

    Raises:
        RequestError: It is not a schema.
    """
    if isinstance(given, type) and hasattr(given, "model_json_schema"):
        given = given.model_json_schema()
    try:
        if isinstance(given, str):
            given = json_codec.loads(_text(name, given, param) or "")
        if given is True:  # any JSON value
            given = {}
        if not isinstance(given, Mapping):
            checks.refuse(name, given, "a JSON schema: a mapping, its text, or True")
        text = json_codec.dumps(dict(given), allow_nan=False)
    except RecursionError as error:
        raise RequestError(f"{name} is nested too deeply", param=param) from error
    except RequestError:
        raise
    except (TypeError, ValueError) as error:
        raise RequestError(f"{name} is no JSON: {error}", param=param) from error
    _check_length(name, len(text), param)
    return text
