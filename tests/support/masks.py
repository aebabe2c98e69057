"""Grammars and masks of chosen tokens."""

from collections.abc import Iterable
from functools import cache

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pagedserve.sampling.grammar import GrammarState, GrammarStates
from pagedserve.sampling.grammar_compiler import GrammarCompiler
from pagedserve.sampling_params.structured_outputs import StructuredOutputsParams


def packed(allowed: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Bits of a boolean array ``[N, V]``, int32 ``[N, ceil(V / 32)]``, packed by numpy."""
    bits = np.packbits(allowed, axis=1, bitorder="little")
    missing = -bits.shape[1] % 4
    return np.pad(bits, ((0, 0), (0, missing))).view(np.int32)


def state_of(token_ids: Iterable[int], vocab_size: int) -> GrammarState:
    """A grammar of one of these tokens, at its beginning."""
    tokens = ",".join(map(str, token_ids))
    return _compiled(f"start: <[{tokens}]>", vocab_size).at([])


def dead_state(vocab_size: int) -> GrammarState:
    """A grammar whose text has gone wrong."""
    return _compiled('start: "a"', vocab_size).at([0])


def _compiled(grammar: str, vocab_size: int) -> GrammarStates:
    return _compiler(vocab_size).compile(StructuredOutputsParams(grammar=grammar)).states(1)


@cache
def _compiler(vocab_size: int) -> GrammarCompiler:
    """For a vocabulary of bytes, and of tokens that mean nothing behind them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    return GrammarCompiler(fast, vocab_size, [])
