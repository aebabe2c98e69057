"""The two endpoints of OpenAI's interface that generate text: what is sent, what a chunk means."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from pagedserve.errors import ConfigError

Json: TypeAlias = dict[str, Any]

# A text, token ids (an array of numbers takes least memory), or the messages of a conversation.
Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one event of a stream says.

    Attributes:
        has_choice: Whether it belongs to the answer; what comes behind, like the usage, does not.
        is_output: Whether it is a piece of the answer: one token, or several.  Not the announcement
            of a role, nor an end without text.  A token whose text is held back is one.
        finish_reason: Of the answer's last chunk.
        num_prompt_tokens: By the server's count; None where it does not say.
        num_completion_tokens: Likewise.
        error: What went wrong, where the event is an error.
    """

    has_choice: bool = False
    is_output: bool = False
    finish_reason: str | None = None
    num_prompt_tokens: int | None = None
    num_completion_tokens: int | None = None
    error: str | None = None


class Api(Protocol):
    """One of the endpoints.

    Attributes:
        endpoint: Its usual path.
        takes_token_ids: Whether a prompt can be a list of token ids.
        takes_messages: Whether a prompt can be the messages of a conversation.
    """

    endpoint: str
    takes_token_ids: bool
    takes_messages: bool

    def prompt_fields(self, prompt: Prompt) -> Json:
        """The fields of a request's body that hold the prompt."""
        ...

    def is_output(self, choice: Json) -> bool:
        """Whether a choice of a chunk is a piece of the answer."""
        ...


class Completions:
    """``/v1/completions``."""

    endpoint = "/v1/completions"
    takes_token_ids = True
    takes_messages = False

    def prompt_fields(self, prompt: Prompt) -> Json:
        """The prompt as it is."""
        return {"prompt": prompt if isinstance(prompt, str) else list(prompt)}

    def is_output(self, choice: Json) -> bool:
        """Whether it has text, or is a token before the end whose text is held back."""
        return bool(choice.get("text")) or choice.get("finish_reason") is None


class Chat:
    """``/v1/chat/completions``."""

    endpoint = "/v1/chat/completions"
    takes_token_ids = False
    takes_messages = True

    def prompt_fields(self, prompt: Prompt) -> Json:
        """The messages; a text is one of the user's."""
        if isinstance(prompt, str):
            return {"messages": [{"role": "user", "content": prompt}]}
        return {"messages": prompt}

    def is_output(self, choice: Json) -> bool:
        """Whether its delta says more than a role; see ``Completions`` for one without text."""
        delta = choice.get("delta") or {}
        if any(value for key, value in delta.items() if key != "role"):
            return True
        return "role" not in delta and choice.get("finish_reason") is None


# By the names of --backend.
APIS: dict[str, Api] = {"openai": Completions(), "openai-chat": Chat(), "vllm": Completions()}


def request_body(
    api: Api, prompt: Prompt, *, model: str, max_tokens: int, ignore_eos: bool, extra: Json
) -> bytes:
    """The body of a request for a stream with usage.

    Args:
        api: The endpoint's.
        prompt: One that the endpoint takes.
        model: Its name with the server.
        max_tokens: Of the answer.  The name is that of both endpoints; chat has a newer one, which
            older servers would pass over without a word.
        ignore_eos: Go on past the end of sequence, up to ``max_tokens``; sent only if true, since
            OpenAI itself has no such field.
        extra: Further fields; they win over ours.
    """
    fields: Json = {
        "model": model,
        **api.prompt_fields(prompt),
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if ignore_eos else {}),
        **extra,
    }
    return json.dumps(fields, separators=(",", ":")).encode()


def read_chunk(api: Api, data: bytes) -> Chunk:
    """What the data of an event says.

    Raises:
        ValueError: It is no JSON object of the endpoint's kind.
    """
    event = json.loads(data)
    try:
        if event.get("error"):
            return Chunk(error=error_message(event) or "an error without a message")
        usage = event.get("usage") or {}
        choices = event.get("choices") or ()
        return Chunk(
            has_choice=bool(choices),
            is_output=any(api.is_output(choice) for choice in choices),
            finish_reason=choices[0].get("finish_reason") if choices else None,
            num_prompt_tokens=usage.get("prompt_tokens"),
            num_completion_tokens=usage.get("completion_tokens"),
        )
    except (AttributeError, TypeError, LookupError) as error:
        raise ValueError(f"not a chunk of {api.endpoint}: {data[:200]!r}") from error


def error_message(answer: Json) -> str | None:
    """The message of an error object: under ``error``, as OpenAI has it, or flat; None without."""
    error = answer.get("error")
    message = error.get("message") if isinstance(error, dict) else error or answer.get("message")
    return None if message is None else str(message)


def refusal_message(body: str) -> str:
    """What the body of a refusal says: the message of its error object, else all of it."""
    try:
        answer = json.loads(body)
    except ValueError:
        return body
    return (isinstance(answer, dict) and error_message(answer)) or body


def bearer(api_key: str | None) -> dict[str, str]:
    """The header that shows a key; without one that of the environment, if there is any.

    Raises:
        ConfigError: It has characters that no header has.
    """
    key = api_key or os.environ.get("OPENAI_API_KEY")
    if not key:
        return {}
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("the API key has characters that no HTTP header has")
    return {"Authorization": f"Bearer {key}"}
