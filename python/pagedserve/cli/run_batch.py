"""``pagedserve run-batch``: a file of requests in OpenAI's batch format, worked through offline."""

import argparse
import sys
from typing import Any, Final

from pagedserve.cli.early import check_early
from pagedserve.cli.serve import add_model_parser, extras_of, read_args
from pagedserve.cli.streams import complain
from pagedserve.errors import EngineDeadError, extra_needed
from pagedserve.server.options import ServerArgs

# Exit status of a run that was ended by a fault, and can be resumed.
_STOPPED: Final = 1


def add_run_batch_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add ``run-batch`` to a command line."""
    parser = add_model_parser(
        commands,
        "run-batch",
        add_server_args=ServerArgs.add_answer_args,
        help="answer a file of requests in OpenAI's batch format",
        description=(
            "Answer a file of requests in OpenAI's batch format, without a server. Responses are "
            "appended to the output file as they come; a run that was ended is resumed by the "
            "same command."
        ),
    )
    parser.add_argument(
        "-i",
        "--input-file",
        required=True,
        metavar="FILE",
        help="requests, a JSON object per line; - is stdin",
    )
    parser.add_argument(
        "-o",
        "--output-file",
        required=True,
        metavar="FILE",
        help="responses, a JSON object per line; requests that it answers are skipped",
    )
    parser.set_defaults(run=_run_batch)


def _run_batch(options: argparse.Namespace) -> int:
    from pagedserve.server.batches.input_file import input_file  # which imports numpy
    from pagedserve.server.batches.output_file import output_file
    from pagedserve.server.prepare import read_files

    engine_args, server_args = read_args(options)
    extras = extras_of(engine_args, server_args)
    check_early(engine_args, "pagedserve run-batch", extras)
    chat_template = read_files(engine_args, server_args)
    with (
        input_file(options.input_file) as source,
        output_file(options.output_file, source.file) as output,
    ):
        if output.num_lines or output.was_torn:
            torn = "; its last line was incomplete and is cut off" if output.was_torn else ""
            print(f"resuming: {output.num_lines} lines are answered{torn}", file=sys.stderr)
        with extra_needed("pagedserve run-batch", extras):
            from pagedserve.batch_files.run import run_batch
        try:
            rate = run_batch(engine_args, server_args, source, output, chat_template)
        except (EngineDeadError, OSError) as error:
            complain(error)
            return _STOPPED
        num_answered = output.num_lines - output.num_errors
        print(f"{num_answered} lines answered, {output.num_errors} errors, {rate}")
    return 0
