"""Objects within the bodies of requests."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class NullsLeftOut(BaseModel):
    """A body in which null says nothing."""

    @model_validator(mode="before")
    @classmethod
    def _leave_nulls_out(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}


class StreamOptions(NullsLeftOut):
    """What a stream says of tokens used."""

    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(NullsLeftOut):
    """A schema as OpenAI's clients send it; the answer keeps to it, strict or not."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(NullsLeftOut):
    """What the text of an answer must be."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Function(NullsLeftOut):
    """What a model may call."""

    model_config = ConfigDict(extra="ignore")

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(NullsLeftOut):
    """A tool; all of them are functions."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function"] = "function"
    function: Function


class FunctionName(BaseModel):
    """The function that must be called."""

    model_config = ConfigDict(extra="forbid")

    name: str


class NamedToolChoice(NullsLeftOut):
    """That one tool must be called."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function"] = "function"
    function: FunctionName
