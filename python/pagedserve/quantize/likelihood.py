"""Likelihood of a text under two native models: perplexity, and KL divergence of the next tokens.

A text is cut into windows, each of which is one step.

Costs: log-probabilities of one window per model, 200 rows of the vocabulary in float64.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import exp
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pagedserve.executor.numpy_buffers import GroupBlocks, StepArrays
from pagedserve.executor.protocol import CacheShape, StepLimits
from pagedserve.native.load import LoadedNative
from pagedserve.native.pools import KVPools
from pagedserve.tokenizer import Tokenizer

# Tokens of a window.
WINDOW: Final = 200
_BLOCK_SIZE: Final = 16
_NUM_BLOCKS: Final = -(-WINDOW // _BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A model compared with the one that it was made of.

    Attributes:
        num_tokens: Number of tokens whose likelihood was compared.
        perplexity: Perplexity of the model.
        original_perplexity: Perplexity of the original.
        mean_kl: Mean KL divergence of its next token from the original's, in nats.
        same_token: Share of positions where both have the same most likely token.
    """

    num_tokens: int
    perplexity: float
    original_perplexity: float
    mean_kl: float
    same_token: float

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity divided by that of the original."""
        return self.perplexity / self.original_perplexity


def windows(tokenizer: Tokenizer, text: str, num_tokens: int) -> list[NDArray[np.int32]]:
    """Token ids of a text in windows, int32 ``[T]``, T from 2 to `WINDOW`.

    Args:
        tokenizer: Each window begins with the tokens that it gives an empty text.
        text: The text.
        num_tokens: Maximum tokens of the text.
    """
    start = tokenizer.encode("")
    ids = tokenizer.encode(text, add_special_tokens=False)[:num_tokens]
    size = WINDOW - len(start)
    cut = [start + ids[first : first + size] for first in range(0, len(ids), size)]
    return [np.array(window, np.int32) for window in cut if len(window) > 1]


def log_probabilities(
    loaded: LoadedNative, texts: Iterable[NDArray[np.int32]]
) -> Iterator[NDArray[np.float32]]:
    """Log-probabilities of the next token after each token of each window, ``[T, V]``."""
    model = loaded.model
    limits = StepLimits(max_num_tokens=WINDOW, max_num_rows=1, max_model_len=WINDOW)
    shape = CacheShape(
        num_gpu_blocks=_NUM_BLOCKS, num_cpu_blocks=0, block_size=_BLOCK_SIZE, limits=limits
    )
    pools = KVPools(model.config, shape, model.dtype).layers
    for ids in texts:
        step = _step(ids)
        logits = model.outputs(step, pools, step.sample_index).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        yield (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)


def _step(ids: NDArray[np.int32]) -> StepArrays:
    """Arrays of a step whose one row is a window."""
    positions, tables = np.arange(len(ids)), np.arange(_NUM_BLOCKS, dtype=np.int32)[None]
    return StepArrays(
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


def compare(
    found: Iterable[NDArray[np.float32]],
    original: Iterable[NDArray[np.float32]],
    texts: Iterable[NDArray[np.int32]],
) -> Comparison:
    """Compare log-probabilities of windows with those of the original.

    Args:
        found: Log-probabilities of each window, ``[T, V]``.
        original: Those of the original.
        texts: Token ids of each window, at least one.
    """
    divergences, same, likelihoods = [], [], []
    for ours, theirs, ids in zip(found, original, texts, strict=True):
        divergences.append((np.exp(theirs) * (theirs - ours)).sum(axis=1))
        same.append(ours.argmax(axis=1) == theirs.argmax(axis=1))
        places = np.arange(len(ids) - 1), ids[1:]
        likelihoods.append(np.stack([ours[places], theirs[places]]))
    compared = np.concatenate(likelihoods, axis=1)
    perplexity, original_perplexity = (exp(-mean) for mean in compared.mean(axis=1, dtype="f8"))
    return Comparison(
        num_tokens=compared.shape[1],
        perplexity=perplexity,
        original_perplexity=original_perplexity,
        mean_kl=float(np.concatenate(divergences).mean()),
        same_token=float(np.concatenate(same).mean()),
    )
