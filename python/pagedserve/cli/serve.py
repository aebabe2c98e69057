"""``pagedserve serve``."""

import argparse
import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedserve.config import EngineArgs
from pagedserve.errors import ConfigError, extra_needed
from pagedserve.server.log import set_up_logging
from pagedserve.server.options import ServerArgs

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

logger = logging.getLogger(__name__)


def add_serve_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add ``serve`` to a command line."""
    parser = add_model_parser(
        commands,
        "serve",
        help="serve a model over HTTP, as OpenAI's clients speak it",
        description="Serve a model over HTTP, as OpenAI's clients speak it.",
    )
    parser.set_defaults(run=_serve)


def add_model_parser(
    commands: "argparse._SubParsersAction[Any]", name: str, **texts: Any
) -> argparse.ArgumentParser:
    """A command that serves a model: the options of engine and server."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        conflict_handler="resolve",  # of vLLM's names some mean something to a server
        **texts,
    )
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    EngineArgs.add_cli_args(
        parser,
        # An answer with all log-probabilities of a long text would hold up everybody.
        max_logprobs=20,
        # As vLLM's server: a long prompt holds up nobody, a conversation's next turn is short.
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
    )
    ServerArgs.add_cli_args(parser)
    # Whether the model can is not known yet: `pagedserve.engine.defaults.server_defaults`.
    parser.set_defaults(enable_chunked_prefill=None, enable_prefix_caching=None)
    return parser


def read_args(
    options: argparse.Namespace, *others: "type[DataclassInstance]"
) -> tuple[EngineArgs, ServerArgs]:
    """What a command line says of engine and server.

    Args:
        options: Of a parser that ``add_model_parser`` made.
        *others: Classes of other options that the command has.

    Raises:
        ConfigError: Values that cannot be.
    """
    if options.model is not None and options.model_tag is not None:
        raise ConfigError("MODEL and --model are both given; give one of them")
    options.model = options.model or options.model_tag
    if options.model is None:
        raise ConfigError(f"no model: give it, as in pagedserve {options.command} smollm2")
    server_args = ServerArgs.from_cli_args(options)
    classes: list[type[DataclassInstance]] = [ServerArgs, *others]
    for arguments in classes:
        for argument in dataclasses.fields(arguments):  # an engine may know it as not there
            delattr(options, argument.name)
    return EngineArgs.from_cli_args(options), server_args


def _make_directory(name: str, path: str) -> None:
    """Make a directory that an option names, so that files can be written there."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{name} is {path}; it must be a directory: {error.strerror}") from error


def _serve(options: argparse.Namespace) -> int:
    engine_args, server_args = read_args(options)
    if engine_args.decision_log is not None:
        _make_directory("decision_log", engine_args.decision_log)
    set_up_logging(server_args.log_format)
    # What comes now, importing torch first of all, takes seconds.
    logger.info("starting with %s", engine_args.model)

    with extra_needed("pagedserve serve", "engine,serve"):
        from pagedserve.server.run import serve

    return serve(engine_args, server_args)
