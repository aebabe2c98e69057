"""Cross-attention of decoders to the states of an encoder.

A layer of such a decoder attends twice: self-attention to its tokens, and cross-attention to the
keys of the encoder's states.  Both are in one pool, in blocks of different tables: those of the
encoder are written by the step in which a prompt starts and read by all later ones.

Every backend writes while it attends, and needs no fewer keys than queries in a row.  So each token
is a separate row here, over all keys of its encoder, and each encoder state is one over the first
key of its block, whose result is dropped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from pagedserve.attention.backend import AttentionBackend
from pagedserve.attention.interface import AttentionCall, PagedAttention, layers_of
from pagedserve.attention.metadata import AttentionMetadata, BatchLayout
from pagedserve.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class CrossStep:
    """Cross-attention inputs of a step.

    Attributes:
        states: ``[S, F]``, encoder states whose keys this step writes; a placeholder if none.
        reading: a row for each of the step's tokens.
        writing: a row for each of S states; None if no keys are written.
    """

    states: Tensor
    reading: AttentionMetadata
    writing: AttentionMetadata | None

    @classmethod
    def of(
        cls,
        layout: BatchLayout,
        lens: NDArray[np.int32],
        tables: NDArray[np.int32],
        encoded: Mapping[int, Tensor],
        nothing: Tensor,
    ) -> Self:
        """Create the inputs from the rows of a step.

        Args:
            layout: rows of the step.
            lens: ``[R]``, number of states of each row's encoder.
            tables: ``[R, C]``, block tables of their keys.
            encoded: ``[S, F]`` each, by row, states whose keys are to be written.
            nothing: ``[1, F]``, placeholder if there are no states.
        """
        device, block_size = nothing.device, layout.block_size
        num_queries = np.diff(layout.query_start)
        reading = _rows_of_one(
            np.repeat(lens, num_queries), np.repeat(tables, num_queries, axis=0), block_size
        )
        unwritten = torch.full((len(reading.seq_lens),), -1, device=device)
        if not encoded:
            return cls(nothing, AttentionMetadata(reading, unwritten), None)
        places = [(row, np.arange(len(states))) for row, states in encoded.items()]
        blocks = np.concatenate([tables[row, place // block_size] for row, place in places])
        offsets = np.concatenate([place % block_size for _, place in places])
        written = _rows_of_one(np.ones(len(blocks), np.int32), blocks[:, None], block_size)
        slots = torch.from_numpy(blocks.astype(np.int64) * block_size + offsets)
        return cls(
            torch.cat(list(encoded.values())),
            AttentionMetadata(reading, unwritten),
            AttentionMetadata(written, slots.to(device)),
        )


def _rows_of_one(
    seq_lens: NDArray[np.int32], tables: NDArray[np.int32], block_size: int
) -> BatchLayout:
    """Rows of one query each."""
    query_start = np.arange(len(seq_lens) + 1, dtype=np.int32)
    return BatchLayout(query_start, seq_lens, tables, block_size)


class EncoderDecoderAttention(PagedAttention):
    """Attention of a decoder's step, with cross-attention over the tables of encoders.

    Layers with even indices are self-attention; the next one is its cross-attention.
    """

    def __init__(
        self,
        metadata: AttentionMetadata,
        pools: Sequence[Tensor],
        backend: AttentionBackend,
        step: CrossStep,
    ) -> None:
        """Store a step.

        Args:
            metadata: the step.
            pools: pool of each layer, for the keys of both of its calls; see `PagedAttention`.
            backend: attention backend.
            step: cross-attention inputs of its tokens.
        """
        of_calls = [pool for pool in pools for _ in range(2)]
        super().__init__(metadata, of_calls, [None] * len(of_calls), backend)
        self._step = step

    def answer(self, call: AttentionCall) -> Tensor:
        """Write and attend; cross-attention first writes the encoders' new keys, if any."""
        layers = layers_of(call.module)
        is_cross = any(layer % 2 for layer in layers)
        if not is_cross or call.mask is not None:
            return super().answer(call)
        pool = self.attend_next(layers).pool
        options = replace(call.options, causal=False)
        if self._step.writing is not None:
            self._backend.write_and_attend(
                call.key, call.key, call.value, pool, metadata=self._step.writing, options=options
            )
        num_heads = call.key.shape[1]
        return self._backend.write_and_attend(
            call.query,
            call.query[:, :num_heads],
            call.query.new_zeros(1, num_heads, call.query.shape[2], call.value.shape[-1]),
            pool,
            metadata=self._step.reading,
            options=options,
        )


class WholeAttention:
    """Full attention of an encoder over a single text."""

    def answer(self, call: AttentionCall) -> Tensor:
        """Attend to the call's keys.

        Raises:
            UnsupportedModelError: some keys are masked, or scores are modified.
        """
        if call.mask is not None or call.options.window is not None or not call.options.is_plain:
            raise UnsupportedModelError(
                "the encoder hides keys from its tokens or edits their scores; accepted are "
                "encoders whose tokens see all of a text"
            )
        answer = functional.scaled_dot_product_attention(
            call.query,
            call.key,
            call.value,
            attn_mask=call.position_bias,
            scale=call.options.scale,
            enable_gqa=call.query.shape[1] != call.key.shape[1],
        )
        return answer[0].transpose(0, 1)
