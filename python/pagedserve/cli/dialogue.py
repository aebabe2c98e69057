"""Prompts from a user, one after the other: of the command line, of a terminal, or of a pipe."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator

from pagedserve.cli.errors import complain
from pagedserve.cli.remote import Remote
from pagedserve.cli.sampling import add_sampling
from pagedserve.errors import RequestError

_DEFAULT_URL = "http://localhost:8000/v1"


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add what every command has that speaks to a running server."""
    server = parser.add_argument_group("server")
    server.add_argument("--url", help=f"address of the server ({_DEFAULT_URL})")
    server.add_argument("--model-name", help="name of the model (the first of /v1/models)")
    server.add_argument("--api-key", help="sent as a bearer token (OPENAI_API_KEY)")
    add_sampling(parser.add_argument_group("sampling (what is not given is as the server has it)"))


def server_of(options: argparse.Namespace) -> tuple[Remote, str]:
    """The server that the options name, and the name of its model.

    Raises:
        ConfigError: A key that cannot be one.
        RequestError: Another kind of address, or the model is asked for and nobody answers.
    """
    server = Remote(options.url or _DEFAULT_URL, options.api_key)
    return server, options.model_name or server.first_model()


def show(pieces: Iterator[str]) -> None:
    """Print an answer while it comes."""
    has_begun = False
    try:
        for piece in pieces:
            has_begun = True
            print(piece, end="", flush=True)
    finally:
        if has_begun:
            print(flush=True)


def answer_each(answer: Callable[[str], None], *, quick: str | None, greeting: str) -> None:
    """Answer the prompts of a user until there are no more.

    Args:
        answer: Prints the answer to a prompt.
        quick: The only prompt; None asks for them.
        greeting: What is said first in a terminal.

    Raises:
        RequestError: Outside a terminal, a prompt that cannot be answered.
        KeyboardInterrupt: Outside a terminal, Ctrl-C.
    """
    if quick is not None:
        answer(quick)
    elif sys.stdin.isatty() and sys.stdout.isatty():
        print(greeting)
        _talk(answer)
    else:
        for prompt in _lines():
            answer(prompt)


def _lines() -> Iterator[str]:
    try:
        for line in sys.stdin:
            if line.strip():
                yield line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"what comes from stdin is no text: {error}") from error


def _talk(answer: Callable[[str], None]) -> None:
    """Ask for prompts in a terminal; Ctrl-C ends an answer, Ctrl-D all."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # lines can be edited, and earlier ones found again
    while True:
        try:
            prompt = input("> ")
            if prompt.strip():
                answer(prompt)
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return
        except RequestError as error:
            complain(error)
