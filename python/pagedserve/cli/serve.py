"""``pagedserve serve``."""

import argparse
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedserve.cli.early import check_early
from pagedserve.collector import collector_paused
from pagedserve.config import EngineArgs
from pagedserve.config.reasoning import REASONING_FORMATS
from pagedserve.config.scheduler import default_step_tokens
from pagedserve.engine.ahead import load_ahead
from pagedserve.engine.defaults import STEP_TOKENS
from pagedserve.errors import ConfigError, extra_needed
from pagedserve.host_ops.heap import share_one_heap
from pagedserve.native.choice import choose_backend
from pagedserve.server.log import set_up_logging
from pagedserve.server.options import ServerArgs
from pagedserve.vllm_names import ABSENT_SERVER_OPTIONS, add_hidden_arguments, own_options

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

logger = logging.getLogger(__name__)


def add_serve_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add ``serve`` to a command line."""
    parser = add_model_parser(
        commands,
        "serve",
        help="serve a model over HTTP, compatible with OpenAI's API",
        description="Serve a model over HTTP, compatible with OpenAI's API.",
    )
    parser.set_defaults(run=_serve)


def add_model_parser(
    commands: "argparse._SubParsersAction[Any]",
    name: str,
    add_server_args: Callable[[argparse.ArgumentParser], None] = ServerArgs.add_cli_args,
    **texts: Any,
) -> argparse.ArgumentParser:
    """Add a command that serves a model, with the options of engine and server.

    Args:
        commands: Commands of the program.
        name: Name of the command.
        add_server_args: Adds the options of the server.
        **texts: Help of the command, as of ``add_parser``.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name, usage=f"pagedserve {name} MODEL [options]", **texts
    )
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    EngineArgs.add_cli_args(
        parser,
        # A response with the log-probabilities of the whole vocabulary would delay all others.
        max_logprobs=20,
        # As vLLM's server: a long prompt delays no others, a conversation's prefix is cached.
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        max_num_batched_tokens=default_step_tokens(STEP_TOKENS),
    )
    add_server_args(parser)
    add_hidden_arguments(parser, ABSENT_SERVER_OPTIONS)
    # Whether the model supports them is known later: `pagedserve.engine.defaults.server_defaults`.
    parser.set_defaults(
        enable_chunked_prefill=None, enable_prefix_caching=None, max_num_batched_tokens=None
    )
    return parser


def read_args(
    options: argparse.Namespace, *others: "type[DataclassInstance]"
) -> tuple[EngineArgs, ServerArgs]:
    """The arguments of engine and server that a command line gives.

    Args:
        options: Namespace from a parser of ``add_model_parser``.
        *others: Classes of the command's other options.

    Raises:
        ConfigError: Invalid values.
    """
    if options.model is not None and options.model_tag is not None:
        raise ConfigError("MODEL and --model are both given; give one of them")
    options.model = options.model or options.model_tag
    if options.model is None:
        raise ConfigError(f"no model: give it, as in pagedserve {options.command} smollm2")
    server_args = ServerArgs.from_cli_args(options)
    classes: list[type[DataclassInstance]] = [ServerArgs, *others]
    for arguments in classes:
        for argument in dataclasses.fields(arguments):  # an engine may refuse it by the same name
            if hasattr(options, argument.name):
                delattr(options, argument.name)
    absent = {key: value for key, value in vars(options).items() if key in ABSENT_SERVER_OPTIONS}
    own_options(absent, own=())
    engine_args = EngineArgs.from_cli_args(options)
    if server_args.reasoning_parser is not None and engine_args.reasoning_config is None:
        known = REASONING_FORMATS[server_args.reasoning_parser]
        engine_args = dataclasses.replace(engine_args, reasoning_config=known)
    return engine_args, server_args


def _make_directory(name: str, path: str) -> None:
    """Make a directory that an option names, so that files can be written there."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{name} is {path}; it must be a directory: {error.strerror}") from error


def extras_of(engine_args: EngineArgs, server_args: ServerArgs) -> str:
    """The extras that a server needs."""
    extras = f"{choose_backend(engine_args).extra},serve"
    return extras if server_args.otlp_traces_endpoint is None else f"{extras},otel"


def _serve(options: argparse.Namespace) -> int:
    share_one_heap()  # before threads start: those of numpy do when it is imported
    from pagedserve.server.prepare import prepare  # which imports numpy

    engine_args, server_args = read_args(options)
    extras = extras_of(engine_args, server_args)
    check_early(engine_args, "pagedserve serve", extras)
    prepared = prepare(engine_args, server_args)
    if engine_args.decision_log is not None:
        _make_directory("decision_log", engine_args.decision_log)
    set_up_logging(server_args.log_format)
    logger.info("starting with %s", engine_args.model)
    with extra_needed("pagedserve serve", extras), collector_paused():
        load_ahead(engine_args)
        from pagedserve.server.start import serve

    return serve(engine_args, server_args, prepared)
