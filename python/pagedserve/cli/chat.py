"""``pagedserve chat``: a conversation with the model of a running server."""

import argparse
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from pagedserve.cli.dialogue import add_server_options, answer_each, server_of, show
from pagedserve.cli.remote import Remote
from pagedserve.cli.sampling import sampling_fields


def add_chat_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add ``chat`` to a command line."""
    chat = commands.add_parser(
        "chat",
        help="chat with the model of a running server",
        description=(
            "Chat with the model of a running server. On a terminal Ctrl-C ends a response and "
            "Ctrl-D the conversation; from a pipe each line is a message."
        ),
    )
    chat.add_argument("-q", "--quick", metavar="MESSAGE", help="send this message and exit")
    chat.add_argument("--system-prompt", metavar="TEXT", help="system message of the conversation")
    add_server_options(chat)
    chat.set_defaults(run=_chat)


class Conversation:
    """The messages of a conversation, by the user and the model."""

    def __init__(self, server: Remote, fields: dict[str, Any], system_prompt: str | None) -> None:
        self._server = server
        self._fields = fields
        self._messages: list[dict[str, str]] = []
        if system_prompt is not None:
            self._messages.append(_message("system", system_prompt))

    def answer(self, prompt: str) -> None:
        """Print the response to a message; both are kept if it has any text."""
        messages = [*self._messages, _message("user", prompt)]
        body = {**self._fields, "messages": messages}
        said: list[str] = []
        try:
            with closing(self._server.stream("/chat/completions", body, _text)) as pieces:
                show(_noted(pieces, said))
        finally:
            if any(said):
                self._messages = [*messages, _message("assistant", "".join(said))]


def _noted(pieces: Iterator[str], said: list[str]) -> Iterator[str]:
    """Yield the chunks; each is added to ``said`` before it is printed, so Ctrl-C loses none."""
    for piece in pieces:
        said.append(piece)
        yield piece


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _text(choice: dict[str, Any]) -> object:
    delta = choice.get("delta")
    return delta.get("content") if isinstance(delta, dict) else delta


def _chat(options: argparse.Namespace) -> int:
    server, model = server_of(options)
    fields = {"model": model, **sampling_fields(options)}
    conversation = Conversation(server, fields, options.system_prompt)
    answer_each(
        conversation.answer, quick=options.quick, greeting=f"Chatting with {model} at {server.url}."
    )
    return 0
