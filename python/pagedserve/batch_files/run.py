"""A run of ``pagedserve run-batch``: the engine, and the lines of one file."""

import dataclasses
import gc
import sys
from concurrent.futures import Future
from contextlib import closing
from typing import Final

import uvloop

from pagedserve.batch_files.progress import Progress
from pagedserve.config import EngineArgs
from pagedserve.models.load.progress import progress_shown
from pagedserve.sampling_params import SamplingParams
from pagedserve.server.batches.input_file import InputFile
from pagedserve.server.batches.output_file import OutputFile
from pagedserve.server.batches.run import BatchRun, Capacity
from pagedserve.server.context import Context, make_context
from pagedserve.server.options import ServerArgs
from pagedserve.server.start import start_engine

# Sequences in the engine for each that the scheduler runs at once: the next ones wait there.
_SEQS_PER_SLOT: Final = 2


def run_batch(
    engine_args: EngineArgs,
    server_args: ServerArgs,
    source: InputFile,
    output: OutputFile,
    chat_template: str | None,
) -> str:
    """Load a model and work through a file of requests.

    Args:
        engine_args: Options of the engine.
        server_args: Options of responses.
        source: Requests.
        output: Receives their responses; those that it has are not requested again.
        chat_template: Overrides the model's chat template.

    Returns:
        Lines per second, with the unit.

    Raises:
        ConfigError: Arguments that contradict the model or the memory.
        ModelLoadError: The model cannot be found, read or run.
        RequestError: An adapter is invalid.
        EngineDeadError: The engine died.
        OSError: The input cannot be read, or the output not be written.
    """
    # Lines wait in the file, so that the limit of a server's queue is not needed.
    server_args = dataclasses.replace(server_args, max_num_queued_reqs=sys.maxsize)
    default_params: Future[SamplingParams] = Future()
    client = start_engine(engine_args, server_args, default_params)
    client.wait_until_ready()
    names = server_args.model_names(engine_args.model)
    context = make_context(
        client, names, server_args, default_params=default_params, chat_template=chat_template
    )
    gc.collect()
    gc.freeze()  # the objects of the start, which each full collection would traverse
    with (
        progress_shown(is_shown=True),
        closing(Progress(source.num_lines, output.num_lines)) as progress,
    ):
        capacity = Capacity(_SEQS_PER_SLOT * client.max_num_seqs)
        batch = BatchRun(context, output, capacity, advance=progress.advance)
        try:
            uvloop.run(_run(context, batch, source, client.max_num_seqs))
            return progress.rate()
        finally:
            client.shutdown()


async def _run(context: Context, batch: BatchRun, source: InputFile, max_num_seqs: int) -> None:
    await context.open(max_num_seqs)
    await batch.run(source)
