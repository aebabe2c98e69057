"""Chat templates, rendered as transformers renders them, without transformers.

The sandbox and its limits are those of `pagedserve.inputs.templates`.

Invariants:

1. A template sees what it sees in transformers: the same variables, filters and functions, and
   plain JSON values alone, since methods of other objects are not safe in a sandbox.  The name
   ``reasoning`` of a message is the exception: transformers adds the two others alone.
2. Messages of the caller are never changed.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

from pagedserve.inputs.templates import BoundedEnvironment

# Fields of a message that may hold its reasoning; each template reads one of them.
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
# Appended to the message that is continued, to find where it ends in the rendering.
_END_TAG: Final = "CONTINUE_FINAL_MESSAGE_TAG "


def render_chat(
    template: str,
    conversation: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    documents: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    variables: Mapping[str, Any],
) -> str:
    """Render a conversation.

    Args:
        template: Chat template.
        conversation: Messages.
        tools: Tool definitions.
        documents: Documents.
        add_generation_prompt: Variable of the template that appends the start of a reply.
        continue_final_message: End the text after the content of the last message.
        variables: Further variables of the template.

    Raises:
        ValueError: No messages, or the last one cannot be continued.
        jinja2.TemplateError: An error of the template, or a limit is exceeded.
    """
    if not conversation:
        raise ValueError("the conversation has no messages")
    messages = [_plain_message(message) for message in conversation]
    content = _mark_end(messages[-1], template) if continue_final_message else ""
    text = _compiled(template).render(
        messages=messages,
        tools=_plain(tools),
        documents=_plain(documents),
        add_generation_prompt=add_generation_prompt,
        **_plain(variables),
    )
    return _cut_at_end(text, content) if continue_final_message else text


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a message to plain values; None counts as absent, reasoning has all its names."""
    plain = {name: _plain(value) for name, value in message.items() if value is not None}
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    if reasoning is not None:
        plain = dict.fromkeys(_REASONING, reasoning) | plain
    return plain


def _plain(value: Any) -> Any:
    """Convert a value to plain JSON values; the name of its type stands for any other value."""
    if value is None or type(value) in (str, int, float, bool):
        plain: Any = value
    elif isinstance(value, str | int | float):  # of a subclass, without its methods
        plain = next(convert(value) for kind, convert in _SCALARS if isinstance(value, kind))
    elif isinstance(value, Mapping):
        plain = {_plain(key): _plain(item) for key, item in value.items()}
    elif isinstance(value, list | tuple):
        plain = (list if isinstance(value, list) else tuple)(map(_plain, value))
    elif isinstance(value, np.generic):
        plain = _plain(value.item())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        plain = {field.name: _plain(getattr(value, field.name)) for field in fields}
    elif callable(getattr(value, "model_dump", None)):  # of pydantic
        plain = _plain(value.model_dump())
    else:
        plain = f"<{type(value).__name__}>"
    return plain


_SCALARS: Final[tuple[tuple[type, Callable[[Any], Any]], ...]] = (
    (str, str.__str__),
    (int, int.__int__),
    (float, float.__float__),
)


def _mark_end(message: dict[str, Any], template: str) -> str:
    """Append the tag to the content of a message; return the content without it.

    Raises:
        ValueError: There is no text to continue, or the template reads no content.
    """
    content = message.get("content")
    if content is None or "content" not in template:
        raise ValueError("the last message has no content to continue, or the template reads none")
    if not isinstance(content, list | tuple):
        message["content"] = content + _END_TAG
        return str(content)
    for part in reversed(content):
        if "text" in part:
            text = str(part["text"])
            part["text"] = text + _END_TAG
            return text
    raise ValueError("the last message has no text to continue")


def _cut_at_end(text: str, content: str) -> str:
    """Cut a rendering at the tag; and spaces before it, where the template has stripped the tag.

    Raises:
        ValueError: The template does not show the last message.
    """
    tag = _END_TAG.strip()
    if content.strip() not in text or tag not in text:
        raise ValueError("the template leaves out the last message, which cannot be continued")
    end = text.rindex(tag)
    return text[:end] if text[end:].startswith(_END_TAG) else text[:end].rstrip()


@functools.lru_cache
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@functools.cache
def _environment() -> jinja2.Environment:
    """The environment of templates: the sandbox, with the names that transformers defines."""
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


class _GenerationBlock(Extension):
    """``{% generation %}``, which marks the assistant's text for training: shows its body."""

    tags = {"generation"}  # noqa: RUF012  # jinja declares a set of the instance

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse a block; its variables are its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """``dict`` of templates, without the attributes of the class."""

    def __call__(self, *positional: Any, **named: Any) -> dict[Any, Any]:
        return dict(*positional, **named)

    def fromkeys(self, *positional: Any) -> dict[Any, Any]:
        """Create a dictionary whose keys have one value."""
        return dict.fromkeys(*positional)


class _Namespace(Namespace):
    """``namespace`` of templates, without names of the interpreter's internals."""

    def __init__(*positional: Any, **named: Any) -> None:  # "self" may be a name of a template
        self, *rest = positional
        attributes = dict(*rest, **named)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the attribute {name!r}: it begins with _")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005  # the date of this machine's user


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # templates may give it by position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write a value as JSON, unlike jinja's filter without HTML escapes or sorted keys."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
