"""``pagedserve quantize``: a GGUF file with fewer bits per weight, compared with the original."""

import argparse
from pathlib import Path
from typing import Any, Final, get_args

from pagedserve.cli.early import check_early
from pagedserve.config import EngineArgs
from pagedserve.config.precision import ModelDtype
from pagedserve.errors import ConfigError, extra_needed
from pagedserve.quantize import TargetName
from pagedserve.regular_files import read_bytes

_NUM_TOKENS: Final = 2000
_MAX_TEXT_BYTES: Final = 64 << 20


def add_quantize_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add ``quantize`` to a command line."""
    parser = commands.add_parser(
        "quantize",
        usage="pagedserve quantize MODEL --to {w8a8,int4} -o FILE [options]",
        help="write a GGUF file with fewer bits per weight",
        description=(
            "Write a copy of a GGUF file with fewer bits per weight, for --quantization gguf, and "
            "print its perplexity and KL divergence beside the original's."
        ),
    )
    parser.add_argument("model", help="a GGUF file, or smollm2")
    parser.add_argument(
        "--to",
        required=True,
        choices=get_args(TargetName),
        help="w8a8: Q8_0 blocks; int4: Q4_1 blocks, embedding and head in Q8_0",
    )
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        type=Path,
        metavar="FILE",
        help="new .gguf file",
    )
    _add_comparison(parser.add_argument_group("comparison"))
    parser.set_defaults(run=_quantize)


def _add_comparison(parser: "argparse._ArgumentGroup") -> None:
    """Add the options of the comparison."""
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="text to compare over; default: a sample of prose and code",
    )
    parser.add_argument(
        "--num-tokens",
        type=int,
        default=_NUM_TOKENS,
        metavar="N",
        help=f"tokens of the text that are compared at most, default {_NUM_TOKENS}",
    )
    parser.add_argument(
        "--dtype",
        choices=get_args(ModelDtype),
        default="auto",
        help="dtype in which the original is compared; auto: float32, others take half the memory",
    )


def _quantize(options: argparse.Namespace) -> int:
    text = None if options.text is None else _read_text(options.text)
    if options.num_tokens < 2:  # noqa: PLR2004  # the second is predicted by the first
        raise ConfigError(f"num_tokens is {options.num_tokens}; it must be at least 2")
    args, extra = EngineArgs(options.model, dtype=options.dtype, backend="native"), "cpu"
    check_early(args, "pagedserve quantize", extra)
    with extra_needed("pagedserve quantize", extra):
        from pagedserve.models.load.progress import progress_shown
        from pagedserve.quantize.run import quantize
    with progress_shown(is_shown=True):
        for line in quantize(args, options.to, options.output, text, options.num_tokens):
            print(line, flush=True)
    return 0


def _read_text(path: Path) -> str:
    """Contents of a file.

    Raises:
        ConfigError: It cannot be read, or is no UTF-8.
    """
    try:
        return read_bytes(path, _MAX_TEXT_BYTES).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"text: {path} is not UTF-8 text: {error}") from error
    except ValueError as error:
        raise ConfigError(f"text: {error}") from error
