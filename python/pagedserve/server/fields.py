"""Objects within request bodies, and lists that are validated in a single pass."""

import reprlib
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeAlias

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    PrivateAttr,
    ValidationInfo,
    model_validator,
)

from pagedserve.errors import RequestError


def _token_ids(given: Any, info: ValidationInfo) -> Any:
    """Check a list of token ids: integers, not true, 1.0 or "1"."""
    name = str(info.field_name)
    if not isinstance(given, list):
        _refuse(name, given, "a list of token ids")
    _check_token_ids(name, given)
    return given


def _prompts(given: Any, info: ValidationInfo) -> Any:
    """Check prompts in one of their four forms."""
    name = str(info.field_name)
    if isinstance(given, str):
        return given
    accepted = "a string, token ids, or a list of strings or of lists of token ids"
    if not isinstance(given, list):
        _refuse(name, given, accepted)
    if given and isinstance(given[0], list):
        for index, prompt in enumerate(given):
            if not isinstance(prompt, list):
                _refuse(f"{name}[{index}]", prompt, "a list of token ids, as the first is")
            _check_token_ids(f"{name}[{index}]", prompt)
    elif given and isinstance(given[0], str):
        if {*map(type, given)} != {str}:
            index = next(i for i, prompt in enumerate(given) if not isinstance(prompt, str))
            _refuse(f"{name}[{index}]", given[index], "a string, as the first is")
    elif given and (isinstance(given[0], bool) or not isinstance(given[0], int)):
        _refuse(f"{name}[0]", given[0], "a string, a token id or a list of token ids")
    else:
        _check_token_ids(name, given)
    return given


def _check_token_ids(name: str, given: Any) -> None:
    if {*map(type, given)} - {int}:
        index = next(i for i, token in enumerate(given) if type(token) is not int)
        _refuse(f"{name}[{index}]", given[index], "a token id, which is an integer")


def _messages(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Check that each message has a role, and content, which an assistant's may lack.

    Missing content of a tool's message becomes an empty string, which clients in Go leave out.
    """
    for index, message in enumerate(given):
        if message.get("role") == "tool" and message.get("content") is None:
            message["content"] = ""
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            _refuse(f"messages[{index}].role", role, "a string such as user or assistant")
        if isinstance(content, list):
            _check_texts(f"messages[{index}].content", content)
        elif not isinstance(content, str) and not (content is None and role == "assistant"):
            _refuse(f"messages[{index}].content", content, "a string or a list of parts")
    return given


def _check_texts(name: str, parts: list[Any]) -> None:
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("text", "refusal") and not isinstance(part.get(kind), str):
            _refuse(f"{name}[{index}].{kind}", part.get(kind), "a string")


def check_conversation(messages: list[dict[str, Any]]) -> None:
    """Refuse a conversation without a message, or with the predecessors of tool calls.

    Raises:
        RequestError: Names the field of the first such message.
    """
    if not messages:
        raise RequestError("messages is empty; it must have at least one message", param="messages")
    for index, message in enumerate(messages):
        if (call := message.get("function_call")) is not None:
            _refuse(f"messages[{index}].function_call", call, "left out: calls are in tool_calls")
        if message["role"] == "function":
            _refuse(f"messages[{index}].role", "function", "tool, with the tool_call_id of a call")


def _refuse(name: str, given: Any, accepted: str) -> NoReturn:
    shown = "missing" if given is None else reprlib.repr(given)
    field = name.partition("[")[0]
    raise RequestError(f"{name} is {shown}; it must be {accepted}", param=field)


_PromptForms: TypeAlias = str | list[str] | list[int] | list[list[int]]
TokenIds: TypeAlias = Annotated[
    list[int], PlainValidator(_token_ids, json_schema_input_type=list[int])
]
Prompts: TypeAlias = Annotated[
    _PromptForms, PlainValidator(_prompts, json_schema_input_type=_PromptForms)
]
Metadata: TypeAlias = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]
Messages: TypeAlias = Annotated[list[dict[str, Any]], AfterValidator(_messages)]


class NullsLeftOut(BaseModel):
    """A body, or an object in one: null is the same as a missing field, and numbers are finite.

    Where unknown fields are forbidden, they are left out too if the context of the validation is
    true.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _leave_nulls_out(cls, given: Any, info: ValidationInfo) -> Any:
        if not isinstance(given, dict):
            return given
        leaves_unknown_out = info.context and cls.model_config.get("extra") == "forbid"
        known = {*cls._names()} if leaves_unknown_out else given
        return {name: value for name, value in given.items() if value is not None and name in known}

    @classmethod
    def _names(cls) -> Iterator[object]:
        """Names of the fields in JSON."""
        for name, field in cls.model_fields.items():
            alias = field.validation_alias
            yield from alias.choices if isinstance(alias, AliasChoices) else (alias or name,)


class SizedBody(NullsLeftOut):
    """A body that stores its size.

    Attributes:
        may_have_images: Whether its strings may be images, which are longer than any text.
        may_drop_turns: Whether its conversation may have more characters than are rendered.
    """

    may_have_images: ClassVar[bool] = False
    may_drop_turns: ClassVar[bool] = False
    _num_bytes: int = PrivateAttr(default=0)

    @property
    def num_bytes(self) -> int:
        """Bytes of the JSON."""
        return self._num_bytes

    def arrived_with(self, num_bytes: int) -> None:
        """Store its size."""
        self._num_bytes = num_bytes


class StreamOptions(NullsLeftOut):
    """Options of a stream's usage."""

    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False
    continuous_usage_stats: bool = False


class OllamaOptions(NullsLeftOut):
    """Ollama's options in a request of OpenAI's API, as goose and Twinny send them.

    Others have no effect.
    """

    model_config = ConfigDict(extra="ignore")

    num_predict: int | None = Field(
        default=None, ge=-2, le=2**31 - 1, description="-2, -1 and 0 set no limit."
    )


class JsonSchema(NullsLeftOut):
    """A JSON schema in OpenAI's format; enforced whether or not strict is set.

    With strict its objects are closed, unless an option of the server says otherwise.
    """

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(NullsLeftOut):
    """Format of the response's text."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | bool | None = Field(
        default=None, alias="schema", description="Schema of a json_object, as llama.cpp has it."
    )

    @property
    def is_strict(self) -> bool:
        """Whether it is a schema with ``strict``."""
        schema = self.json_schema if self.type == "json_schema" else None
        return schema is not None and schema.strict is True


class PredictedText(NullsLeftOut):
    """A part of a predicted output."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str


class PredictedContent(NullsLeftOut):
    """A predicted output in OpenAI's format."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["content"]
    content: str | list[PredictedText]

    @property
    def text(self) -> str:
        """Its whole text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)
