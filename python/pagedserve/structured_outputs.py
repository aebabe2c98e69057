"""What the text of a request must be: a document of a JSON schema, one of some texts, ...

The names are vLLM's.  What a grammar allows is found out by ``pagedserve.sampling.grammar``.
"""

import json as json_codec
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import pagedserve.checks as checks
from pagedserve.errors import RequestError

GrammarKind: TypeAlias = Literal["json", "regex", "lark"]

_KINDS: Final = ("json", "regex", "choice", "grammar", "json_object")
_PARAM: Final = "structured_outputs"
# An object, whatever is in it.
_ANY_OBJECT: Final = '{"type": "object"}'
# What means something in a regular expression of Rust's.
_SPECIAL: Final = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")
# What a schema, a regular expression or a grammar may be at most.
MAX_CHARS: Final = 1 << 18


@dataclass(frozen=True, slots=True, init=False)
class StructuredOutputsParams:
    """What the text of a request must be: exactly one of the first five is given.

    Attributes:
        json: A JSON schema, as text; given as text, a mapping, or a pydantic model.
        regex: A regular expression of the whole text, in the syntax of Rust's ``regex``.
        choice: Texts, one of which it must be.
        grammar: A context-free grammar in Lark's syntax, whose first rule is ``start``.
        json_object: Whether it must be a JSON object.
        disable_any_whitespace: Write JSON without whitespace between its parts.
        disable_additional_properties: Objects have no properties but those that their schema
            names, where it does not say otherwise.
        given_as: The parameter, or the field of a request, that errors name.

    Raises:
        RequestError: None of the five or several, or a value that cannot be.
    """

    json: str | None
    regex: str | None
    choice: tuple[str, ...]
    grammar: str | None
    json_object: bool
    disable_any_whitespace: bool
    disable_additional_properties: bool
    given_as: str = field(compare=False)

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
        given_as: str = _PARAM,
        **later: object,
    ) -> None:
        del backend  # a hint to vLLM, which has several
        object.__setattr__(self, "given_as", given_as)
        for name, value in later.items():
            if value is not None:
                raise RequestError(f"{_PARAM} has {name}; it is not supported here", param=_PARAM)
        values = {
            "json": None if json is None else _schema(json),
            "regex": _text("regex", regex),
            "choice": checks.each(checks.text, "a list of texts")(f"{_PARAM}.choice", choice),
            "grammar": _text("grammar", grammar),
            "json_object": checks.flag(f"{_PARAM}.json_object", json_object or False),
            "disable_any_whitespace": checks.flag(
                f"{_PARAM}.disable_any_whitespace", disable_any_whitespace
            ),
            "disable_additional_properties": checks.flag(
                f"{_PARAM}.disable_additional_properties", disable_additional_properties
            ),
        }
        given = [name for name in _KINDS if values[name]]
        if len(given) != 1:
            shown = " and ".join(given) or "none of them"
            raise RequestError(
                f"{_PARAM} has {shown}; it must have exactly one of {', '.join(_KINDS)}",
                param=_PARAM,
            )
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, given: object) -> "StructuredOutputsParams":
        """Parameters that are given as such, or as a mapping of their names.

        Raises:
            RequestError: Something else, or an unknown name.
        """
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            checks.refuse(_PARAM, given, "StructuredOutputsParams or a mapping of their names")
        return cls(**checks.mapping(_PARAM, given))

    @property
    def named(self) -> str:
        """What an error calls the one of the five that was given."""
        if self.given_as != _PARAM:
            return self.given_as
        return f"{_PARAM}.{next(name for name in _KINDS if getattr(self, name))}"

    @property
    def kind(self) -> GrammarKind:
        """What ``definition`` is."""
        if self.regex is not None or self.choice:
            return "regex"
        return "json" if self.grammar is None else "lark"

    @property
    def definition(self) -> str:
        """The schema, the grammar, or the regular expression, which choices are too."""
        if self.choice:
            return "|".join(_SPECIAL.sub(r"\\\g<0>", text) for text in self.choice)
        return self.json or self.regex or self.grammar or _ANY_OBJECT


def _text(name: str, value: object) -> str | None:
    if value is None:
        return None
    text = checks.text(f"{_PARAM}.{name}", value)
    if len(text) > MAX_CHARS:
        raise RequestError(
            f"{_PARAM}.{name} has {len(text)} characters; at most {MAX_CHARS} are accepted",
            param=_PARAM,
        )
    return text


def _schema(given: object) -> str:
    """A JSON schema as text.

    Raises:
        RequestError: No schema is in it.
    """
    if isinstance(given, type) and hasattr(given, "model_json_schema"):
        given = given.model_json_schema()
    if isinstance(given, str):
        try:
            given = json_codec.loads(_text("json", given) or "")
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{_PARAM}.json is no JSON: {error}", param=_PARAM) from error
    if given is True:  # whatever is JSON
        given = {}
    if not isinstance(given, Mapping):
        checks.refuse(f"{_PARAM}.json", given, "a JSON schema: a mapping, its text, or True")
    try:
        text = json_codec.dumps(dict(given))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{_PARAM}.json is no JSON: {error}", param=_PARAM) from error
    return _text("json", text) or ""
