# What a model computes on a CPU.  Its docstrings stand in rust/py/src/cpu and so in the built
# module: `help(pagedserve._core.cpu)`.

from collections.abc import Sequence
from typing import Literal, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "DecoderLayer",
    "PackedWeights",
    "RankExchange",
    "advise_huge_pages",
    "bump",
    "copy_blocks",
    "has_torch_threads",
    "instruction_sets",
    "instructions_in_use",
    "paged_attention",
    "rms_norm",
    "top_k",
    "use_instructions",
    "wait_for_bump",
]

_DType: TypeAlias = Literal["float32", "bfloat16", "float16"]
_Gate: TypeAlias = Literal["silu", "gelu_tanh"]
_InstructionSet: TypeAlias = Literal["portable", "avx2", "avx512", "avx512_bf16"]
# How many rows there are; those with adapters: [G] slots, [G + 1] where the rows of each begin in
# the last, rows, ascending in a slot.
_AdapterRows: TypeAlias = tuple[int, NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]

@final
class PackedWeights:
    def __new__(
        cls,
        panels: NDArray[np.uint32 | np.int8],  # [ceil(N / 64) * units of K * 64]; int8: K of them
        *,
        dtype: _DType,  # of rows, and of weights that are not int8
        in_features: int,  # K
        out_features: int,  # N
        scales: NDArray[np.float32] | None = None,  # [N]: the panels are int8, multiples of these
        bias: NDArray[np.float32] | None = None,  # [N]
        gate: _Gate | None = None,
    ) -> PackedWeights: ...
    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def load_adapter(
        self,
        slot: int,
        # Of each slice: first feature, gates before ups; r; [r * K]; [features * r], scaled.
        slices: Sequence[tuple[int, int, NDArray[np.float32], NDArray[np.float32]]],
    ) -> None: ...
    def multiply(
        self,
        *,
        num_rows: int,
        x: int,  # address of [rows, K]
        x_stride: int,  # elements from a row to the next
        output: int,  # address of [rows, N], or [rows, N / 2] of a gated layer
        output_stride: int,
        output_dtype: _DType,
        adds: bool = False,  # adds to the output instead of writing it
        adapters: _AdapterRows | None = None,
        num_threads: int = 1,
        instructions: _InstructionSet | None = None,
    ) -> None: ...
    def gather(
        self,
        features: NDArray[np.int32],  # [T], each below N
        output: int,  # address of [T, K]
        num_threads: int = 1,
    ) -> None: ...

@final
class DecoderLayer:
    def __new__(
        cls,
        *,
        dtype: _DType,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        epsilon: float,  # of all norms
        scale: float,  # of the scores
        attention_norm: NDArray[np.float32],
        mlp_norm: NDArray[np.float32],
        qkv: PackedWeights,
        output: PackedWeights,
        gate_up: PackedWeights,
        down: PackedWeights,
        softcap: float | None = None,
        attention_output_norm: NDArray[np.float32] | None = None,
        mlp_output_norm: NDArray[np.float32] | None = None,
        query_norm: NDArray[np.float32] | None = None,  # [head_size]
        key_norm: NDArray[np.float32] | None = None,  # [head_size]
    ) -> DecoderLayer: ...
    def forward(
        self,
        hidden: int,  # address of [T, F], changed in place
        cosines: int,  # address of [T, rotary_size]
        sines: int,
        rotary_size: int,
        pool: int,
        num_blocks: int,
        block_size: int,
        block_tables: NDArray[np.int32],  # [R * B]
        query_start: NDArray[np.int32],  # [R + 1]
        seq_lens: NDArray[np.int32],  # [R]
        slot_mapping: NDArray[np.int64],  # [T]
        window: int | None = None,
        adapters: _AdapterRows | None = None,  # of the tokens
        part: Literal["attention", "mlp"] | None = None,
        sums: int = 0,  # address of [T, F], written where there is a part
        num_threads: int = 1,
        instructions: _InstructionSet | None = None,
    ) -> None: ...

def copy_blocks(
    *,
    # Of each layer: address and blocks of the sources, of the destinations, bytes of a block.
    layers: Sequence[tuple[int, int, int, int, int]],
    pairs: NDArray[np.int64],  # [n, 2], source and destination
    num_threads: int = 1,
) -> None: ...
def top_k(
    *,
    logits: int,  # address of float32 [rows, vocab_size]
    vocab_size: int,
    num: int,
    ids: NDArray[np.int64],  # [rows * num], written
    values: NDArray[np.float32],  # [rows * num], written
    rows: Sequence[int] | None = None,  # of the logits
    masks: NDArray[np.int32] | None = None,  # [rows * ceil(vocab_size / 32)], bits of tokens
    num_threads: int = 1,
    instructions: _InstructionSet | None = None,
) -> None: ...
def rms_norm(
    *,
    dtype: _DType,
    num_rows: int,
    x: int,  # address of [rows, features]
    output: int,
    weight: NDArray[np.float32],  # [features]
    epsilon: float,
    num_threads: int = 1,
    instructions: _InstructionSet | None = None,
) -> None: ...

@final
class RankExchange:
    def __new__(
        cls,
        memory: int,  # address of num_bytes
        *,
        rank: int,
        num_ranks: int,
        piece_bytes: int,
    ) -> RankExchange: ...
    @staticmethod
    def num_bytes(*, num_ranks: int, piece_bytes: int) -> int: ...
    # False: to be called again.
    def sum(
        self,
        values: int,  # address
        num: int,
        dtype: _DType,
        *,
        patience: float,
    ) -> bool: ...
    def gather(
        self,
        values: int,  # address
        output: int,  # address of num_ranks * num_bytes
        num_bytes: int,
        *,
        patience: float,
    ) -> bool: ...

def bump(word: int) -> None: ...  # address of a uint32
def wait_for_bump(word: int, seen: int, timeout: float) -> int: ...
def advise_huge_pages(address: int, num_bytes: int) -> None: ...
def instruction_sets() -> list[_InstructionSet]: ...
def instructions_in_use() -> _InstructionSet: ...
def use_instructions(name: str | None) -> None: ...
def has_torch_threads() -> bool: ...
def paged_attention(
    *,
    dtype: _DType,  # of queries, keys, values, pool and output
    query: int,
    query_strides: tuple[int, int],
    key: int,
    key_strides: tuple[int, int],
    value: int,
    value_strides: tuple[int, int],
    pool: int,
    output: int,
    num_heads: int,
    num_kv_heads: int,
    key_size: int,
    value_size: int,
    num_blocks: int,
    block_size: int,
    block_tables: NDArray[np.int32],  # [R * B], of shape [R, B] flattened
    query_start: NDArray[np.int32],  # [R + 1]
    seq_lens: NDArray[np.int32],  # [R]
    slot_mapping: NDArray[np.int64],  # [T]
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: NDArray[np.float32] | None = None,  # [H]
    alibi: NDArray[np.float32] | None = None,  # [H]
    position_bias: NDArray[np.float32] | None = None,  # [H * N]
    causal: bool = True,
    num_threads: int = 1,
    instructions: _InstructionSet | None = None,
) -> None: ...
