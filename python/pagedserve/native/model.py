"""``NativeModel``: a decoder over paged keys and values, all layers of it one call of Rust.

Owns the packed weights.  A step's arrays come from `NumpyBuffers`; hidden states live for one step.

Costs: one call for all layers; norm and head run on the rows that need outputs only, as does the
last layer, but for keys and values, where these are few.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagedserve._core.cpu import Decoder, DecoderLayer, PackedWeights, rms_norm
from pagedserve.executor.numpy_buffers import StepArrays
from pagedserve.lora.weights import LoraWeights
from pagedserve.models.adapter_groups import AdapterGroups
from pagedserve.models.rotary import half_angles
from pagedserve.native.config import DecoderConfig
from pagedserve.native.numbers import ComputeDtype, empty, narrow, rounded, widen
from pagedserve.native.pools import LayerPool
from pagedserve.native.tensor_names import safetensors_names

# Tokens of a step for each output from which on the last layer is computed of outputs alone; its
# projection of queries, keys and values is then computed twice.
_TOKENS_PER_OUTPUT: Final = 2


class Embedding:
    """An embedding, with the adapters of its slots.

    Attributes:
        targets: Tokens and features, by its name in transformers' model.
    """

    def __init__(self, weights: PackedWeights, config: DecoderConfig, dtype: ComputeDtype) -> None:
        """Store the weights; those of the head if they are tied."""
        self._name = safetensors_names(config).embedding.removesuffix(".weight")
        self.targets = {self._name: (config.vocab_size, config.hidden_size)}
        self._weights = weights
        self._dtype: ComputeDtype = dtype
        self._size = config.hidden_size
        self._scale = np.float32(1)
        if config.family.scales_embeddings:
            self._scale = rounded(np.array([config.hidden_size**0.5], np.float32), dtype)[0]
        self._slots: dict[int, LoraWeights] = {}

    def load(self, slot: int, weights: Mapping[str, LoraWeights]) -> None:
        """Load these weights, by name, into a slot, replacing its contents."""
        self._slots.pop(slot, None)
        if self._name in weights:
            self._slots[slot] = weights[self._name]

    def states(
        self, token_ids: NDArray[np.int32], adapters: AdapterGroups | None, num_threads: int
    ) -> NDArray[np.generic]:
        """Hidden states ``[T, F]`` of tokens.

        Args:
            token_ids: The tokens, int32 ``[T]``.
            adapters: Those with adapters; None without any.
            num_threads: Threads that gather.
        """
        hidden = empty((len(token_ids), self._size), self._dtype)
        self._weights.gather(token_ids, hidden.ctypes.data, num_threads)
        if self._scale != 1:
            hidden = narrow(widen(hidden, self._dtype) * self._scale, self._dtype)
        for slot, rows in () if adapters is None else adapters.of_slots():
            if slot in self._slots:
                a, b = self._slots[slot]
                changes = self._scale * (a[:, token_ids[rows]].T @ b.T)
                hidden[rows] = narrow(widen(hidden[rows], self._dtype) + changes, self._dtype)
        return hidden


# Matrix products of a decoder layer, some of several linear layers.
Product: TypeAlias = Literal["qkv", "output", "gate_up", "down"]


class NativeLayer(NamedTuple):
    """A decoder layer.

    Attributes:
        decoder: The layer.
        products: Weights of its matrix products, which it holds too.
    """

    decoder: DecoderLayer
    products: Mapping[Product, PackedWeights]


class NativeModel:
    """A loaded model.

    Attributes:
        config: What it computes.
        dtype: Dtype of weights, hidden states, keys and values.
        embedding: Embedding.
        layers: Decoder layers.
        head: Output embedding, or weights of classes; None for a model whose states are pooled.
        num_threads: Threads of a call.
        weight_bytes: Bytes of all weights.
    """

    def __init__(
        self,
        config: DecoderConfig,
        dtype: ComputeDtype,
        *,
        embedding: PackedWeights,
        layers: Sequence[NativeLayer],
        norm: NDArray[np.float32],
        head: PackedWeights | None,
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
            head: Output embedding, or weights of classes.
            num_threads: Threads of a call.
            weight_bytes: Bytes of all weights.
        """
        self.config = config
        self.dtype: ComputeDtype = dtype
        self.num_threads = num_threads
        self.weight_bytes = weight_bytes
        self.embedding = Embedding(embedding, config, dtype)
        self.layers, self.head, self._norm = layers, head, norm
        ropes = list(dict.fromkeys(layer.rope for layer in config.layers))
        self._frequencies = [
            None if rope is None else rope.frequencies(config.head_size) for rope in ropes
        ]
        placed = [
            (layer.decoder, of_layer.window, ropes.index(of_layer.rope))
            for layer, of_layer in zip(layers, config.layers, strict=True)
        ]
        self._decoder, self._last_layer = Decoder(placed), Decoder(placed[-1:])

    def outputs(
        self, step: StepArrays, pools: Sequence[LayerPool], index: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """Run a step: write its keys and values, and attend over the blocks of each row.

        Args:
            step: Arrays of the step, T tokens.
            pools: KV pool of each layer; written in place.
            index: Positions in T that need outputs, int32 ``[N]``.

        Returns:
            Logits ``[N, V]``; hidden states ``[N, F]`` of a model without a head.
        """
        adapters, of_outputs = _adapter_groups(step, index)
        hidden = self.embedding.states(step.token_ids, adapters, self.num_threads)
        # Of a token without an output, nothing reads what the last layer makes but keys and values.
        is_cut = _TOKENS_PER_OUTPUT * len(index) <= len(hidden)
        self._run(self._decoder, hidden, step, pools, adapters, last_only_writes=is_cut)
        states = hidden[index]
        if is_cut and len(index) > 0:
            self._run(self._last_layer, states, step.of_tokens(index), pools[-1:], of_outputs)
        states = self._normalized(states)
        if self.head is None:
            return widen(states, self.dtype)
        return self._logits(states, self.head, of_outputs)

    def _run(
        self,
        decoder: Decoder,
        hidden: NDArray[np.generic],
        step: StepArrays,
        pools: Sequence[LayerPool],
        adapters: AdapterGroups | None,
        *,
        last_only_writes: bool = False,
    ) -> None:
        """Run layers on hidden states ``[T, F]`` of a step, in place.

        Args:
            decoder: The layers.
            hidden: Hidden states.
            step: Arrays of the step.
            pools: KV pool of each of the layers.
            adapters: Adapters of the tokens.
            last_only_writes: Whether the last layer only writes its keys and values.
        """
        address, size = hidden.ctypes.data, self.config.head_size
        rotations = self._rotations(step.positions)
        groups = [step.of_group(number) for number in range(len(step.groups) + 1)]
        decoder.forward(
            address,
            # Without rotation no angle is read.
            [
                (found[0].ctypes.data, found[1].ctypes.data, size)
                if found
                else (address, address, 0)
                for found in rotations
            ],
            [(pool.address, pool.num_blocks, pool.block_size, pool.group) for pool in pools],
            [(group.block_tables.reshape(-1), group.slot_mapping) for group in groups],
            step.query_start,
            step.seq_lens,
            adapters=None if adapters is None else adapters.arrays,
            last_only_writes=last_only_writes,
            cache_dtype=pools[0].cache_dtype,
            num_threads=self.num_threads,
        )

    def _rotations(self, positions: NDArray[np.int64]) -> list[list[NDArray[np.generic]] | None]:
        """Cosines and sines of positions ``[T]`` with each rope, None for no rotation.

        Both are ``[T, head_size]`` in the model's dtype.
        """

        def doubled(half: NDArray[np.float32]) -> NDArray[np.generic]:
            rounded_half = narrow(half, self.dtype)
            return np.concatenate((rounded_half, rounded_half), axis=1)

        return [
            None
            if frequencies is None
            else [doubled(half) for half in half_angles(frequencies, positions)]
            for frequencies in self._frequencies
        ]

    def _normalized(self, hidden: NDArray[np.generic]) -> NDArray[np.generic]:
        """Apply the last norm to hidden states ``[N, F]``, in place."""
        rms_norm(
            dtype=self.dtype,
            num_rows=len(hidden),
            x=hidden.ctypes.data,
            output=hidden.ctypes.data,
            weight=self._norm,
            epsilon=self.config.epsilon,
            num_threads=self.num_threads,
        )
        return hidden

    def _logits(
        self, states: NDArray[np.generic], head: PackedWeights, adapters: AdapterGroups | None
    ) -> NDArray[np.float32]:
        """Logits ``[N, V]`` of states ``[N, F]`` after the last norm."""
        num_rows, hidden_size = states.shape
        logits = np.empty((num_rows, head.out_features), np.float32)
        head.multiply(
            num_rows=num_rows,
            x=states.ctypes.data,
            x_stride=hidden_size,
            output=logits.ctypes.data,
            output_stride=head.out_features,
            output_dtype="float32",
            adapters=None if adapters is None else adapters.arrays,
            num_threads=self.num_threads,
        )
        if (cap := self.config.head.softcap) is not None:
            np.tanh(np.divide(logits, np.float32(cap), out=logits), out=logits)
            logits *= np.float32(cap)
        return logits


def _adapter_groups(
    step: StepArrays, index: NDArray[np.int32]
) -> tuple[AdapterGroups | None, AdapterGroups | None]:
    """Adapters of a step's tokens, and of those at ``index``; None if no row has one."""
    if step.adapter_slots.max(initial=-1) < 0:
        return None, None
    slots = np.repeat(step.adapter_slots, np.diff(step.query_start))
    return AdapterGroups(slots), AdapterGroups(slots[index])
