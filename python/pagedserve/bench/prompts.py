"""Synthetic prompts: random token ids, the same as words, and their lengths.

A prompt created here is reproducible (by its seed) and, except for a requested prefix, shares no
prefix with others, so that no prefix cache helps.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# Common words, each one token in the vocabularies of the usual tokenizers.
_COMMON = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city community name president team minute idea body information back "
    "parent face others level office door health person art war history party result change "
    "morning reason research girl guy moment air teacher force education foot boy age policy "
    "music process"
)
_WORDS = _COMMON.split()

TokenIds = NDArray[np.int64]


def random_token_ids(num_tokens: int, *, vocab_size: int, rng: np.random.Generator) -> TokenIds:
    """Generate uniformly distributed token ids.

    Returns:
        int64 ``[num_tokens]``, each at least 0 and below ``vocab_size``.
    """
    return rng.integers(vocab_size, size=num_tokens)


def length_around(middle: int, ratio: float, rng: np.random.Generator) -> int:
    """A random length from ``middle * (1 - ratio)`` to ``middle * (1 + ratio)``, at least 1."""
    low, high = int(middle * (1 - ratio)), int(np.ceil(middle * (1 + ratio)))
    return max(1, int(rng.integers(low, high, endpoint=True)))


def block_token_ids(
    block_ids: Sequence[int],
    *,
    block_size: int,
    num_tokens: int,
    vocab_size: int,
    seed: Sequence[int],
) -> TokenIds:
    """Generate the tokens of named blocks of a prompt: equal names give equal tokens.

    Args:
        block_ids: Names of the blocks, from the start of the prompt.
        block_size: Tokens per block.
        num_tokens: Tokens of the prompt: the last block is truncated.
        vocab_size: Upper bound of token ids, exclusive.
        seed: Integers; another seed gives other tokens for the same names.

    Returns:
        int64, ``num_tokens`` of them or, if the blocks have fewer, all of theirs.
    """
    blocks = [
        random_token_ids(
            block_size, vocab_size=vocab_size, rng=np.random.default_rng([*seed, block_id])
        )
        for block_id in block_ids[: -(-num_tokens // block_size)]
    ]
    return np.concatenate(blocks)[:num_tokens] if blocks else np.empty(0, np.int64)


def words(token_ids: TokenIds) -> str:
    """Convert token ids to as many words; equal ids give equal words."""
    return " ".join(_WORDS[token_id % len(_WORDS)] for token_id in token_ids.tolist())
