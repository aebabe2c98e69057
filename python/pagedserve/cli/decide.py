"""``pagedserve decide``: typed decisions; ``calibrate`` fits their temperatures."""

import argparse
from pathlib import Path
from typing import Any

from pagedserve.checks import check_replaceable
from pagedserve.cli.early import check_early
from pagedserve.config import EngineArgs
from pagedserve.config.sampling import DEFAULT_PARAMS
from pagedserve.errors import ConfigError, extra_needed
from pagedserve.native.choice import choose_backend


def add_decide_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add ``decide`` to a command line."""
    decide = commands.add_parser(
        "decide", help="calibrate typed decisions", description="Calibrate typed decisions."
    )
    kinds = decide.add_subparsers(required=True)
    calibrate = kinds.add_parser(
        "calibrate",
        usage="pagedserve decide calibrate --model MODEL --examples FILE --output FILE [options]",
        help="fit a temperature for each type of questions",
        description=(
            "Fit a temperature for each type of questions to labelled examples, and write them to "
            "a file for LLM.decide and pagedserve serve."
        ),
    )
    calibrate.add_argument(
        "--examples",
        required=True,
        type=Path,
        metavar="FILE",
        help="labelled examples, a JSON object per line",
    )
    calibrate.add_argument(
        "--output", required=True, type=Path, metavar="FILE", help="file of the temperatures"
    )
    EngineArgs.add_cli_args(calibrate, without=DEFAULT_PARAMS)
    calibrate.set_defaults(run=_calibrate)


def _calibrate(options: argparse.Namespace) -> int:
    from pagedserve.decisions.calibration import Calibration
    from pagedserve.decisions.examples import read_examples

    if options.model is None:
        raise ConfigError("no model: give --model")
    args = EngineArgs.from_cli_args(options)
    examples = read_examples(options.examples)
    check_replaceable(options.output, options.examples)
    extra = choose_backend(args).extra
    check_early(args, "pagedserve decide", extra)
    with extra_needed("pagedserve decide", extra):
        from pagedserve import LLM  # importing torch alone takes seconds

    reads = []
    with LLM(**args.llm_options) as llm:
        for example in examples:
            decision = llm.decide(
                example.state, example.questions, instructions=example.instructions
            )
            reads += example.reads(decision)
    calibration = Calibration.fitted(reads)
    shown = ", ".join(f"{kind} {value:.3f}" for kind, value in calibration.temperatures.items())
    print(
        f"{len(reads)} answers: log loss {Calibration().log_loss(reads):.4f}, calibrated "
        f"{calibration.log_loss(reads):.4f}; temperatures: {shown}"
    )
    calibration.save(options.output)
    return 0
