"""The command line's commands, and their exit statuses."""

import argparse
import os
import sys
from collections.abc import Sequence

from pagedserve import __version__
from pagedserve.bench.command import add_bench_parser
from pagedserve.cli.chat import add_chat_parser
from pagedserve.cli.complete import add_complete_parser
from pagedserve.cli.deploy import add_deploy_parser
from pagedserve.cli.generate import add_generate_parser
from pagedserve.cli.parser import Parser
from pagedserve.cli.serve import add_serve_parser
from pagedserve.cli.streams import complain, settle_standard_streams
from pagedserve.errors import ConfigError, ModelLoadError, RequestError

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
        options = make_parser().parse_args(argv)
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


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands; ``run`` of a parsed namespace is its command."""
    parser = Parser(prog="pagedserve", description="A paged-attention serving engine.")
    parser.add_argument("--version", action="version", version=f"pagedserve {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    add_generate_parser(commands)
    add_serve_parser(commands)
    add_deploy_parser(commands)
    add_chat_parser(commands)
    add_complete_parser(commands)
    add_bench_parser(commands)
    return parser
