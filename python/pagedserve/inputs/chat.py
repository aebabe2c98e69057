"""Conversations, rendered to prompts by a model's chat template."""

import inspect
import json
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeAlias

from pagedserve.errors import ConfigError, RequestError, extra_needed, reason
from pagedserve.inputs.images import TEXT_ALONE, ImageRules, images_of_parts
from pagedserve.inputs.prompts import TokensPrompt, check_unicode
from pagedserve.tokenizer import Tokenizer

Message: TypeAlias = Mapping[str, Any]
Conversation: TypeAlias = Sequence[Message]

# Types of content parts that are an image.
_IMAGES: Final = ("image_url", "image", "image_pil")
# Arguments of the renderer that it passes to the template unchanged.
_VARIABLES: Final = frozenset({"documents"})
# Names that it passes to the template itself.
_GIVEN: Final = frozenset({"messages", "self"})
# Values that are no tool call; openai's objects come in a list or an iterator.
_NO_CALLS: Final = (type(None), int, float, Sequence)


def conversations_of(messages: Any) -> list[Conversation]:
    """Return one conversation, or a list of them, as a list.

    Raises:
        RequestError: The value is neither.
    """
    accepted = 'a list of messages like {"role": "user", "content": "..."}, or a list of such lists'
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError(f"messages is {messages!r}; it must be {accepted}")
    conversations: Any = [messages] if isinstance(messages[0], Mapping) else messages
    for conversation in conversations:
        is_list = isinstance(conversation, Sequence) and not isinstance(conversation, str)
        if not is_list or not conversation or not all(map(_is_message, conversation)):
            raise RequestError(f"messages has {conversation!r}; it must be {accepted}")
    return list(conversations)


def read_chat_template(given: str | Path | None) -> str | None:
    """Read the template of an option: a file's content, or the option itself if it has a brace.

    Raises:
        ConfigError: The file cannot be read.
    """
    if given is None or (isinstance(given, str) and "{" in given):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"chat_template: cannot read {given}: {reason(error)}") from error


def chat_prompt(
    tokenizer: Tokenizer,
    conversation: Conversation,
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    images: ImageRules | str = TEXT_ALONE,
    keeps_parts: bool = False,
) -> TokensPrompt:
    """Render a conversation to the prompt of a model.

    Args:
        tokenizer: Tokenizer of the model.
        conversation: Messages with "role" and "content", which is text or a list of parts
            ``{"type": "text", "text": "..."}``, ``{"type": "image_url", "image_url": {"url":
            "data:image/png;base64,..."}}`` or ``{"type": "image", "image": ...}`` with a Pillow
            image; vLLM's name of ``image`` is ``image_pil``.
        chat_template: Template to use instead of the model's.
        add_generation_prompt: Append the prompt that starts the assistant's reply.
        continue_final_message: Leave the last message open, so that generation continues it.
        tools: Tool definitions passed to the template.
        chat_template_kwargs: Further variables of the template.
        images: Rules for images in prompts, or the reason why they are refused.
        keeps_parts: Pass contents to the template as lists of parts; False does so with images, for
            a template that iterates over them.

    Raises:
        RequestError: No chat template, an unsupported content part, or messages that the template
            does not accept.
    """
    if chat_template is None and not tokenizer.chat_template:
        raise RequestError("the model's tokenizer has no chat template: give chat_template")
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "add_generation_prompt and continue_final_message are both True: a last message that "
            "is continued is followed by no other; give add_generation_prompt=False"
        )
    render = _renderer(tokenizer, chat_template, chat_template_kwargs or {})
    conversation = _with_known_roles(conversation, chat_template or tokenizer.chat_template)
    found = [part for message in conversation for part in _images_of(message)]
    _check_images(found, images)
    takes_parts = keeps_parts or (isinstance(images, ImageRules) and _takes_parts(render))
    token = images.token if isinstance(images, ImageRules) else ""
    try:
        messages = [_rendered(message, token, takes_parts=takes_parts) for message in conversation]
        text = render(
            _with_late_system(messages, render),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=None if tools is None else [dict(tool) for tool in tools],
        )
    except (RequestError, ImportError):
        raise
    except Exception as error:  # templates may raise any exception
        raise RequestError(f"the chat template does not take the messages: {error}") from error
    check_unicode(str(text), "the conversation")
    # The template has already added the special tokens.
    token_ids = tokenizer(str(text), add_special_tokens=False, verbose=False).input_ids
    prompt: TokensPrompt = {"prompt": str(text), "prompt_token_ids": token_ids}
    if found:
        prompt["multi_modal_data"] = {"image": images_of_parts(found)}
    return prompt


def _renderer(
    tokenizer: Tokenizer, template: str | None, variables: Mapping[str, Any]
) -> Callable[..., Any]:
    """Renderer of a template, or of the model's, within limits."""
    with extra_needed("a chat template", "cpu"):
        from pagedserve.inputs.templates import bounded

    check_variables(tokenizer, variables)
    render = tokenizer.apply_chat_template
    return bounded(partial(render, chat_template=template, tokenize=False, **variables))


def _with_known_roles(conversation: Conversation, template: object) -> Conversation:
    """Make developer messages system messages, as OpenAI's are, unless a template names the role.

    Most templates raise for a role that they do not know, or drop its text.
    """
    if "developer" in str(template):
        return conversation
    return [
        {**message, "role": "system"} if message.get("role") == "developer" else message
        for message in conversation
    ]


def check_variables(
    tokenizer: Tokenizer, given: Mapping[str, Any], name: str = "chat_template_kwargs"
) -> None:
    """Refuse arguments that would reach the renderer instead of the template.

    Args:
        tokenizer: Tokenizer of the model.
        given: Variables of the template.
        name: Name of the parameter that has them.

    Raises:
        RequestError: One of them is an argument of the renderer.
    """
    parameters = inspect.signature(tokenizer.apply_chat_template).parameters.values()
    own = {each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD}
    for variable in given:
        if variable in (own | _GIVEN) - _VARIABLES:
            raise RequestError(
                f"{name} has {variable}, which is no variable of a template", param=name
            )


def _is_message(message: object) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str)


def _check_images(parts: Sequence[Message], images: ImageRules | str) -> None:
    """Refuse unsupported or too many images before they are decoded.

    Raises:
        RequestError: The model does not accept images, or there are too many.
    """
    if parts and isinstance(images, str):
        kind = parts[0]["type"]
        raise RequestError(f"a message has a part of type {kind!r}; {images}", param="messages")
    if isinstance(images, ImageRules):
        images.check(len(parts), "the conversation")


def _takes_parts(render: Callable[..., Any]) -> bool:
    """Whether a template iterates over content parts; others would print a list as text."""
    text = _probed(render, [{"role": "user", "content": [{"type": "text", "text": "probe"}]}])
    return "probe" in text and "'type'" not in text


def _probed(render: Callable[..., Any], messages: Conversation) -> str:
    """Render messages that show how a template works; empty if it raises."""
    try:
        return str(render(messages))
    except Exception:  # noqa: BLE001  # templates may raise any exception
        return ""


def _with_late_system(messages: Conversation, render: Callable[..., Any]) -> Conversation:
    """Join system messages after the start to others, unless the template shows them there.

    The text before such a message stays a cached prefix: the message joins the one before it.  It
    is the user's after a message of the assistant, and a message of the user that follows joins it,
    since templates may require that roles alternate.

    Args:
        messages: Messages with contents as the template expects them.
        render: Renderer of the template.
    """
    late = [message for message in messages[1:] if message.get("role") == "system"]
    if not late or _shows_late_system(render, late[0]):
        return messages
    joined: list[Message] = [messages[0]]
    for before, message in pairwise(messages):
        last, is_system = joined[-1], message.get("role") == "system"
        follows = before.get("role") == "system" and last["role"] == message["role"] == "user"
        if follows or (is_system and last["role"] != "assistant"):
            joined[-1] = {**last, "content": _joined(last["content"], message["content"])}
        else:
            joined.append({**message, "role": "user"} if is_system else message)
    return joined


def _shows_late_system(render: Callable[..., Any], like: Message) -> bool:
    """Whether a template shows a system message after the start; others refuse or omit it."""
    is_text = isinstance(like["content"], str)
    probes = [
        {"role": role, "content": text if is_text else [{"type": "text", "text": text}]}
        for role, text in (("user", "a"), ("assistant", "b"), ("system", "probe"), ("user", "c"))
    ]
    return "probe" in _probed(render, probes)


def _joined(first: Any, second: Any) -> Any:
    """Join two contents, both texts or both lists of parts.

    Adjacent texts become one: of a system message some templates show only the first part.
    """
    if isinstance(first, str):
        return f"{first}\n\n{second}"
    if not first or not second or "text" not in first[-1] or "text" not in second[0]:
        return [*first, *second]
    text = _joined(first[-1]["text"], second[0]["text"])
    return [*first[:-1], {"type": "text", "text": text}, *second[1:]]


def _rendered(message: Message, token: str, *, takes_parts: bool) -> dict[str, Any]:
    """Convert a message for the template; ``token`` replaces each image in a text."""
    message = _with_calls(message)
    parts = _parts_of(_content_of(message))
    if not takes_parts:
        texts = (token if _is_image(part) else _text_of(part) for part in parts)
        return {**message, "content": "\n".join(texts)}
    content = [
        {"type": "image"} if _is_image(part) else {"type": "text", "text": _text_of(part)}
        for part in parts
    ]
    return {**message, "content": content}


def _with_calls(message: Message) -> Message:
    """Convert the tool calls of a message for a template; drop the field if there are none.

    Many templates check only whether the field exists, and then omit the text.

    Raises:
        RequestError: The field is not a list of objects.
    """
    if "tool_calls" not in message:
        return message
    calls = message["tool_calls"]
    is_list = isinstance(calls, Iterable) and not isinstance(calls, str | bytes | Mapping)
    listed = list(calls) if is_list else []
    if calls is None or (is_list and not listed):
        return {name: value for name, value in message.items() if name != "tool_calls"}
    if not is_list or any(isinstance(call, _NO_CALLS) for call in listed):
        raise RequestError(
            f"tool_calls of a message is {calls!r:.80}; it must be a list of objects like "
            '{"id": "...", "type": "function", "function": {...}}',
            param="messages",
        )
    return {**message, "tool_calls": [_with_object(call) for call in listed]}


def _with_object(call: Any) -> Any:
    """Parse the arguments of an earlier tool call from text to an object, as templates expect."""
    if not isinstance(call, Mapping):  # an object of a client library
        return call
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def text_of_content(content: object) -> str:
    """Return the text of a message's content, joining its parts; None becomes empty.

    Raises:
        RequestError: A part is neither text nor an image, or its text is no string.
    """
    return "\n".join(_text_of(part) for part in _parts_of(content) if not _is_image(part))


def _content_of(message: Message) -> object:
    """Content of a message; a refusal of the assistant is in a separate field."""
    content = message.get("content")
    return message.get("refusal") if content is None else content


def _images_of(message: Message) -> list[Message]:
    return [part for part in _parts_of(message.get("content")) if _is_image(part)]


def _parts_of(content: object) -> Sequence[Any]:
    if content is None:
        return ()
    if isinstance(content, str) or not isinstance(content, Sequence):
        return (str(content),)
    return content


def _is_image(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _IMAGES


def _text_of(part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    name = "refusal" if kind == "refusal" else "text"  # a refusal of the assistant is its text
    if not isinstance(part, Mapping) or kind not in ("text", "refusal", None):
        raise RequestError(
            f"a message has a part of type {kind!r}; accepted are text and image_url",
            param="messages",
        )
    text = part.get(name)
    if not isinstance(text, str):
        raise RequestError(
            f"a message has a part whose {name} is {reprlib.repr(text)}; it must be a string",
            param="messages",
        )
    return text
