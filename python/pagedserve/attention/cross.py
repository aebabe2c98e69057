"""Attention of decoders that see what an encoder made of another text.

A layer of such a decoder attends twice: to its own tokens, as any does, and across, to the keys of
the encoder's states.  Both lie in one pool, in blocks of different tables: those across are written
by the step that a prompt begins in and read by all that follow.

Every backend writes while it attends, and takes no fewer keys than queries in a row.  So a token is
a row of its own here, over all keys of its encoder, and one of an encoder's is one over the first
key of its block, whose answer is dropped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from pagedserve.attention.interface import AttentionCall, PagedAttention
from pagedserve.attention.metadata import AttentionMetadata, BatchLayout, WriteAndAttend
from pagedserve.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class CrossStep:
    """What the tokens of a step see of encoders.

    Attributes:
        states: ``[S, F]``, of the encoders whose keys this step writes; some if it writes none.
        reading: a row for each of the step's tokens.
        writing: a row for each of S states; None where no keys are written.
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
        """Of the rows of a step.

        Args:
            layout: its rows.
            lens: ``[R]``, states of each row's encoder.
            tables: ``[R, C]``, the blocks of their keys.
            encoded: ``[S, F]`` each, by row, the states whose keys are to be written.
            nothing: ``[1, F]``, stands for states where there are none.
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
    """Answers the calls of a step of a decoder, those across from the tables of encoders."""

    def __init__(
        self,
        metadata: AttentionMetadata,
        pools: Sequence[Tensor],
        write_and_attend: WriteAndAttend,
        step: CrossStep,
    ) -> None:
        """Take a step.

        Args:
            metadata: the step.
            pools: of each layer, for the keys of both of its calls; see `PagedAttention`.
            write_and_attend: the backend's.
            step: what its tokens see of encoders.
        """
        of_calls = [pool for pool in pools for _ in range(2)]
        super().__init__(metadata, of_calls, [None] * len(of_calls), write_and_attend)
        self._step = step

    def answer(self, call: AttentionCall) -> Tensor:
        """See `PagedAttention`; a call across writes the encoders' keys, if there are new ones."""
        is_cross = self.num_calls % 2 == 1
        if not is_cross or call.mask is not None:
            return super().answer(call)
        pool = self.next_layer().pool
        options = replace(call.options, causal=False)
        if self._step.writing is not None:
            self._write_and_attend(
                call.key, call.key, call.value, pool, metadata=self._step.writing, options=options
            )
        num_heads = call.key.shape[1]
        return self._write_and_attend(
            call.query,
            call.query[:, :num_heads],
            call.query.new_zeros(1, num_heads, call.query.shape[2], call.value.shape[-1]),
            pool,
            metadata=self._step.reading,
            options=options,
        )


class WholeAttention:
    """Answers the calls of an encoder that has one text to itself: a token sees all of it."""

    def answer(self, call: AttentionCall) -> Tensor:
        """Attend to the call's own keys.

        Raises:
            UnsupportedModelError: if some of them are hidden, or scores are edited.
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
