"""``pagedserve complete``: prompts continued by the model of a running server."""

import argparse
from contextlib import closing
from typing import Any

from pagedserve.cli.dialogue import add_server_options, answer_each, server_of, show
from pagedserve.cli.sampling import sampling_fields


def add_complete_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add ``complete`` to a command line."""
    complete = commands.add_parser(
        "complete",
        help="continue prompts with the model of a running server",
        description=(
            "Continue prompts with the model of a running server. On a terminal Ctrl-C ends a "
            "completion and Ctrl-D the program; from a pipe each line is a prompt."
        ),
    )
    complete.add_argument("-q", "--quick", metavar="PROMPT", help="continue this prompt and exit")
    add_server_options(complete)
    complete.set_defaults(run=_complete)


def _text(choice: dict[str, Any]) -> object:
    return choice.get("text")


def _complete(options: argparse.Namespace) -> int:
    server, model = server_of(options)
    fields = {"model": model, **sampling_fields(options)}

    def answer(prompt: str) -> None:
        body = {**fields, "prompt": prompt}
        with closing(server.stream("/completions", body, _text)) as pieces:
            show(pieces)

    answer_each(answer, quick=options.quick, greeting=f"Completing with {model} at {server.url}.")
    return 0
