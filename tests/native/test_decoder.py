"""All layers of a step in one call: what the layers compute one after another, and its refusals."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagedserve._core.cpu import Decoder, DecoderLayer, PackedWeights
from pagedserve.errors import StepError

FEATURES, HEADS, KV_HEADS, SIZE, INNER = 64, 4, 2, 16, 96
TOKENS, BLOCKS, BLOCK_SIZE, LAYERS = 5, 4, 16, 4
WINDOWS = [None, 3, None, 3]
ROTATIONS = [0, 1, 1, 0]
GROUPS = [0, 1, 0, 1]


def linear(rng: np.random.Generator, depth: int, width: int, gate: Any = None) -> PackedWeights:
    """A layer of random weights, packed: panels of 64 features, ``[N / 64, K, 64]``."""
    panels = rng.standard_normal(-(-width // 64) * depth * 64, np.float32) / depth**0.5
    return PackedWeights(
        panels.view(np.uint32), dtype="float32", in_features=depth, out_features=width, gate=gate
    )


def random_layer(
    rng: np.random.Generator,
    features: int = FEATURES,
    kv_heads: int = KV_HEADS,
    inner: int = INNER,
) -> DecoderLayer:
    """A decoder layer of random weights."""
    ones = np.ones(features, np.float32)
    return DecoderLayer(
        dtype="float32",
        num_heads=HEADS,
        num_kv_heads=kv_heads,
        head_size=SIZE,
        epsilon=1e-5,
        scale=SIZE**-0.5,
        attention_norm=ones,
        mlp_norm=ones,
        qkv=linear(rng, features, (HEADS + 2 * kv_heads) * SIZE),
        output=linear(rng, HEADS * SIZE, features),
        gate_up=linear(rng, features, 2 * inner, "silu"),
        down=linear(rng, inner, features),
    )


class Step:
    """A step of one prompt: arrays, and pools of all layers."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self.layers = [random_layer(rng) for _ in range(LAYERS)]
        self.hidden = rng.standard_normal((TOKENS, FEATURES), np.float32)
        angles = [rng.standard_normal((TOKENS, SIZE), np.float32) for _ in range(2)]
        self.rotations = [np.stack((np.cos(angle), np.sin(angle))) for angle in angles]
        size = BLOCKS * BLOCK_SIZE * KV_HEADS * 2 * SIZE
        self.pools = [np.zeros(size, np.float32) for _ in range(LAYERS)]
        self.blocks = [np.array([block], np.int32) for block in (1, 3)]
        self.slots = [block * BLOCK_SIZE + np.arange(TOKENS) for block in self.blocks]
        self.rows = (np.array([0, TOKENS], np.int32), np.array([TOKENS], np.int32))

    def one_by_one(self) -> None:
        """Run the layers, each in a call."""
        for layer, window, rotation, group, pool in zip(
            self.layers, WINDOWS, ROTATIONS, GROUPS, self.pools, strict=True
        ):
            cosines, sines = self.rotations[rotation]
            layer.forward(
                self.hidden.ctypes.data,
                cosines.ctypes.data,
                sines.ctypes.data,
                SIZE,
                pool.ctypes.data,
                BLOCKS,
                BLOCK_SIZE,
                self.blocks[group],
                self.rows[0],
                self.rows[1],
                self.slots[group],
                window,
            )

    def arguments(self) -> dict[str, Any]:
        """Arguments of all layers in one call."""
        return {
            "hidden": self.hidden.ctypes.data,
            "rotations": [(*(part.ctypes.data for part in both), SIZE) for both in self.rotations],
            "pools": [
                (pool.ctypes.data, BLOCKS, BLOCK_SIZE, group)
                for pool, group in zip(self.pools, GROUPS, strict=True)
            ],
            "groups": list(zip(self.blocks, self.slots, strict=True)),
            "query_start": self.rows[0],
            "seq_lens": self.rows[1],
        }

    def decoder(self) -> Decoder:
        """The layers together."""
        return Decoder(list(zip(self.layers, WINDOWS, ROTATIONS, strict=True)))


@pytest.mark.parametrize("num_threads", [1, 2])
def test_layers_in_one_call_compute_what_they_compute_one_by_one(num_threads: int) -> None:
    apart, together = Step(), Step()
    apart.one_by_one()
    together.decoder().forward(**together.arguments(), num_threads=num_threads)
    assert np.array_equal(together.hidden, apart.hidden)
    assert not np.array_equal(together.hidden, Step().hidden)
    for one, other in zip(together.pools, apart.pools, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_last_layer_can_write_keys_and_values_alone(num_threads: int) -> None:
    whole, cut, before = Step(), Step(), Step()
    whole.decoder().forward(**whole.arguments())
    cut.decoder().forward(**cut.arguments(), last_only_writes=True, num_threads=num_threads)
    placed = list(zip(before.layers, WINDOWS, ROTATIONS, strict=True))[:-1]
    given = before.arguments()
    Decoder(placed).forward(**given | {"pools": given["pools"][:-1]})
    assert np.array_equal(cut.hidden, before.hidden)
    for one, other in zip(cut.pools, whole.pools, strict=True):
        assert np.array_equal(one, other)


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a pool too few": (lambda given: given["pools"].pop(), "pools must be 4, .* got 3"),
    "no rotation": (lambda given: given["rotations"].pop(), "rotations has 1 items; .* index 1"),
    "no group": (lambda given: given["groups"].pop(), "groups has 1 items; .* index 1"),
    "tokens of another step": (
        lambda given: given["groups"].append((given["groups"][0][0], np.arange(TOKENS + 1))),
        "slots of all groups must be those of the same tokens",
    ),
    "a type of the cache": (
        lambda given: given.update(cache_dtype="int4"),
        r'cache_dtype is "int4"; it must be one of \["auto", "int8", "fp8_e4m3", "fp8_e5m2"\]',
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_step_that_does_not_fit_is_refused_before_anything_is_computed(kind: str) -> None:
    spoil, message = WRONG[kind]
    step = Step()
    arguments = step.arguments()
    spoil(arguments)
    with pytest.raises(StepError, match=message):
        step.decoder().forward(**arguments)
    assert np.array_equal(step.hidden, Step().hidden)


def test_layers_of_other_sizes_are_refused() -> None:
    rng = np.random.default_rng(2)
    layers = [random_layer(rng), random_layer(rng, features=2 * FEATURES)]
    with pytest.raises(StepError, match="hidden states of all layers must be alike"):
        Decoder([(layer, None, 0) for layer in layers])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"kv_heads": 0}, "num_heads must be a multiple of num_kv_heads"),
        ({"kv_heads": HEADS + 1}, "num_heads must be a multiple of num_kv_heads"),
        ({"inner": 40}, "down must take a multiple of 32 features.*; it takes 40"),
    ],
)
def test_a_layer_that_no_step_accepts_is_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(StepError, match=message):
        random_layer(np.random.default_rng(3), **sizes)
