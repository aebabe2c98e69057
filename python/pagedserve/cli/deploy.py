"""``pagedserve deploy``."""

import argparse
import logging
from typing import Any

from pagedserve.cli.serve import add_model_parser, read_args
from pagedserve.deploy.options import DeployArgs
from pagedserve.errors import extra_needed
from pagedserve.extras import check_installed
from pagedserve.server.log import set_up_logging

logger = logging.getLogger(__name__)


def add_deploy_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add ``deploy`` to a command line."""
    parser = add_model_parser(
        commands,
        "deploy",
        help="serve a model with several replicas on a Ray cluster",
        description="Serve a model with several replicas on a Ray cluster, over HTTP as `serve`.",
    )
    DeployArgs.add_cli_args(parser)
    parser.set_defaults(run=_deploy)


def _deploy(options: argparse.Namespace) -> int:
    from pagedserve.server.prepare import prepare  # which imports numpy

    deploy_args = DeployArgs.from_cli_args(options)
    engine_args, server_args = read_args(options, DeployArgs)
    check_installed("pagedserve deploy", "engine,ray-serve")
    prepared = None if deploy_args.update else prepare(engine_args, server_args)
    set_up_logging(server_args.log_format)
    logger.info("deploying %s", engine_args.model)
    with extra_needed("pagedserve deploy", "engine,ray-serve"):
        from pagedserve.deploy.application import deploy, update
        from pagedserve.server.start import serve

    if prepared is None:
        update(engine_args, deploy_args, stall_timeout=server_args.stall_timeout)
        logger.info("replaced the replicas of %s", deploy_args.app_name)
        return 0
    return serve(
        engine_args,
        server_args,
        prepared,
        lambda: deploy(engine_args, deploy_args, stall_timeout=server_args.stall_timeout),
    )
