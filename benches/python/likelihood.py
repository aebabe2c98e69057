"""What quantization costs a model in likelihood: perplexity and KL divergence beside float32.

Prose and code are cut into windows, each of which is one step of the native backend.
"""

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
from measuring import report_table
from numpy.typing import NDArray

from pagedserve import EngineArgs
from pagedserve.models.tokenizer.loader import load_tokenizer
from pagedserve.native.load import load_native
from pagedserve.quantize.likelihood import (
    WINDOW,
    Comparison,
    compare,
    log_probabilities,
    windows,
)

ROOT: Final = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Cost:
    """A row of the table."""

    options: str
    megabytes: float
    mean_kl: float
    same_token: float
    perplexity: float

    @classmethod
    def of(cls, options: str, num_bytes: int, found: Comparison) -> "Cost":
        """Round a comparison with float32."""
        return cls(
            options=options,
            megabytes=round(num_bytes / 1e6, 1),
            mean_kl=round(found.mean_kl, 5),
            same_token=round(found.same_token, 4),
            perplexity=round(found.perplexity_ratio, 4),
        )


def windows_of_files(args: argparse.Namespace) -> Iterator[NDArray[np.int32]]:
    """Token ids of the files, the same number of windows of each."""
    tokenizer = load_tokenizer(EngineArgs(args.model), uses_transformers=False)
    for path in args.files:
        yield from windows(tokenizer, path.read_text(), args.windows * WINDOW)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="a model of the native backend")
    parser.add_argument("--windows", type=int, default=4, help=f"of {WINDOW} tokens, of each file")
    parser.add_argument("--quantization", nargs="+", default=["int8", "w8a8", "gguf"])
    files = [ROOT / "docs" / "design.md", ROOT / "rust" / "cpu" / "src" / "linear.rs"]
    parser.add_argument("--files", nargs="+", type=Path, default=files, help="prose and code")
    args = parser.parse_args()
    texts = list(windows_of_files(args))
    original = load_native(EngineArgs(args.model, backend="native"))
    expected = list(log_probabilities(original, texts))
    itself = compare(expected, expected, texts)
    rows = [Cost.of("float32", original.model.weight_bytes, itself)]
    for quantization in args.quantization:
        loaded = load_native(EngineArgs(args.model, backend="native", quantization=quantization))
        found = compare(log_probabilities(loaded, texts), expected, texts)
        rows.append(Cost.of(quantization, loaded.model.weight_bytes, found))
    report_table("likelihood", [asdict(row) for row in rows], as_json=False)


if __name__ == "__main__":
    main()
