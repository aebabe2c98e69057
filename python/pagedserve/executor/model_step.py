"""What the model of a rank needs of a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pagedserve.cache.moves import BlockMoves
from pagedserve.executor.protocol import StepSizes
from pagedserve.lora.weights import LoraWeights
from pagedserve.models.forward import StepImages


@dataclass(frozen=True, slots=True, kw_only=True)
class StepExtras:
    """What few steps need, in host memory.

    Attributes:
        adapters: Adapters to load before the model runs: slot, and weights by module.
        images: Image features of the step's tokens; None for text only.
        encoder_states: Encoder states ``[S, F]`` of the prompts that start in the step, by row.
        token_types: Segment of each token of text pairs, int64 ``[T]``, for a pooling model.
        state_slots: Slot of each row's state, int32 ``[R]``, for ranks besides 0, whose buffers do
            not share it; None if the buffers have it.
        cross: Likewise the states of each row's encoder, as in ``StepBuffers.cross_tables``.
    """

    adapters: Sequence[tuple[int, Mapping[str, LoraWeights]]] = ()
    images: StepImages | None = None
    encoder_states: Mapping[int, Tensor] = field(default_factory=dict)
    token_types: NDArray[np.int64] | None = None
    state_slots: NDArray[np.int32] | None = None
    cross: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None


NO_EXTRAS: Final = StepExtras()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStep:
    """Input of the model, besides the arrays in the buffers: equal on all ranks.

    Attributes:
        sizes: Sizes of the step; without rows only the moves are executed.
        moves: Moves in the pool of each KV group, which precede the model; empty without any.
        more_index: Positions in T that need logits besides those of the samples, int32 ``[P]`` in
            host memory.
        extras: ``NO_EXTRAS`` for most steps.
    """

    sizes: StepSizes
    moves: Sequence[BlockMoves] = ()
    more_index: Tensor | None = None
    extras: StepExtras = NO_EXTRAS
