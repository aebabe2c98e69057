"""What the model of a rank needs of a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from pagedserve.cache.engine import BlockMoves
from pagedserve.executor.protocol import StepSizes
from pagedserve.lora.weights import LoraWeights
from pagedserve.models.flat_batch import StepImages


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStep:
    """Input of the model, besides the arrays in the buffers: equal on all ranks.

    All tensors are in host memory.

    Attributes:
        sizes: Sizes of the step; without rows only the moves are executed.
        moves: Moves of blocks and states, which precede the model.
        adapters: Adapters to load before the model runs: slot, and weights by module.
        more_index: Positions in T that need logits besides those of the samples, int32 ``[P]``.
        images: Image features of the step's tokens; None for text only.
        encoder_states: Encoder states ``[S, F]`` of the prompts that start in the step, by row.
        token_types: Segment of each token of text pairs, int64 ``[T]``, for a pooling model.
    """

    sizes: StepSizes
    moves: BlockMoves
    adapters: Sequence[tuple[int, Mapping[str, LoraWeights]]] = ()
    more_index: Tensor | None = None
    images: StepImages | None = None
    encoder_states: Mapping[int, Tensor] = field(default_factory=dict)
    token_types: Tensor | None = None
