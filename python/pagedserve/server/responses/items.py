"""Items of a conversation in the Responses API, and their messages for the chat template."""

import base64
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import ConfigDict, Discriminator, Field, Tag, TypeAdapter

from pagedserve.errors import RequestError
from pagedserve.server.fields import NullsLeftOut
from pagedserve.server.http.bounds import MAX_ID_CHARS
from pagedserve.server.responses.tools import Tool, name_of, shown_name
from pagedserve.server.tools.cut_arguments import completed

# Parts of a message: as in a chat's messages.
_MAX_PARTS: Final = 1024
# Start of the text of reasoning where clients keep what another server has encrypted.
_OPAQUE: Final = "base64:"


class _Item(NullsLeftOut):
    """An item or a part; fields that its kind does not need are ignored."""

    model_config = ConfigDict(extra="ignore")


class _Text(_Item):
    """Part of a message that is text."""

    text: str

    def for_chat(self) -> dict[str, Any]:
        """Content part of a chat's message."""
        return {"type": "text", "text": self.text}


class TextPart(_Text):
    """Text of a message to the model."""

    type: Literal["input_text"]


class OutputTextPart(_Text):
    """Text of a message of the model."""

    type: Literal["output_text"]
    annotations: list[Any] = Field(default_factory=list)


class RefusalPart(_Item):
    """Refusal of an assistant, which is text to the model."""

    type: Literal["refusal"]
    refusal: str

    def for_chat(self) -> dict[str, Any]:
        """Content part of a chat's message."""
        return {"type": "text", "text": self.refusal}


class ImagePart(_Item):
    """Image of a message."""

    type: Literal["input_image"]
    image_url: str
    detail: Literal["low", "high", "auto", "original"] = "auto"

    def for_chat(self) -> dict[str, Any]:
        """Content part of a chat's message."""
        return {"type": "image_url", "image_url": {"url": self.image_url, "detail": self.detail}}


Part: TypeAlias = Annotated[
    TextPart | OutputTextPart | RefusalPart | ImagePart, Field(discriminator="type")
]
Parts: TypeAlias = Annotated[list[Part], Field(max_length=_MAX_PARTS)]


def _form_of_content(given: Any) -> str:
    return "text" if isinstance(given, str) else "parts"


Content: TypeAlias = Annotated[
    Annotated[str, Tag("text")] | Annotated[Parts, Tag("parts")], Discriminator(_form_of_content)
]
_Id: TypeAlias = Annotated[str, Field(max_length=MAX_ID_CHARS)]
_Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class MessageItem(_Item):
    """Message of any role."""

    id: _Id | None = None
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    status: _Status | None = None


class _CallItem(_Item):
    """Earlier call of a tool."""

    id: _Id | None = None
    call_id: _Id
    name: str  # the model may have made it up
    namespace: str | None = None
    status: _Status | None = None


class FunctionCallItem(_CallItem):
    """Earlier call of a function."""

    type: Literal["function_call"]
    arguments: str


class CustomCallItem(_CallItem):
    """Earlier call of a custom tool."""

    type: Literal["custom_tool_call"]
    input: str


class CallOutputItem(_Item):
    """Result of a call."""

    id: _Id | None = None
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: _Id
    output: Content
    status: _Status | None = None


class ReasoningText(_Item):
    """Text of a reasoning item, or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(_Item):
    """Earlier reasoning of the model."""

    id: _Id | None = None
    type: Literal["reasoning"]
    summary: list[ReasoningText] = Field(default_factory=list)
    content: list[ReasoningText] = Field(default_factory=list)
    encrypted_content: str | None = None
    status: _Status | None = None

    @property
    def text(self) -> str:
        """Its content, else its summary, else what a client cannot read of it."""
        if parts := self.content or self.summary:
            return "".join(part.text for part in parts)
        return _read_opaque(self.encrypted_content or "")


class AdditionalToolsItem(_Item):
    """Tools beside those of the request."""

    id: _Id | None = None
    type: Literal["additional_tools"]
    tools: list[Tool]
    status: _Status | None = None


class ItemReference(_Item):
    """Reference to an item of a stored response."""

    id: _Id
    type: Literal["item_reference"] = "item_reference"


def item_type(given: Any) -> str | None:
    """The ``type`` of an item, which a message and a reference may lack; None if no string."""
    found = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    if found is None:
        is_reference = isinstance(given, dict) and "id" in given and given.keys() <= {"id", "type"}
        return "item_reference" if is_reference else "message"
    return found if isinstance(found, str) else None


def _form_of_input(given: Any) -> str:
    return "text" if isinstance(given, str) else "items"


_MessageKinds: TypeAlias = (
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[CallOutputItem, Tag("custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
)
_Kinds: TypeAlias = _MessageKinds | Annotated[AdditionalToolsItem, Tag("additional_tools")]
Item: TypeAlias = Annotated[_Kinds, Discriminator(item_type)]
InputItem: TypeAlias = Annotated[
    _Kinds | Annotated[ItemReference, Tag("item_reference")], Discriminator(item_type)
]
Input: TypeAlias = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[InputItem], Tag("items")],
    Discriminator(_form_of_input),
]
ITEMS: Final[TypeAdapter[list[Item]]] = TypeAdapter(list[Item])

_ID_PREFIXES: Final = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "additional_tools": "at",
}


def new_id(kind: str) -> str:
    """Create the id of an item of a type."""
    return f"{_ID_PREFIXES[kind]}_{uuid.uuid4().hex}"


def references_of(given: str | Sequence[InputItem]) -> list[str]:
    """Return the ids of the items that the input of a request refers to.

    Raises:
        RequestError: It refers to an item twice, which a few bytes could multiply.
    """
    if isinstance(given, str):
        return []
    found = [item.id for item in given if isinstance(item, ItemReference)]
    for item_id, number in Counter(found).items():
        if number > 1:
            raise RequestError(
                f"input refers to item {item_id!r:.300} {number} times; once is accepted",
                param="input",
            )
    return found


def items_of(given: str | Sequence[InputItem], stored: Mapping[str, Item]) -> list[Item]:
    """Return the input of a request as items in their full form, each with an id.

    Args:
        given: The input; "" has no items.
        stored: Items that it refers to, by their ids.
    """
    if isinstance(given, str):
        given = [MessageItem(role="user", content=given)] if given else []
    return [
        _in_full(stored[item.id] if isinstance(item, ItemReference) else item) for item in given
    ]


def _in_full(item: Item) -> Item:
    changes: dict[str, Any] = {
        "id": item.id or new_id(item.type),
        "status": item.status or "completed",
    }
    if isinstance(item, MessageItem) and isinstance(item.content, str):
        is_output = item.role == "assistant"
        changes["content"] = [
            OutputTextPart(type="output_text", text=item.content)
            if is_output
            else TextPart(type="input_text", text=item.content)
        ]
    return item.model_copy(update=changes)


def messages_of(instructions: str | None, items: Iterable[Item]) -> list[dict[str, Any]]:
    """Convert items to messages for the chat template.

    A turn of the assistant, its reasoning, text and calls, is one message.  Instructions and the
    system messages that follow them are one too: many templates accept a single one, at the start.

    Args:
        instructions: System message before the items.
        items: Items, oldest first.

    Raises:
        RequestError: The output of a call that is not among the items.
    """
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    calls: set[tuple[str, str]] = set()
    for item in items:
        if isinstance(item, AdditionalToolsItem):
            continue
        if isinstance(item, FunctionCallItem | CustomCallItem):
            calls.add((item.type, item.call_id))
        if isinstance(item, CallOutputItem):
            _check_call(item, calls)
        _append(messages, _message_of(item))
    return messages


def tools_of(items: Iterable[Item]) -> list[Tool]:
    """Return the tools that items add; a later one replaces an earlier one of its name."""
    added = [tool for item in items if isinstance(item, AdditionalToolsItem) for tool in item.tools]
    return list({name_of(tool): tool for tool in added}.values())


def _message_of(item: _MessageKinds) -> dict[str, Any]:
    if isinstance(item, MessageItem):
        role = "system" if item.role == "developer" else item.role
        return {"role": role, "content": _content(item.content)}
    if isinstance(item, CallOutputItem):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)}
    if isinstance(item, FunctionCallItem):
        return _message_of_call(item, "function", {"arguments": completed(item.arguments)})
    if isinstance(item, CustomCallItem):
        return _message_of_call(item, "custom", {"input": item.input})
    return {"role": "assistant", "content": "", "reasoning": item.text}


def opaque(text: str) -> str:
    """Text of reasoning for clients that send nothing back but what they cannot read."""
    return _OPAQUE + base64.b64encode(text.encode()).decode()


def _read_opaque(given: str) -> str:
    """The text of `opaque`; empty for what another server made."""
    if not given.startswith(_OPAQUE):
        return ""
    try:
        return base64.b64decode(given.removeprefix(_OPAQUE), validate=True).decode()
    except ValueError:
        return ""


def _message_of_call(
    item: FunctionCallItem | CustomCallItem, kind: str, text: dict[str, str]
) -> dict[str, Any]:
    name = shown_name(item.namespace, item.name)
    call = {"id": item.call_id, "type": kind, kind: {"name": name, **text}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _check_call(item: CallOutputItem, calls: Collection[tuple[str, str]]) -> None:
    kind = item.type.removesuffix("_output")
    if (kind, item.call_id) not in calls:
        raise RequestError(
            f"input has an output of call_id {item.call_id!r:.80}, and no {kind} of it",
            param="input",
        )


def _content(given: str | Sequence[Part]) -> str | list[dict[str, Any]]:
    """Content of a message: a string if it has no image."""
    if isinstance(given, str):
        return given
    if any(isinstance(part, ImagePart) for part in given):
        return [part.for_chat() for part in given]
    return "\n".join(part.for_chat()["text"] for part in given)


def _append(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Append a message, to the last one where both are of one turn."""
    last = messages[-1] if messages else None
    is_one_turn = last is not None and last["role"] == message["role"] == "assistant"
    is_start = len(messages) == 1 and messages[0]["role"] == message["role"] == "system"
    texts = last is not None and isinstance(last["content"], str)
    if last is None or not (is_one_turn or is_start) or not texts:
        messages.append(message)
        return
    if not isinstance(message["content"], str) or (is_one_turn and _begins_turn(last, message)):
        messages.append(message)
        return
    last["content"] = "\n\n".join(filter(None, (last["content"], message["content"])))
    if "tool_calls" in message:
        last["tool_calls"] = last.get("tool_calls", []) + message["tool_calls"]
    if "reasoning" in message:
        last["reasoning"] = last.get("reasoning", "") + message["reasoning"]


def _begins_turn(last: dict[str, Any], message: dict[str, Any]) -> bool:
    """Whether reasoning, which comes first in a turn, follows an assistant's text or calls."""
    return "reasoning" in message and bool(last["content"] or "tool_calls" in last)
