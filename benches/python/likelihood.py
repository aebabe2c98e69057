"""What quantization costs a model in likelihood: perplexity and KL divergence beside float32.

Prose and code are cut into windows, each of which is one step of the native backend.
"""

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from measuring import report_table
from numpy.typing import NDArray

from pagedserve import EngineArgs
from pagedserve.executor.numpy_buffers import GroupBlocks, StepArrays
from pagedserve.executor.protocol import CacheShape, StepLimits
from pagedserve.models.tokenizer.loader import load_tokenizer
from pagedserve.native.load import load_native
from pagedserve.native.pools import KVPools

ROOT: Final = Path(__file__).parents[2]
WINDOW: Final = 200
_BLOCK_SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class Cost:
    """A row of the table."""

    options: str
    megabytes: float
    mean_kl: float
    same_token: float
    perplexity: float


def windows(args: argparse.Namespace) -> Iterator[NDArray[np.int32]]:
    """Token ids of the files, the same number of windows of each."""
    tokenizer = load_tokenizer(EngineArgs(args.model), uses_transformers=False)
    for path in args.files:
        ids = np.array(tokenizer.encode(path.read_text()), np.int32)
        for first in range(0, args.windows * WINDOW, WINDOW):
            yield ids[first : first + WINDOW]


def log_probabilities(model: str, texts: list[NDArray[np.int32]], **options: Any) -> Any:
    """Bytes of the weights, and log-probabilities ``[tokens, V]`` of each text."""
    loaded = load_native(EngineArgs(model, backend="native", **options))
    limits = StepLimits(max_num_tokens=WINDOW, max_num_rows=1, max_model_len=WINDOW)
    num_blocks = -(-WINDOW // _BLOCK_SIZE)
    shape = CacheShape(
        num_gpu_blocks=num_blocks, num_cpu_blocks=0, block_size=_BLOCK_SIZE, limits=limits
    )
    pools = KVPools(loaded.model.config, shape, loaded.model.dtype).layers
    found = []
    for ids in texts:
        positions, tables = np.arange(len(ids)), np.arange(num_blocks, dtype=np.int32)[None]
        step = StepArrays(
            token_ids=ids,
            positions=positions,
            slot_mapping=positions,
            query_start=np.array([0, len(ids)], np.int32),
            seq_lens=np.array([len(ids)], np.int32),
            block_tables=tables,
            sample_index=positions.astype(np.int32),
            adapter_slots=np.full(1, -1, np.int32),
            groups=(GroupBlocks(tables, positions),),
        )
        logits = loaded.model.outputs(step, pools, step.sample_index).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        found.append((logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype("f4"))
    return loaded.model.weight_bytes, found


def cost(name: str, num_bytes: int, found: Any, expected: Any, texts: Any) -> Cost:
    """Compare log-probabilities with those of float32."""
    divergences, same, surprise = [], [], []
    for ours, theirs, ids in zip(found, expected, texts, strict=True):
        divergences.append((np.exp(theirs) * (theirs - ours)).sum(axis=1))
        same.append(ours.argmax(axis=1) == theirs.argmax(axis=1))
        places = np.arange(len(ids) - 1), ids[1:]
        surprise.append(theirs[places] - ours[places])
    return Cost(
        options=name,
        megabytes=round(num_bytes / 1e6, 1),
        mean_kl=round(float(np.concatenate(divergences).mean()), 5),
        same_token=round(float(np.concatenate(same).mean()), 4),
        perplexity=round(float(np.exp(np.concatenate(surprise).mean())), 4),
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="a model of the native backend")
    parser.add_argument("--windows", type=int, default=4, help=f"of {WINDOW} tokens, of each file")
    parser.add_argument("--quantization", nargs="+", default=["int8", "w8a8", "gguf"])
    files = [ROOT / "docs" / "design.md", ROOT / "rust" / "cpu" / "src" / "linear.rs"]
    parser.add_argument("--files", nargs="+", type=Path, default=files, help="prose and code")
    args = parser.parse_args()
    texts = list(windows(args))
    num_bytes, expected = log_probabilities(args.model, texts)
    rows = [cost("float32", num_bytes, expected, expected, texts)]
    for quantization in args.quantization:
        num_bytes, found = log_probabilities(args.model, texts, quantization=quantization)
        rows.append(cost(quantization, num_bytes, found, expected, texts))
    report_table("likelihood", [asdict(row) for row in rows], as_json=False)


if __name__ == "__main__":
    main()
