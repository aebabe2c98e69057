"""Chats without the oldest turns, to fit the model's length."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from pagedserve.inputs import TokensPrompt
from pagedserve.server.chat.protocol import ChatBody
from pagedserve.server.http.bounds import check_texts, num_rendered
from pagedserve.server.tokenization import Tokenization


async def truncated_prompt(text: Tokenization, chat: ChatBody, num_new: int) -> TokensPrompt:
    """Render a chat without its oldest turns, as few of them as make it fit the model's length.

    System messages and the last turn are never dropped.

    Args:
        text: Renders chats.
        chat: The chat.
        num_new: Number of tokens to leave for the response.
    """
    most = text.max_model_len - num_new
    found = await text.chat_prompt(chat)
    if len(found["prompt_token_ids"]) <= most:
        return found
    # The last turn is kept where even it does not fit: a shorter response may.
    most_dropped = num_turns(chat.messages) - 1
    low, high = 1, most_dropped
    while low <= high:
        middle = (low + high) // 2
        kept = {"messages": without_turns(chat.messages, middle)}
        tried = await text.chat_prompt(chat.model_copy(update=kept))
        fits = len(tried["prompt_token_ids"]) <= most
        if fits or middle == most_dropped:
            found = tried
        low, high = (low, middle - 1) if fits else (middle + 1, high)
    return found


def messages_within(
    messages: list[dict[str, Any]],
    rest: Mapping[str, Any],
    max_num_chars: int,
    *,
    drops_turns: bool,
) -> list[dict[str, Any]]:
    """Messages of a chat that has few enough characters to render.

    Args:
        messages: All messages.
        rest: Other fields that the template gets.
        max_num_chars: Maximum characters.
        drops_turns: Leave out as few of the oldest turns as necessary; the last one is kept.

    Raises:
        RequestError: There are too many characters.
    """

    def fits(num_dropped: int) -> bool:
        kept = without_turns(messages, num_dropped)
        return num_rendered({**rest, "messages": kept}) <= max_num_chars

    if drops_turns:
        numbers = range(num_turns(messages) - 1)
        messages = without_turns(messages, bisect_left(numbers, True, key=fits))
    check_texts({**rest, "messages": messages}, max_num_chars)
    return messages


def num_turns(messages: Sequence[Mapping[str, Any]]) -> int:
    """Number of turns, each of which begins with a message of the user."""
    return sum(message["role"] == "user" for message in messages)


def without_turns(messages: list[dict[str, Any]], num_dropped: int) -> list[dict[str, Any]]:
    """Messages without the oldest turns; system messages are kept."""
    if not num_dropped:
        return messages
    starts = [place for place, message in enumerate(messages) if message["role"] == "user"]
    start = starts[num_dropped]
    head = [message for message in messages[:start] if message["role"] == "system"]
    return head + messages[start:]
