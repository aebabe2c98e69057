"""Conversations, put into the words of a model's chat template."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from transformers import PreTrainedTokenizerBase

from pagedserve.errors import ConfigError, RequestError
from pagedserve.inputs import TokensPrompt, check_unicode

Message: TypeAlias = Mapping[str, Any]
Conversation: TypeAlias = Sequence[Message]

# Arguments of the renderer that it hands to the template as they are.
_VARIABLES: Final = frozenset({"documents"})


def conversations_of(messages: Any) -> list[Conversation]:
    """One conversation, or a list of them, as a list.

    Raises:
        RequestError: Neither.
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


def read_chat_template(given: str | None) -> str | None:
    """A template that an option names: a file's, or the text itself, which has a brace.

    Raises:
        ConfigError: A file that cannot be read.
    """
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"chat_template: cannot read {given}: {error}") from error


def chat_prompt(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> TokensPrompt:
    """The prompt that a conversation is to a model.

    Args:
        tokenizer: The model's.
        conversation: Messages with "role" and "content", which is text or a list of parts
            ``{"type": "text", "text": "..."}``.
        chat_template: Instead of the model's own.
        add_generation_prompt: End with what begins the assistant's answer.
        continue_final_message: Leave the last message open, so that it is continued.
        tools: Handed to the template.
        chat_template_kwargs: What else the template takes.

    Raises:
        RequestError: No chat template, a part that is no text, or messages that the template does
            not accept.
    """
    if chat_template is None and not tokenizer.chat_template:
        raise RequestError("the model's tokenizer has no chat template: give chat_template")
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "add_generation_prompt and continue_final_message are both True: a last message that "
            "is continued is followed by no other; give add_generation_prompt=False"
        )
    _check_variables(tokenizer, chat_template_kwargs or {})
    try:
        text = tokenizer.apply_chat_template(
            [_with_text(message) for message in conversation],
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=None if tools is None else [dict(tool) for tool in tools],
            tokenize=False,
            **(chat_template_kwargs or {}),
        )
    except (RequestError, ImportError):
        raise
    except Exception as error:  # what a template raises is its author's choice
        raise RequestError(f"the chat template does not take the messages: {error}") from error
    check_unicode(str(text), "the conversation")
    # The template has written the special tokens down.
    token_ids = tokenizer(str(text), add_special_tokens=False, verbose=False).input_ids
    return {"prompt": str(text), "prompt_token_ids": token_ids}


def _check_variables(tokenizer: PreTrainedTokenizerBase, given: Mapping[str, Any]) -> None:
    """Refuse what would reach the renderer and not the template."""
    own = inspect.signature(tokenizer.apply_chat_template).parameters
    for name in given:
        if name in own and name not in _VARIABLES:
            raise RequestError(
                f"chat_template_kwargs has {name}, which is no variable of a template",
                param="chat_template_kwargs",
            )


def _is_message(message: object) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str)


def _with_text(message: Message) -> dict[str, Any]:
    return {**message, "content": text_of_content(message.get("content"))}


def text_of_content(content: object) -> str:
    """The text of a message's content, which may come in parts; none is empty.

    Raises:
        RequestError: A part that is no text.
    """
    if content is None:
        return ""
    if isinstance(content, str) or not isinstance(content, Sequence):
        return str(content)
    return "\n".join(_text_of(part) for part in content)


def _text_of(part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind not in ("text", None) or "text" not in part:
        raise RequestError(
            f"a message has a part of type {kind!r}; models take text alone", param="messages"
        )
    return str(part["text"] or "")
