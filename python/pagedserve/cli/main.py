"""The command line's commands, and their exit statuses."""

import argparse
import atexit
import os
import sys
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from pagedserve import __version__
from pagedserve.cli.parser import Parser
from pagedserve.cli.streams import complain, settle_standard_streams
from pagedserve.errors import ConfigError, ModelLoadError, RequestError

# In the order of help.
_COMMANDS: Final = (
    *("generate", "serve", "run-batch", "quantize", "deploy", "chat", "complete", "decide"),
    "bench",
)

_BAD_INPUT = 2
_MISSING_EXTRA = 1
_INTERRUPTED = 130
_PIPE_CLOSED = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments after the program's name; None takes those of the process.

    Returns:
        The exit status: 0, 1 for missing packages, 2 for bad input, 130 for Ctrl-C, 141 if the
        reader of a pipe has exited.
    """
    settle_standard_streams()
    try:
        words = sys.argv[1:] if argv is None else argv
        options = make_parser(*words[:1]).parse_args(words)
        status: int = options.run(options)
        sys.stdout.flush()
    except (ConfigError, RequestError, ModelLoadError) as error:
        complain(error)
        return _BAD_INPUT
    except ImportError as error:
        complain(error)
        return _MISSING_EXTRA
    except KeyboardInterrupt:
        print("pagedserve: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader, such as head, has exited; the rest would be written, and fail, at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    return status


def run() -> NoReturn:
    """Run the command line of this process, and end it.

    What is left is not freed object by object, which takes longer than a short text; functions that
    are to run at the exit are run.
    """
    status = main()
    atexit._run_exitfuncs()  # noqa: SLF001  # as at every exit of an interpreter
    sys.stdout.flush()
    os._exit(status)


def make_parser(first: str = "") -> argparse.ArgumentParser:
    """The parser of all commands; ``run`` of a parsed namespace is its command.

    Args:
        first: First argument; if it is a command, no other is imported, for a faster start.
    """
    parser = Parser(prog="pagedserve", description="A paged-attention serving engine.")
    parser.add_argument("--version", action="version", version=f"pagedserve {__version__}")
    named = f"{{{','.join(_COMMANDS)}}}"
    commands = parser.add_subparsers(dest="command", metavar=named, required=True)
    for command in [first] if first in _COMMANDS else _COMMANDS:
        _add(command, commands)
    return parser


def _add(command: str, commands: "argparse._SubParsersAction[Any]") -> None:
    """Add a command."""
    match command:
        case "generate":
            from pagedserve.cli.generate import add_generate_parser as add
        case "serve":
            from pagedserve.cli.serve import add_serve_parser as add
        case "run-batch":
            from pagedserve.cli.run_batch import add_run_batch_parser as add
        case "quantize":
            from pagedserve.cli.quantize import add_quantize_parser as add
        case "deploy":
            from pagedserve.cli.deploy import add_deploy_parser as add
        case "chat":
            from pagedserve.cli.chat import add_chat_parser as add
        case "complete":
            from pagedserve.cli.complete import add_complete_parser as add
        case "decide":
            from pagedserve.cli.decide import add_decide_parser as add
        case _:
            from pagedserve.cli.bench import add_bench_parser as add
    add(commands)
