"""What an adapter adds to one module."""

from typing import NamedTuple

from torch import Tensor


class LoraWeights(NamedTuple):
    """A module with weights ``[N, K]`` gets ``b @ a`` added to them, of rank r.

    Attributes:
        a: ``[r, K]``.
        b: ``[N, r]``, scaled already.
    """

    a: Tensor
    b: Tensor
