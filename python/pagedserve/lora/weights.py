"""LoRA weights of one module."""

from typing import NamedTuple

from torch import Tensor


class LoraWeights(NamedTuple):
    """Low-rank update ``b @ a`` of rank r, added to weights ``[N, K]``.

    Attributes:
        a: ``[r, K]``.
        b: ``[N, r]``, already scaled.
    """

    a: Tensor
    b: Tensor
