"""Output of a response: its items, and the events of a stream that build them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

from pagedserve.server.responses.items import new_id, opaque

# Type of an event, and its fields besides the type and the sequence number.
Event: TypeAlias = tuple[str, dict[str, Any]]


class _PartForm(NamedTuple):
    """The part of an item that has its text.

    Attributes:
        kind: Its type.
        event: Prefix of the events of the part, not of its text.
        field: Field of the item with a list of it.
        index_name: Name of its index in that list.
    """

    kind: str
    event: str = "response.content_part"
    field: str = "content"
    index_name: str = "content_index"


class _Form(NamedTuple):
    """How an item's text is sent.

    Attributes:
        event: Prefix of its events.
        part: The part with the text; None for a text that is a field of the item.
        text: Name of the text in the last event and in the part or the item.
    """

    event: str
    part: _PartForm | None = None
    text: str = "text"


_FORMS: Final = {
    "message": _Form("response.output_text", _PartForm("output_text")),
    "reasoning": _Form("response.reasoning_text", _PartForm("reasoning_text")),
    "function_call": _Form("response.function_call_arguments", text="arguments"),
    "custom_tool_call": _Form("response.custom_tool_call_input", text="input"),
}
# The form of reasoning where a summary is requested: many clients show nothing else.
_SUMMARY: Final = _Form(
    "response.reasoning_summary_text",
    _PartForm("summary_text", "response.reasoning_summary_part", "summary", "summary_index"),
)


@dataclass(slots=True)
class Output:
    """Items of a response; the last one is open while its text grows.

    Attributes:
        names_of_calls: Fields of calls of tools in namespaces, by the name that the model writes.
        summarizes: Whether reasoning is sent as its summary, whole.
        has_opaque: Whether reasoning is sent once more, in ``encrypted_content``.
        items: Items as in the response.
    """

    names_of_calls: Mapping[str, Mapping[str, str]]
    summarizes: bool = False
    has_opaque: bool = False
    items: list[dict[str, Any]] = field(default_factory=list)
    _text: list[str] = field(default_factory=list)
    _logprobs: list[dict[str, Any]] = field(default_factory=list)
    _is_open: bool = False

    def feed(
        self, fields: Mapping[str, Any], logprobs: Sequence[dict[str, Any]] = ()
    ) -> list[Event]:
        """Add what is new.

        Args:
            fields: Fields of a chat's delta: ``reasoning``, ``content`` and ``tool_calls``.
            logprobs: Log-probabilities of the tokens of the content.

        Returns:
            Events for it, in order.
        """
        events: list[Event] = []
        if reasoning := fields.get("reasoning"):
            events += self._begin("reasoning", {"summary": [], "content": []})
            events += self._add(reasoning)
        content = fields.get("content") or ""
        if content or logprobs:
            events += self._begin("message", {"role": "assistant"})
            events += self._add(content, logprobs)
        for call in fields.get("tool_calls") or ():
            events += self._call(call)
        return events

    def _call(self, call: Mapping[str, Any]) -> list[Event]:
        """Add a call of a chat's delta, or what continues the last one."""
        events: list[Event] = []
        kind = "custom_tool_call" if "custom" in call else "function_call"
        given = call["custom"] if "custom" in call else call["function"]
        if "id" in call:
            events += self.close("completed")
            names = self.names_of_calls.get(given["name"], {"name": given["name"]})
            events += self._begin(kind, {"call_id": call["id"], **names})
        return events + self._add(given[self._form.text])

    def end(self, status: str) -> list[Event]:
        """End the output; a response without any item has an empty message.

        Args:
            status: Status of the last item: completed or incomplete.
        """
        opening = [] if self.items else self._begin("message", {"role": "assistant"})
        return opening + self.close(status)

    def close(self, status: str) -> list[Event]:
        """End the open item, if there is one.

        Args:
            status: Its status: completed or incomplete.
        """
        if not self._is_open:
            return []
        item, form = self.items[-1], self._form
        item |= self._content()
        text = "".join(self._text)
        more = {"logprobs": self._logprobs} if item["type"] == "message" else {}
        self._text, self._logprobs, self._is_open = [], [], False
        events: list[Event] = [(f"{form.event}.done", {**self._place(), form.text: text, **more})]
        if form.part is not None:
            (part,) = item[form.part.field]
            events.append((f"{form.part.event}.done", {**self._place(), "part": part}))
        item["status"] = status
        done = {"output_index": self._index, "item": dict(item)}
        return [*events, ("response.output_item.done", done)]

    @property
    def reasoning(self) -> str:
        """Text of all reasoning that has ended."""
        thoughts = (item for item in self.items if item["type"] == "reasoning")
        return "".join(
            part["text"] for item in thoughts for part in (*item["content"], *item["summary"])
        )

    def shown(self) -> list[dict[str, Any]]:
        """Items as they are now, with the text of the open one."""
        items = [dict(item) for item in self.items]
        if self._is_open:
            items[-1] |= self._content()
        return items

    def _content(self) -> dict[str, Any]:
        """The field of the open item that has its text."""
        form, text = self._form, "".join(self._text)
        if form.part is None:
            return {form.text: text}
        is_opaque = self.has_opaque and self.items[-1]["type"] == "reasoning"
        more = {"encrypted_content": opaque(text)} if is_opaque else {}
        return {form.part.field: [_part(form.part.kind, text, self._logprobs)], **more}

    def _begin(self, kind: str, fields: dict[str, Any]) -> list[Event]:
        """Open an item, unless one of its type is open."""
        if self._is_open and self.items[-1]["type"] == kind:
            return []
        events = self.close("completed")
        item: dict[str, Any] = {"id": new_id(kind), "type": kind, "status": "in_progress", **fields}
        self.items.append(item)
        form = self._form
        if form.part is None:
            item[form.text] = ""
        else:
            item[form.part.field] = []
        self._is_open = True
        added = {"output_index": self._index, "item": dict(self.items[-1])}
        events.append(("response.output_item.added", added))
        if form.part is not None:
            part = _part(form.part.kind, "", [])
            events.append((f"{form.part.event}.added", {**self._place(), "part": part}))
        return events

    def _add(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        """Add text to the open item."""
        if not (text or logprobs):
            return []
        self._text.append(text)
        self._logprobs += logprobs
        more = {"logprobs": list(logprobs)} if self.items[-1]["type"] == "message" else {}
        return [(f"{self._form.event}.delta", {**self._place(), "delta": text, **more})]

    @property
    def _form(self) -> _Form:
        """Form of the last item."""
        kind = self.items[-1]["type"]
        return _SUMMARY if kind == "reasoning" and self.summarizes else _FORMS[kind]

    @property
    def _index(self) -> int:
        return len(self.items) - 1

    def _place(self) -> dict[str, Any]:
        """Fields that name the open item, and its part."""
        place = {"item_id": self.items[-1]["id"], "output_index": self._index}
        part = self._form.part
        return place if part is None else {**place, part.index_name: 0}


def _part(kind: str, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    more = {"annotations": [], "logprobs": logprobs} if kind == "output_text" else {}
    return {"type": kind, "text": text, **more}
