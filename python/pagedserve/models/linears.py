"""Linear layers whose weights are packed once for the CPU's matrix kernels (oneDNN, through torch).

torch's own linear layer hands oneDNN the weights as they lie and has them rearranged in every call;
with few rows, as in decoding, that costs more than the product.  The packed copy takes the place of
the original, so nothing is held twice but a head that shares its weights with the embedding.

The operations are not public ones of torch: where they are missing, or do not give what the layer
itself gives, the layer stays as it was.
"""

from typing import Any, Final, cast

import torch
from torch import Tensor, nn

# Rows that the packing is chosen for: a decode step of many sequences, or a piece of a prompt.
_ROWS: Final = 64
_DTYPES: Final = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Module):
    """Computes what an ``nn.Linear`` computes."""

    def __init__(self, linear: nn.Linear) -> None:
        """Pack the weights of ``linear``, which is left as it is."""
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        # No parameter: a packed tensor has no storage that could be saved or moved.
        self.packed_weight = _pack(linear.weight.detach())

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        return self.packed_weight.numel() * self.packed_weight.element_size()

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        return _product(x, self.packed_weight, self.bias)


@torch.inference_mode()
def pack_linears(model: nn.Module) -> int:
    """Pack the linear layers of a model on the CPU, in place.

    Returns:
        How many layers are packed; 0 where the CPU or this torch cannot.
    """
    if not _is_available():
        return 0
    num_packed = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and _can_pack(child.weight):
                packed = PackedLinear(child)
                if _agree(child, packed):
                    setattr(module, name, packed)
                    num_packed += 1
    return num_packed


def _can_pack(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype in _DTYPES


def _agree(linear: nn.Linear, packed: PackedLinear) -> bool:
    """Whether both give the same, but for the order of their sums."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, linear.in_features, generator=generator).to(linear.weight.dtype)
    expected = linear(x).float()
    # Roundings of a sum grow with the square root of its length.
    error = 4 * torch.finfo(linear.weight.dtype).eps * linear.in_features**0.5
    largest = float(expected.abs().max())
    return bool((packed(x).float() - expected).abs().max() <= error * max(largest, 1e-3))


# There is no public name for what follows.
_OPERATIONS: Final[Any] = torch.ops.mkldnn


def _is_available() -> bool:
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return torch.backends.mkldnn.is_available() and all(hasattr(_OPERATIONS, one) for one in names)


def _pack(weight: Tensor) -> Tensor:
    return cast(Tensor, _OPERATIONS._reorder_linear_weight(weight, _ROWS))  # noqa: SLF001


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return cast(Tensor, _OPERATIONS._linear_pointwise(x, weight, bias, "none", [], ""))  # noqa: SLF001
