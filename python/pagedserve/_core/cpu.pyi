# CPU kernels.  Docstrings are written in rust/py/src/cpu, and `make stubs` copies them here.

from collections.abc import Sequence
from typing import Literal, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Decoder",
    "DecoderLayer",
    "PackedWeights",
    "RankExchange",
    "advise_huge_pages",
    "bump",
    "copy_blocks",
    "draw",
    "instruction_sets",
    "instructions_in_use",
    "logprobs",
    "pack_layers",
    "paged_attention",
    "pass_texts",
    "read_pairs",
    "read_texts",
    "rms_norm",
    "round_to_blocks",
    "thread_waits",
    "top_k",
    "use_instructions",
    "wait_for_bump",
]

_DType: TypeAlias = Literal["float32", "bfloat16", "float16"]
_Gate: TypeAlias = Literal["silu", "gelu_tanh"]
_CacheDtype: TypeAlias = Literal["auto", "int8", "fp8_e4m3", "fp8_e5m2"]
_InstructionSet: TypeAlias = Literal["portable", "avx2", "avx512", "avx512_bf16", "amx", "neon"]
# How many rows there are; those with adapters: [G] slots, [G + 1] where the rows of each begin in
# the last, rows, ascending in a slot.
_AdapterRows: TypeAlias = tuple[int, NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]
# Panels, written: uint32 units, or int8 with scales; type that weights are rounded to; parts, each
# as file descriptor, offset of the first row, rows, storage, scales of the rows [rows] or None, and
# size of interleaved heads or 0; K; whether the first part is the gate of the second; scales of
# panels [N], written; sections.
_PackedLayer: TypeAlias = tuple[
    NDArray[np.uint32 | np.int8 | np.uint8],
    _DType,
    Sequence[tuple[int, int, int, str, NDArray[np.float32] | None, int]],
    int,
    bool,
    NDArray[np.float32] | None,
    Sequence[tuple[str, int]] | None,
]

@final
class PackedWeights:
    """Weights of a linear layer of K to N features, packed for the kernels.

    rust/cpu/src/linear.rs describes the layout.

    Args:
        panels: ``ceil(N / 64)`` panels of ``K * 64`` weights, as uint32 units; with ``scales`` int8
            ``[ceil(N / 64) * K * 64]``; with ``sections`` uint8.  Kept by reference and must not be
            written afterwards.
        dtype: Type of the rows.
        in_features: Number of input features K.
        out_features: Number of output features N.
        scales: Scales of int8 panels and of sections of "I8_ROWS" or "I8_TURNED", float32 ``[N]``.
        bias: Bias, float32 ``[N]``.
        gate: Activation between the halves of a gated layer: "silu" or "gelu_tanh".
        sections: Panels whose products are those of bytes: format and number of features of each
            section: a block type of GGUF such as "Q4_K", those of 64 inputs "Q4_0_64" and
            "Q4_1_64", "I8_ROWS", bytes that share a scale in a feature and in a row, or
            "I8_TURNED", these of inputs that are turned by 64 (rust/cpu/src/bytes/turn.rs).  All
            but the last are multiples of 64 features; sections share the scales of rows.
        weight_dtype: Type of the weights in units: that of the rows, or any for rows of float32.
            None for that of the rows.

    Raises:
        ``StepError``: Arguments that do not fit each other.
    """

    def __new__(
        cls,
        # [ceil(N / 64) * units of K * 64]; int8: K of them; uint8: as their sections say
        panels: NDArray[np.uint32 | np.int8 | np.uint8],
        *,
        dtype: _DType,  # of rows
        in_features: int,  # K
        out_features: int,  # N
        scales: NDArray[np.float32] | None = None,  # [N]: the panels are int8, multiples of these
        bias: NDArray[np.float32] | None = None,  # [N]
        gate: _Gate | None = None,
        sections: Sequence[tuple[str, int]] | None = None,  # format, features
        weight_dtype: _DType | None = None,  # of units; None: of rows
    ) -> PackedWeights: ...
    @property
    def in_features(self) -> int:
        """Number of input features K."""
    @property
    def out_features(self) -> int:
        """Number of output features N, both halves of a gated layer."""
    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights, scales included."""
    def load_adapter(
        self,
        slot: int,
        # Of each slice: first feature, gates before ups; r; [r * K]; [features * r], scaled.
        slices: Sequence[tuple[int, int, NDArray[np.float32], NDArray[np.float32]]],
    ) -> None:
        """Replace the adapter of a slot.

        Args:
            slot: Slot number.
            slices: Slices of the adapter, in order of their features: first feature (in a gated
                layer gates before ups), rank r, A as float32 ``[r * K]``, scaled B as float32
                ``[features * r]``.  An empty list empties the slot.

        Raises:
            ``StepError``: Slices that do not fit the layer.
        """
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
    ) -> None:
        """Multiply rows with the weights and add the outputs of their adapters.

        Args:
            num_rows: Number of rows.
            x: Address of ``[num_rows, K]``.
            x_stride: Elements from a row to the next.
            output: Address of ``[num_rows, N]``, or ``[num_rows, N / 2]`` of a gated layer.
            output_stride: Elements from a row to the next.
            output_dtype: Type of the output.
            adds: Whether to add to the output instead of overwriting it.
            adapters: Number of rows; int32 ``[G]`` slots in use; int32 ``[G + 1]`` starts of their
                rows in the last array; int32 row indices, ascending within a slot.
            num_threads: Number of threads, the caller's included.
            instructions: Instruction set; None for the one in use.

        Raises:
            ``StepError``: Arguments that do not fit each other.
        """
    def gather(
        self,
        features: NDArray[np.int32],  # [T], each below N
        output: int,  # address of [T, K]
        num_threads: int = 1,
    ) -> None:
        """Copy the weights of some output features, converted to the dtype.

        Args:
            features: Output features, int32 ``[T]``, each below N.
            output: Address of ``[T, K]``, contiguous.
            num_threads: Number of threads, the caller's included.

        Raises:
            ``StepError``: A feature that does not exist.
        """

@final
class DecoderLayer:
    """Decoder layer of the Llama architecture with packed weights.

    It computes norm, attention, norm and gated MLP, with residual connections.

    F hidden features, H query heads and Hkv KV heads of size D.

    Args:
        dtype: Type of hidden states, weights, keys and values.
        num_heads: Number of query heads H.
        num_kv_heads: Number of KV heads Hkv.
        head_size: Head size D.
        epsilon: Epsilon of all norms.
        scale: Factor of the scores.
        attention_norm: Norm weight before attention, float32 ``[F]``.
        mlp_norm: Norm weight before the MLP, float32 ``[F]``.
        qkv: Query, key and value projection, F to ``(H + 2 * Hkv) * D`` features.
        output: Output projection, ``H * D`` to F features.
        gate_up: Gate and up projection, F to twice the inner features, made with a gate.
        down: Down projection, inner features to F.
        softcap: Scores become ``softcap * tanh(scores / softcap)``.
        attention_output_norm: Norm weight after attention, float32 ``[F]``.
        mlp_output_norm: Norm weight after the MLP, float32 ``[F]``.
        query_norm: Norm weight of each query head, float32 ``[D]``.
        key_norm: Norm weight of each key head, float32 ``[D]``.

    Raises:
        ``StepError``: Weights that do not fit each other.
    """

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
        cache_dtype: _CacheDtype = "auto",
        num_threads: int = 1,
        instructions: _InstructionSet | None = None,
    ) -> None:
        """Compute the layer for a step of R rows and T tokens.

        Args:
            hidden: Address of ``[T, F]``, contiguous, changed in place.
            cosines: Rotary cosines; address of ``[T, rotary_size]``, contiguous.
            sines: Rotary sines; address of ``[T, rotary_size]``, contiguous.
            rotary_size: Elements of a head that are rotated.
            pool: Address of the layer's KV blocks, in the layout of `paged_attention`.
            num_blocks: Number of blocks of the pool.
            block_size: Tokens per block.
            block_tables: Block tables, int32 ``[R * B]``.
            query_start: Row boundaries in T, int32 ``[R + 1]``.
            seq_lens: Number of keys of each row, int32 ``[R]``.
            slot_mapping: Slots of keys and values, int64 ``[T]``.
            window: A query attends only to keys with position > query position - window.
            adapters: Adapters of the tokens, as for `PackedWeights.multiply`.
            part: None computes the layer; "attention" and "mlp" write the output of that module
                before its norm to ``sums`` and leave ``hidden`` unchanged, for tensor parallelism:
                a partial sum over this rank's heads or inner features.
            sums: Address of ``[T, F]``, contiguous; used with ``part``.
            cache_dtype: Storage type of keys and values in the pool, as of `paged_attention`.
            num_threads: Number of threads, the caller's included.
            instructions: Instruction set; None for the one in use.

        Raises:
            ``StepError``: Arguments that do not fit each other; nothing was read or written.
        """

@final
class Decoder:
    """Decoder layers that run one after another.

    Args:
        layers: For each layer: the layer, its window (a query attends only to keys with position >
            query position - window), and the index of its rotation.

    Raises:
        ``StepError``: Layers with hidden states of different sizes or types.
    """

    def __new__(
        cls,
        layers: Sequence[tuple[DecoderLayer, int | None, int]],  # layer, window, its rotation
    ) -> Decoder: ...
    def forward(
        self,
        hidden: int,  # address of [T, F], changed in place
        # Of each rotation: addresses of cosines and sines [T, rotary_size], rotary_size.
        rotations: Sequence[tuple[int, int, int]],
        # Of each layer: address, blocks and tokens of a block of its pool, its KV group.
        pools: Sequence[tuple[int, int, int, int]],
        # Of each KV group: block tables [R * B] and slots [T].
        groups: Sequence[tuple[NDArray[np.int32], NDArray[np.int64]]],
        query_start: NDArray[np.int32],  # [R + 1]
        seq_lens: NDArray[np.int32],  # [R]
        *,
        adapters: _AdapterRows | None = None,  # of the tokens
        last_only_writes: bool = False,
        cache_dtype: _CacheDtype = "auto",
        num_threads: int = 1,
        instructions: _InstructionSet | None = None,
    ) -> None:
        """Compute all layers for a step of R rows and T tokens.

        Args:
            hidden: Address of ``[T, F]``, contiguous, changed in place.
            rotations: Addresses of cosines and sines ``[T, rotary_size]``, contiguous, and
                ``rotary_size``, the elements of a head that are rotated.
            pools: For each layer: address of its KV blocks, in the layout of `paged_attention`,
                number of blocks, tokens per block, index of its KV group.
            groups: For each KV group: block tables, int32 ``[R * B]``, and slots of keys and
                values, int64 ``[T]``.
            query_start: Row boundaries in T, int32 ``[R + 1]``.
            seq_lens: Number of keys of each row, int32 ``[R]``.
            adapters: Adapters of the tokens, as for `PackedWeights.multiply`.
            last_only_writes: Whether the last layer only writes its keys and values.
            cache_dtype: Storage type of keys and values in the pools, as of `paged_attention`.
            num_threads: Number of threads, the caller's included.
            instructions: Instruction set; None for the one in use.

        Raises:
            ``StepError``: Arguments that do not fit each other; the layers before were computed.
        """

def copy_blocks(
    *,
    # Of each layer: address and blocks of the sources, of the destinations, bytes of a block.
    layers: Sequence[tuple[int, int, int, int, int]],
    pairs: NDArray[np.int64],  # [n, 2], source and destination
    num_threads: int = 1,
) -> None:
    """Copy blocks in every layer; all sources are read before any destination is written.

    Args:
        layers: For each layer: address and number of blocks of the source pool, the same of the
            destination pool, bytes per block.
        pairs: Source and destination blocks, int64 ``[n, 2]``; destinations are distinct.
        num_threads: Number of threads, the caller's included.

    Raises:
        ``StepError``: A block outside of its pool, or pairs that are not contiguous.
    """

def round_to_blocks(
    numbers: NDArray[np.float32],
    storage: Literal["Q8_0", "Q4_1"],
    blocks: NDArray[np.uint8],
    *,
    instructions: _InstructionSet | None = None,
) -> None:
    """Round numbers to the blocks of GGUF files.

    Args:
        numbers: Numbers, float32, whole blocks of 32.
        storage: "Q8_0", as the gguf package rounds, or "Q4_1", with errors no larger than its.
        blocks: The blocks, one after another, uint8 of 34 or 20 bytes a block; written.
        instructions: Instruction set; None for the one in use.

    Raises:
        ``StepError``: Another storage, numbers that are no whole blocks, an output of another
            length.
    """

def pack_layers(
    layers: Sequence[_PackedLayer],
    *,
    num_threads: int = 1,
    instructions: _InstructionSet | None = None,
) -> list[list[int]]:
    """Pack the rows of linear layers into panels for `PackedWeights`.

    Args:
        layers: For each layer:
            panels: uint32 units, with ``scales`` int8, with ``sections`` uint8, of the length that
            `PackedWeights` takes; written.
            Type that weights are rounded to, that of units.
            Parts of the layer, one after another, each as file descriptor, offset of the first row,
            number of rows, storage ("F32", "F16", "BF16", or one that sections have), scales of
            the rows, float32 ``[rows]`` of "I8_ROWS" and None of others, and the size of heads
            whose halves are interleaved, or 0.  Rows are contiguous.
            Number of input features K.
            Whether the first of two parts is the gate of the second: they alternate in the panels,
            32 features each.
            Scales of int8 panels and of sections of "I8_ROWS" or "I8_TURNED", float32 ``[N]``,
            written; None for other panels.
            Sections as for `PackedWeights`, in the storage of the rows, or "Q8_0", "Q4_1" or
            "I8_TURNED", which rows of any storage become.  None for numbers.
        num_threads: Number of threads, the caller's included.
        instructions: Instruction set; None for the one in use.

    Returns:
        How many weights of each part of each layer are not finite in its type.

    Raises:
        ``StepError``: Arguments that do not fit each other; nothing was written.
        OSError: A file cannot be read, or ends before its rows do.
    """

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
) -> None:
    """Find the largest logits of each row, largest first; equal ones by smaller id.

    The first value of a row that holds NaN is NaN, and its other results are undefined.

    Args:
        logits: Address of float32 ``[rows, vocab_size]``, contiguous.
        vocab_size: Number of logits of a row.
        num: Number of results per row.
        ids: Token ids, int64 ``[rows * num]``, written.
        values: Logits, float32 ``[rows * num]``, written; minus infinity where a mask allows fewer.
        rows: Row indices of the logits, as many as ``ids`` has rows; None for the first ones.
        masks: Bit masks of allowed tokens, int32 ``[rows * ceil(vocab_size / 32)]``: token ``t`` of
            a row is bit ``t % 32`` of its entry ``t // 32``.
        num_threads: Number of threads, the caller's included.
        instructions: Instruction set; None for the one in use.

    Raises:
        ``StepError``: Arguments that do not fit each other.
    """

def draw(
    *,
    logits: int,  # address of float32 [rows, vocab_size]
    vocab_size: int,
    peaks: NDArray[np.float32],  # [N]
    parameters: NDArray[np.float64],  # [N * 4]
    uniforms: NDArray[np.float64],  # [D]
    starts: Sequence[int],  # N + 1
    tokens: NDArray[np.int32],  # [D], written
    rows: Sequence[int] | None = None,  # of the logits
    masks: NDArray[np.int32] | None = None,  # [N * ceil(vocab_size / 32)], bits of tokens
    num_threads: int = 1,
    instructions: _InstructionSet | None = None,
) -> None:
    """Sample tokens at random from rows of logits.

    A token inverts the cumulative distribution of what temperature, top_k, top_p and min_p keep, in
    the order of ids; ties with the last kept token are kept.  Tokens of rows whose peak is not
    finite are undefined.

    Args:
        logits: Address of float32 ``[rows, vocab_size]``, contiguous.
        vocab_size: Number of logits of a row.
        peaks: Largest allowed logit of each row, float32 ``[N]``.
        parameters: Temperature, top_k (1 to ``vocab_size``), top_p and min_p of each row, float64
            ``[N * 4]``.
        uniforms: A random number in [0, 1) for each token, row by row, float64 ``[D]``.
        starts: Row ``r`` has the tokens from ``starts[r]`` to ``starts[r + 1]``; ``N + 1``.
        tokens: Token ids, int32 ``[D]``, written.
        rows: N row indices of the logits; None for the first ones.
        masks: As in ``top_k``, for rows without top_k and top_p.
        num_threads: Number of threads, the caller's included.
        instructions: Instruction set; None for the one in use.

    Raises:
        ``StepError``: Arguments that do not fit each other.
    """

def logprobs(
    *,
    logits: int,  # address of float32 [rows, vocab_size]
    vocab_size: int,
    targets: Sequence[int],  # N
    sums: NDArray[np.float32],  # [N], written
    ranks: NDArray[np.int32],  # [N], written
    rows: Sequence[int] | None = None,  # of the logits
    num_threads: int = 1,
    instructions: _InstructionSet | None = None,
) -> None:
    """Find the rank of one token per row, and the log-sum-exp of the row.

    The log-probability of a token is its logit minus the log-sum-exp.

    Args:
        logits: Address of float32 ``[rows, vocab_size]``, contiguous.
        vocab_size: Number of logits of a row.
        targets: Token ids, N of them.
        sums: Log-sum-exp, float32 ``[N]``, written.
        ranks: Number of strictly larger logits, int32 ``[N]``, written.
        rows: N row indices of the logits; None for the first ones.
        num_threads: Number of threads, the caller's included.
        instructions: Instruction set; None for the one in use.

    Raises:
        ``StepError``: Arguments that do not fit each other, or a token beyond the vocabulary.
    """

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
) -> None:
    """Compute the RMS norm of rows: divide by the root mean square and multiply with a weight.

    Args:
        dtype: Type of both tensors.
        num_rows: Number of rows.
        x: Address of ``[num_rows, features]``, contiguous.
        output: Address of ``[num_rows, features]``; may be ``x``.
        weight: Norm weight, float32 ``[features]``.
        epsilon: Added to the mean square.
        num_threads: Number of threads, the caller's included.
        instructions: Instruction set; None for the one in use.

    Raises:
        ``StepError``: Arguments that do not fit each other.
    """

@final
class RankExchange:
    """Collective operations of one rank over memory that all ranks of this machine map.

    Ranks make the same calls in the same order.  A call that returns False timed out while it
    waited for a rank, or was interrupted by a signal: repeat it with the same arguments.

    Args:
        memory: Address of ``num_bytes(num_ranks, piece_bytes)``, a multiple of 64, zeroed before
            the first rank starts.
        rank: Rank of this process.
        num_ranks: Number of ranks.
        piece_bytes: Bytes per exchange, a multiple of 64.

    Raises:
        ``StepError``: Arguments out of range.
    """

    def __new__(
        cls,
        memory: int,  # address of num_bytes
        *,
        rank: int,
        num_ranks: int,
        piece_bytes: int,
    ) -> RankExchange: ...
    @staticmethod
    def num_bytes(*, num_ranks: int, piece_bytes: int) -> int:
        """Return the bytes of memory that the ranks need."""
    # False: to be called again.
    def sum(
        self,
        values: int,  # address
        num: int,
        dtype: _DType,
        *,
        patience: float,
    ) -> bool:
        """Sum numbers over the ranks in place (all-reduce), in float32; all get the same sums.

        Args:
            values: Address of the numbers.
            num: Number of numbers.
            dtype: Type of the numbers.
            patience: Timeout in seconds.
        """
    def gather(
        self,
        values: int,  # address
        output: int,  # address of num_ranks * num_bytes
        num_bytes: int,
        *,
        patience: float,
    ) -> bool:
        """Concatenate the bytes of all ranks (all-gather).

        Args:
            values: Address of this rank's bytes.
            output: Address of ``num_ranks * num_bytes`` bytes.
            num_bytes: Number of bytes of each rank.
            patience: Timeout in seconds.
        """

def bump(word: int) -> None:
    """Increment a word of shared memory and wake every process that waits for it.

    Earlier writes are visible to a process that sees the new value.

    Args:
        word: Address of a uint32, which processes change only by this function.
    """

def wait_for_bump(word: int, seen: int, timeout: float) -> int:
    """Sleep without the GIL until a word of shared memory changes.

    Args:
        word: Address of a uint32.
        seen: Last value that the caller saw.
        timeout: Maximum wait in seconds.

    Returns:
        Current value; still ``seen`` after the timeout, a signal or an early wake-up.
    """

def advise_huge_pages(address: int, num_bytes: int) -> None:
    """Request huge pages for a range of memory; a system without them ignores the request.

    Args:
        address: Address of its first byte.
        num_bytes: Length in bytes.
    """

def instruction_sets() -> list[_InstructionSet]:
    """Return the instruction sets that this CPU has and the kernels support, the fastest last."""

def instructions_in_use() -> _InstructionSet:
    """Return the instruction set that this process uses."""

def thread_waits() -> tuple[int, int, float]:
    """Return what the compute threads of this process have lost to waiting.

    Returns:
        Calls of more than one thread; threads that took no part in a call, as they slept or had no
        core until it was over; seconds in which callers waited for threads that still computed.
    """

def use_instructions(name: str | None) -> None:
    """Select the instruction set of this process; None selects the fastest of this CPU.

    Raises:
        ``ConfigError``: This CPU does not have them.
    """

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
    cache_dtype: _CacheDtype = "auto",
    num_threads: int = 1,
    instructions: _InstructionSet | None = None,
) -> None:
    """Write the keys and values of a step into a pool and compute attention, for one layer.

    The results are those of ``write_cache`` and ``paged_attention`` of
    pagedserve.kernels.reference, but the pool has a different layout: a contiguous tensor of
    ``num_blocks`` blocks, each of ``block_size * num_kv_heads * (key_size + value_size)`` elements,
    or as many bytes and 4 more for each token and KV head if ``cache_dtype`` is not "auto", that
    only this function reads and writes.  Whole blocks may be copied between pools.

    R rows, T tokens, H query heads, Hkv KV heads; sizes D and Dv of keys and values.

    Args:
        dtype: Storage type: "float32", "bfloat16" or "float16"; computation is in float32.
        query: Address of ``[T, H, D]``; the last dimension is contiguous here and below.
        query_strides: Elements from a token to the next, and from a head to the next.
        key: Address of ``[T, Hkv, D]``.
        key_strides: Elements, as ``query_strides``.
        value: Address of ``[T, Hkv, Dv]``.
        value_strides: Elements, as ``query_strides``.
        pool: Address of the pool; written in place.
        output: Address of ``[T, H, Dv]``, contiguous; every element is written.
        num_heads: Number of query heads H.
        num_kv_heads: Number of KV heads Hkv.
        key_size: Head size D of queries and keys.
        value_size: Head size Dv of values.
        num_blocks: Number of blocks of the pool.
        block_size: Tokens per block; multiples of 16 are fast.
        block_tables: Block tables ``[R, B]`` flattened, int32 ``[R * B]``; entries past a row's
            last block, or before its window, are ignored.
        query_start: Row boundaries in T, int32 ``[R + 1]``.
        seq_lens: Number of keys of each row, those of its queries included, int32 ``[R]``.
        slot_mapping: Slot of each token's key and value, int64 ``[T]``; -1 does not write them.
        scale: Factor of the scores.
        window: A query attends only to keys with position > query position - window.
        softcap: Scores become ``softcap * tanh(scores / softcap)``, before the mask.
        sinks: Attention sink of each head, float32 ``[H]``: a score that takes weight without a
            value.
        alibi: ALiBi slopes, float32 ``[H]``; a score gets its head's slope times (key position -
            query position), after the cap.
        position_bias: Relative position bias, float32 ``[H * N]``, added to the score of a key
            ``n`` tokens before the query (the last entry beyond N), after the cap; not with
            ``alibi``.
        causal: Whether a query attends to no later key; if False, a window has two sides.
        num_threads: Number of threads, the caller's included.
        cache_dtype: Storage type of keys and values in the pool: "auto" is ``dtype``; "int8",
            "fp8_e4m3" and "fp8_e5m2" have a bfloat16 scale for each token and KV head, and require
            that ``block_size`` and ``value_size`` are multiples of 16.
        instructions: Instruction set; None for the one in use.

    Raises:
        ``StepError``: Arguments that do not fit each other or an id outside of the pool; nothing
            was written.
    """

def pass_texts(
    content: bytes, at: int, count: int, *, max_bytes: int, big_endian: bool
) -> tuple[int, int]:
    """Pass over the complete strings of a list, up to the first that is too long.

    Args:
        content: Bytes of a file from its start.
        at: Offset of the first string.
        count: Maximum number of strings to pass over.
        max_bytes: Maximum length of a string in bytes.
        big_endian: Byte order of the lengths.

    Returns:
        Number of strings passed over, and the offset of the byte after them.
    """

def read_pairs(content: bytes, *, big_endian: bool) -> list[tuple[str, str]]:
    """Return the strings of a list, each split at its only space.

    Args:
        content: The list's bytes, all of them strings.
        big_endian: Byte order of the lengths.

    Raises:
        ``UnicodeDecodeError``: A string is not UTF-8.
        ``ValueError``: A string has no space, or several.
    """

def read_texts(content: bytes, *, big_endian: bool) -> list[str]:
    """Return the strings of a list.

    Args:
        content: The list's bytes, all of them strings.
        big_endian: Byte order of the lengths.

    Raises:
        ``UnicodeDecodeError``: A string is not UTF-8.
    """
