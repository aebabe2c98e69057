"""Endpoints of OpenAI and vLLM: request bodies, and the contents of responses."""

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
    """Contents of one event of a stream, or of a whole response.

    Attributes:
        has_choice: Whether it belongs to the response; later ones, such as the usage, do not.
        is_output: Whether it has output: one token, or several.  Excludes the announcement of a
            role, and an end without text.  A token whose text is held back counts.
        text: Text of its output.
        finish_reason: Finish reason of the response's last chunk.
        num_prompt_tokens: Prompt tokens as counted by the server; None if not reported.
        num_completion_tokens: Completion tokens, likewise.
        error: Message, if the event is an error.
    """

    has_choice: bool = False
    is_output: bool = False
    text: str = ""
    finish_reason: str | None = None
    num_prompt_tokens: int | None = None
    num_completion_tokens: int | None = None
    error: str | None = None


class Api(Protocol):
    """One of the endpoints.

    Attributes:
        endpoint: Default path.
        takes_token_ids: Whether it accepts a list of token ids as a prompt.
        takes_messages: Whether it accepts the messages of a conversation as a prompt.
        is_pooling: Whether it is of a pooling model, whose response is no stream.
    """

    endpoint: str
    takes_token_ids: bool
    takes_messages: bool
    is_pooling: bool

    def prompt_fields(self, prompt: Prompt) -> Json:
        """Fields of a request's body with the prompt."""
        ...

    def is_output(self, choice: Json) -> bool:
        """Whether a choice of a chunk has output."""
        ...

    def text(self, choice: Json) -> str:
        """Text of a choice of a chunk."""
        ...


class Completions:
    """``/v1/completions``."""

    endpoint = "/v1/completions"
    takes_token_ids = True
    takes_messages = False
    is_pooling = False

    def prompt_fields(self, prompt: Prompt) -> Json:
        """The prompt unchanged."""
        return {"prompt": prompt if isinstance(prompt, str) else list(prompt)}

    def is_output(self, choice: Json) -> bool:
        """Whether it has text, or is a token before the end whose text is held back."""
        return bool(choice.get("text")) or choice.get("finish_reason") is None

    def text(self, choice: Json) -> str:
        """Its text."""
        return choice.get("text") or ""


class Chat:
    """``/v1/chat/completions``."""

    endpoint = "/v1/chat/completions"
    takes_token_ids = False
    takes_messages = True
    is_pooling = False

    def prompt_fields(self, prompt: Prompt) -> Json:
        """The messages; a text becomes a user message."""
        if isinstance(prompt, str):
            return {"messages": [{"role": "user", "content": prompt}]}
        return {"messages": prompt}

    def is_output(self, choice: Json) -> bool:
        """Whether its delta has more than a role; see ``Completions`` for one without text."""
        delta = choice.get("delta") or {}
        if any(value for key, value in delta.items() if key != "role"):
            return True
        return "role" not in delta and choice.get("finish_reason") is None

    def text(self, choice: Json) -> str:
        """The content of its delta, without reasoning."""
        return (choice.get("delta") or {}).get("content") or ""


class Pooling:
    """An endpoint of pooling models with ``input``: its response has usage, and no choices."""

    takes_token_ids = True
    takes_messages = False
    is_pooling = True

    def __init__(self, endpoint: str) -> None:
        """Keep the default path."""
        self.endpoint = endpoint

    def prompt_fields(self, prompt: Prompt) -> Json:
        """The input, which the server truncates to the model's length."""
        given = prompt if isinstance(prompt, str) else list(prompt)
        return {"input": given, "truncate_prompt_tokens": -1}

    def is_output(self, choice: Json) -> bool:  # noqa: ARG002  # an Api's method
        """Whether a choice has output: never."""
        return False

    def text(self, choice: Json) -> str:  # noqa: ARG002  # as above
        """Text of a choice: always empty."""
        return ""


# By the names of --backend.
APIS: dict[str, Api] = {
    "openai": Completions(),
    "openai-chat": Chat(),
    "vllm": Completions(),
    "openai-embeddings": Pooling("/v1/embeddings"),
    "vllm-pooling": Pooling("/pooling"),
}


def request_body(
    api: Api, prompt: Prompt, *, model: str, max_tokens: int, ignore_eos: bool, extra: Json
) -> bytes:
    """Build the body of a request: a streaming one with usage, unless it is of a pooling model.

    Args:
        api: The endpoint.
        prompt: A prompt that the endpoint accepts.
        model: Name of the model on the server.
        max_tokens: Maximum output tokens.  Both endpoints accept this name; chat has a newer one,
            which older servers would silently ignore.
        ignore_eos: Continue after the end of sequence, up to ``max_tokens``; sent only if true,
            since OpenAI has no such field.
        extra: Further fields; they override ours.
    """
    fields: Json = {"model": model, **api.prompt_fields(prompt)}
    if not api.is_pooling:
        fields |= {
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if ignore_eos else {}),
        }
    return json.dumps(fields | extra, separators=(",", ":")).encode()


def read_chunk(api: Api, data: bytes) -> Chunk:
    """Parse the data of an event, or a whole response.

    Raises:
        ValueError: It is not a JSON object of the endpoint's kind.
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
            text="".join(api.text(choice) for choice in choices),
            finish_reason=choices[0].get("finish_reason") if choices else None,
            num_prompt_tokens=usage.get("prompt_tokens"),
            num_completion_tokens=usage.get("completion_tokens"),
        )
    except (AttributeError, TypeError, LookupError) as error:
        raise ValueError(f"not a chunk of {api.endpoint}: {data[:200]!r}") from error


def error_message(answer: Json) -> str | None:
    """Message of an error object: under ``error``, as at OpenAI, or flat; None without one."""
    error = answer.get("error")
    message = error.get("message") if isinstance(error, dict) else error or answer.get("message")
    return None if message is None else str(message)


def refusal_message(body: str) -> str:
    """Message of an error response: that of its error object, else the whole body."""
    try:
        answer = json.loads(body)
    except ValueError:
        return body
    return (isinstance(answer, dict) and error_message(answer)) or body


def bearer(api_key: str | None) -> dict[str, str]:
    """Authorization header for a key, or for that of the environment, if any.

    Raises:
        ConfigError: It has characters that are invalid in a header.
    """
    key = api_key or os.environ.get("OPENAI_API_KEY")
    if not key:
        return {}
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("the API key has characters that no HTTP header has")
    return {"Authorization": f"Bearer {key}"}
