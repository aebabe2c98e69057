"""``NativeModel``: a decoder over paged keys and values, every layer of it a call of Rust.

Owns the packed weights.  A step's arrays come from `NumpyBuffers`; hidden states live for one step.

Costs: per layer one call; the head runs on the rows that need logits only.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagedserve._core.cpu import DecoderLayer, PackedWeights, rms_norm
from pagedserve.executor.numpy_buffers import StepArrays
from pagedserve.models.rotary import Rope
from pagedserve.native.angles import Angles
from pagedserve.native.config import DecoderConfig
from pagedserve.native.numbers import ComputeDtype, empty, narrow, rounded, widen
from pagedserve.native.pools import LayerPool


class NativeModel:
    """A loaded model.

    Attributes:
        config: What it computes.
        dtype: Dtype of weights, hidden states, keys and values.
        num_threads: Threads of a call.
        weight_bytes: Bytes of all weights.
    """

    def __init__(
        self,
        config: DecoderConfig,
        dtype: ComputeDtype,
        *,
        embedding: PackedWeights,
        layers: Sequence[DecoderLayer],
        norm: NDArray[np.float32],
        head: PackedWeights,
        num_threads: int,
        weight_bytes: int,
    ) -> None:
        """Store the weights.

        Args:
            config: What the model computes.
            dtype: Dtype of weights, hidden states, keys and values.
            embedding: Embedding; the head if they are tied.
            layers: Decoder layers.
            norm: Weight of the last norm, float32 ``[F]``.
            head: Output embedding.
            num_threads: Threads of a call.
            weight_bytes: Bytes of all weights.
        """
        self.config = config
        self.dtype: ComputeDtype = dtype
        self.num_threads = num_threads
        self.weight_bytes = weight_bytes
        self._embedding, self._layers, self._norm, self._head = embedding, layers, norm, head
        ropes = {layer.rope for layer in config.layers if layer.rope is not None}
        self._frequencies = {rope: rope.frequencies(config.head_size) for rope in ropes}
        self._embedding_scale: np.float32 | None = None
        if config.family.scales_embeddings:
            root = np.array([config.hidden_size**0.5], np.float32)
            self._embedding_scale = rounded(root, dtype)[0]

    def logits(
        self, step: StepArrays, pools: Sequence[LayerPool], index: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """Run a step: write its keys and values, and attend over the blocks of each row.

        Args:
            step: Arrays of the step, T tokens.
            pools: KV pool of each layer; written in place.
            index: Positions in T that need logits, int32 ``[N]``.

        Returns:
            Logits ``[N, V]``.
        """
        hidden = self._embed(step.token_ids)
        address, size = hidden.ctypes.data, self.config.head_size
        # Without rotation no angle is read.
        angles: dict[Rope | None, tuple[int, int, int]] = {None: (address, address, 0)}
        computed = [
            (rope, Angles.of(frequencies, step.positions, self.dtype))
            for rope, frequencies in self._frequencies.items()
        ]
        for rope, found in computed:
            angles[rope] = (found.cosines.ctypes.data, found.sines.ctypes.data, size)
        for layer, config, pool in zip(self._layers, self.config.layers, pools, strict=True):
            blocks = step.of_group(pool.group)
            layer.forward(
                address,
                *angles[config.rope],
                pool.address,
                pool.num_blocks,
                pool.block_size,
                blocks.block_tables.reshape(-1),
                step.query_start,
                step.seq_lens,
                blocks.slot_mapping,
                config.window,
                num_threads=self.num_threads,
            )
        return self._logits(hidden[index])

    def _embed(self, token_ids: NDArray[np.int32]) -> NDArray[np.generic]:
        """Hidden states ``[T, F]`` before the first layer."""
        hidden = empty((len(token_ids), self.config.hidden_size), self.dtype)
        self._embedding.gather(token_ids, hidden.ctypes.data, self.num_threads)
        if self._embedding_scale is None:
            return hidden
        return narrow(widen(hidden, self.dtype) * self._embedding_scale, self.dtype)

    def _logits(self, hidden: NDArray[np.generic]) -> NDArray[np.float32]:
        """Logits ``[N, V]`` of hidden states ``[N, F]`` after the last layer, which are changed."""
        num_rows, hidden_size = hidden.shape
        rms_norm(
            dtype=self.dtype,
            num_rows=num_rows,
            x=hidden.ctypes.data,
            output=hidden.ctypes.data,
            weight=self._norm,
            epsilon=self.config.epsilon,
            num_threads=self.num_threads,
        )
        logits = np.empty((num_rows, self.config.vocab_size), np.float32)
        self._head.multiply(
            num_rows=num_rows,
            x=hidden.ctypes.data,
            x_stride=hidden_size,
            output=logits.ctypes.data,
            output_stride=self.config.vocab_size,
            output_dtype="float32",
            num_threads=self.num_threads,
        )
        if (cap := self.config.logit_softcap) is not None:
            np.tanh(np.divide(logits, np.float32(cap), out=logits), out=logits)
            logits *= np.float32(cap)
        return logits
