"""Shapes of the attention layers whose keys and values are kept, and their KV group; no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

# Kinds of a KV group of layers that keep keys and values, but not all.
WindowKind: TypeAlias = Literal["window", "chunked"]


class KVFormat(NamedTuple):
    """How keys and values are stored.

    Attributes:
        itemsize: bytes of a number.
        scale_bytes: bytes of the scales of each token and KV head.
    """

    itemsize: int
    scale_bytes: int = 0


# One scale for the key and one for the value, as the kernel stores them (``rust/cpu``).
BYTES_FORMAT: Final = KVFormat(itemsize=1, scale_bytes=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Shape of one attention layer's keys and values, as seen in a forward pass.

    Attributes:
        num_kv_heads: heads of keys and values.
        key_size: elements of a key of one head.
        value_size: elements of a value of one head.
        window: sliding window in tokens, or None.
        is_cross: whether it reads keys of an encoder, which are in the pool of the previous layer.
        chunk: positions per chunk, for chunked attention; else None.
    """

    num_kv_heads: int
    key_size: int
    value_size: int
    window: int | None = None
    is_cross: bool = False
    chunk: int | None = None

    @property
    def elements_per_token(self) -> int:
        """Elements per token in this layer's pool."""
        return self.num_kv_heads * (self.key_size + self.value_size)

    def fits_window(self, window: int | None, kind: WindowKind) -> bool:
        """Whether a KV group of this kind keeps all keys that the layer attends to.

        Args:
            window: window or chunk size of the group; None for no group.
            kind: kind of the group.
        """
        if kind == "chunked":
            return self.chunk is not None and self.chunk == window
        return window is not None and self.window is not None and self.window <= window


def group_window(layers: Sequence[LayerShape]) -> int | None:
    """Widest sliding window of the layers, or chunk size if none has one; None without both."""
    windows = [layer.window for layer in layers if layer.window is not None]
    chunks = [layer.chunk for layer in layers if layer.chunk is not None]
    return max(windows or chunks, default=None)


def group_kind(layers: Sequence[LayerShape]) -> WindowKind:
    """Kind of the KV group of layers with a window or chunks."""
    has_windows = any(layer.window is not None for layer in layers)
    has_chunks = any(layer.chunk is not None for layer in layers)
    return "chunked" if has_chunks and not has_windows else "window"


def split_layers(
    layers: Sequence[LayerShape], window: int | None, kind: WindowKind = "window"
) -> tuple[list[LayerShape], list[LayerShape]]:
    """Layers that keep all keys, and those of a KV group; see ``LayerShape.fits_window``."""
    split: tuple[list[LayerShape], list[LayerShape]] = [], []
    for layer in layers:
        split[layer.fits_window(window, kind)].append(layer)
    return split


def kv_bytes_per_block(
    layers: Sequence[LayerShape], *, block_size: int, kv_format: KVFormat
) -> int:
    """Bytes of one block over all layers."""
    return block_size * sum(
        layer.elements_per_token * kv_format.itemsize + layer.num_kv_heads * kv_format.scale_bytes
        for layer in layers
    )
