"""Prompts from a user, one by one: from the command line, a terminal or a pipe."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator

from pagedserve.cli.remote import Remote
from pagedserve.cli.sampling import add_sampling
from pagedserve.cli.streams import complain
from pagedserve.errors import RequestError

_DEFAULT_URL = "http://localhost:8000/v1"


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every command that uses a running server."""
    server = parser.add_argument_group("server")
    server.add_argument("--url", help=f"address of the server ({_DEFAULT_URL})")
    server.add_argument("--model-name", help="name of the model (the first of /v1/models)")
    server.add_argument("--api-key", help="bearer token of requests (OPENAI_API_KEY)")
    add_sampling(parser.add_argument_group("sampling (defaults: the server's)"))


def server_of(options: argparse.Namespace) -> tuple[Remote, str]:
    """The server that the options name, and the name of its model.

    Raises:
        ConfigError: An invalid key.
        RequestError: An invalid address, or a server that does not respond with its model.
    """
    server = Remote(options.url or _DEFAULT_URL, options.api_key)
    return server, options.model_name or server.first_model()


def show(pieces: Iterator[str]) -> None:
    """Print a response as its chunks arrive."""
    has_begun = False
    try:
        for piece in pieces:
            has_begun = True
            print(piece, end="", flush=True)
    finally:
        if has_begun:
            print(flush=True)


def answer_each(answer: Callable[[str], None], *, quick: str | None, greeting: str) -> None:
    """Answer the prompts of a user until the input ends.

    Args:
        answer: Prints the response to a prompt.
        quick: The only prompt; None reads prompts from stdin.
        greeting: First line on a terminal.

    Raises:
        RequestError: Outside a terminal, a request that failed.
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
    with _decoded():
        for line in sys.stdin:
            if line.strip():
                yield line.rstrip("\r\n")


@contextlib.contextmanager
def _decoded() -> Iterator[None]:
    """A context that reads stdin.

    Raises:
        RequestError: It is not text.
    """
    try:
        yield
    except UnicodeDecodeError as error:
        raise RequestError(f"stdin is not UTF-8 text: {error}") from error


def _talk(answer: Callable[[str], None]) -> None:
    """Ask for prompts on a terminal; Ctrl-C ends a response, Ctrl-D the loop."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # line editing and history
    while True:
        try:
            with _decoded():
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
