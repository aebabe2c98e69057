"""The embedding of a native model: from token ids to the hidden states before the first layer."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from pagedserve._core.cpu import PackedWeights
from pagedserve.lora.weights import LoraWeights
from pagedserve.models.adapter_groups import AdapterGroups
from pagedserve.native.config import DecoderConfig
from pagedserve.native.numbers import ComputeDtype, empty, narrow, rounded, widen
from pagedserve.native.tensor_names import safetensors_names


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
