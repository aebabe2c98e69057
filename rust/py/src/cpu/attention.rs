//! Paged attention on the CPU, over the memory of torch tensors.
//!
//! torch is not linked: a tensor comes as its address, sizes and strides.
#![expect(unsafe_code, reason = "addresses from Python become pointers")]

use numpy::PyReadonlyArray1;
use pagedserve_cpu::attention::{self as kernel, Memory, Options, Rows, Shape, Tokens};
use pyo3::prelude::*;

use crate::arrays::readonly;
use crate::cpu::{cache_dtype_of, dtype_of, on_threads, size};
use crate::gateway::Work;

/// View `[T, heads, size]` by address and strides of tokens and heads.
fn tokens(name: &str, address: usize, (token, head): (i64, i64)) -> PyResult<Tokens> {
    Ok(Tokens {
        pointer: std::ptr::with_exposed_provenance(address),
        token_stride: size(&format!("{name}_strides[0]"), token)?,
        head_stride: size(&format!("{name}_strides[1]"), head)?,
    })
}

/// Arrays of a step's rows while a call reads them.
pub(crate) struct RowArrays<'py> {
    block_tables: PyReadonlyArray1<'py, i32>,
    query_start: PyReadonlyArray1<'py, i32>,
    seq_lens: PyReadonlyArray1<'py, i32>,
    slot_mapping: PyReadonlyArray1<'py, i64>,
}

impl<'py> RowArrays<'py> {
    pub(crate) fn new(
        block_tables: &Bound<'py, PyAny>,
        query_start: &Bound<'py, PyAny>,
        seq_lens: &Bound<'py, PyAny>,
        slot_mapping: &Bound<'py, PyAny>,
    ) -> PyResult<Self> {
        Ok(Self {
            block_tables: readonly(block_tables, "block_tables")?,
            query_start: readonly(query_start, "query_start")?,
            seq_lens: readonly(seq_lens, "seq_lens")?,
            slot_mapping: readonly(slot_mapping, "slot_mapping")?,
        })
    }

    /// Number of keys of all rows.
    pub(crate) fn num_keys(&self) -> PyResult<usize> {
        let num_keys = self.seq_lens.as_slice()?.iter();
        Ok(num_keys.map(|len| usize::try_from(*len).unwrap_or(0)).sum())
    }

    pub(crate) fn rows(&self) -> PyResult<Rows<'_>> {
        Ok(Rows {
            block_tables: self.block_tables.as_slice()?,
            query_start: self.query_start.as_slice()?,
            seq_lens: self.seq_lens.as_slice()?,
            slot_mapping: self.slot_mapping.as_slice()?,
        })
    }
}

/// Write the keys and values of a step into a pool and compute attention, for one layer.
///
/// The results are those of ``write_cache`` and ``paged_attention`` of
/// pagedserve.kernels.reference, but the pool has a different layout: a contiguous tensor of
/// ``num_blocks`` blocks, each of ``block_size * num_kv_heads * (key_size + value_size)`` elements,
/// or as many bytes and 4 more for each token and KV head if ``cache_dtype`` is not "auto", that
/// only this function reads and writes.  Whole blocks may be copied between pools.
///
/// R rows, T tokens, H query heads, Hkv KV heads; sizes D and Dv of keys and values.
///
/// Args:
///     dtype: Storage type: "float32", "bfloat16" or "float16"; computation is in float32.
///     query: Address of ``[T, H, D]``; the last dimension is contiguous here and below.
///     query_strides: Elements from a token to the next, and from a head to the next.
///     key: Address of ``[T, Hkv, D]``.
///     key_strides: Elements, as ``query_strides``.
///     value: Address of ``[T, Hkv, Dv]``.
///     value_strides: Elements, as ``query_strides``.
///     pool: Address of the pool; written in place.
///     output: Address of ``[T, H, Dv]``, contiguous; every element is written.
///     num_heads: Number of query heads H.
///     num_kv_heads: Number of KV heads Hkv.
///     key_size: Head size D of queries and keys.
///     value_size: Head size Dv of values.
///     num_blocks: Number of blocks of the pool.
///     block_size: Tokens per block; multiples of 16 are fast.
///     block_tables: Block tables ``[R, B]`` flattened, int32 ``[R * B]``; entries past a row's
///         last block, or before its window, are ignored.
///     query_start: Row boundaries in T, int32 ``[R + 1]``.
///     seq_lens: Number of keys of each row, those of its queries included, int32 ``[R]``.
///     slot_mapping: Slot of each token's key and value, int64 ``[T]``; -1 does not write them.
///     scale: Factor of the scores.
///     window: A query attends only to keys with position > query position - window.
///     softcap: Scores become ``softcap * tanh(scores / softcap)``, before the mask.
///     sinks: Attention sink of each head, float32 ``[H]``: a score that takes weight without a
///         value.
///     alibi: ALiBi slopes, float32 ``[H]``; a score gets its head's slope times (key position -
///         query position), after the cap.
///     position_bias: Relative position bias, float32 ``[H * N]``, added to the score of a key
///         ``n`` tokens before the query (the last entry beyond N), after the cap; not with
///         ``alibi``.
///     causal: Whether a query attends to no later key; if False, a window has two sides.
///     num_threads: Number of threads, the caller's included.
///     cache_dtype: Storage type of keys and values in the pool: "auto" is ``dtype``; "int8",
///         "fp8_e4m3" and "fp8_e5m2" have a bfloat16 scale for each token and KV head, and require
///         that ``block_size`` and ``value_size`` are multiples of 16.
///     instructions: Instruction set; None for the one in use.
///
/// Raises:
///     ``StepError``: Arguments that do not fit each other or an id outside of the pool; nothing
///         was written.
#[pyfunction]
#[pyo3(signature = (
    *, dtype, query, query_strides, key, key_strides, value, value_strides, pool, output,
    num_heads, num_kv_heads, key_size, value_size, num_blocks, block_size, block_tables,
    query_start, seq_lens, slot_mapping, scale, window = None, softcap = None, sinks = None,
    alibi = None, position_bias = None, causal = true, cache_dtype = "auto", num_threads = 1,
    instructions = None
))]
#[expect(clippy::too_many_arguments, reason = "tensors without torch: addresses and sizes")]
pub(crate) fn paged_attention(
    dtype: &str,
    query: usize,
    query_strides: (i64, i64),
    key: usize,
    key_strides: (i64, i64),
    value: usize,
    value_strides: (i64, i64),
    pool: usize,
    output: usize,
    num_heads: i64,
    num_kv_heads: i64,
    key_size: i64,
    value_size: i64,
    num_blocks: i64,
    block_size: i64,
    block_tables: &Bound<'_, PyAny>,
    query_start: &Bound<'_, PyAny>,
    seq_lens: &Bound<'_, PyAny>,
    slot_mapping: &Bound<'_, PyAny>,
    scale: f32,
    window: Option<i64>,
    softcap: Option<f32>,
    sinks: Option<&Bound<'_, PyAny>>,
    alibi: Option<&Bound<'_, PyAny>>,
    position_bias: Option<&Bound<'_, PyAny>>,
    causal: bool,
    cache_dtype: &str,
    num_threads: i64,
    instructions: Option<&str>,
) -> PyResult<()> {
    let shape = Shape {
        dtype: dtype_of("dtype", dtype)?,
        cache_dtype: cache_dtype_of("cache_dtype", cache_dtype)?,
        num_heads: size("num_heads", num_heads)?,
        num_kv_heads: size("num_kv_heads", num_kv_heads)?,
        key_size: size("key_size", key_size)?,
        value_size: size("value_size", value_size)?,
        num_blocks: size("num_blocks", num_blocks)?,
        block_size: size("block_size", block_size)?,
    };
    let memory = Memory {
        query: tokens("query", query, query_strides)?,
        key: tokens("key", key, key_strides)?,
        value: tokens("value", value, value_strides)?,
        pool: std::ptr::with_exposed_provenance_mut(pool),
        output: std::ptr::with_exposed_provenance_mut(output),
    };
    let py = block_tables.py();
    let arrays = RowArrays::new(block_tables, query_start, seq_lens, slot_mapping)?;
    let sinks = sinks.map(|sinks| readonly::<f32>(sinks, "sinks")).transpose()?;
    let alibi = alibi.map(|alibi| readonly::<f32>(alibi, "alibi")).transpose()?;
    let bias = position_bias.map(|bias| readonly::<f32>(bias, "position_bias")).transpose()?;
    let rows = arrays.rows()?;
    let options = Options {
        scale,
        window: window.map(|window| size("window", window)).transpose()?,
        softcap,
        sinks: sinks.as_ref().map(|sinks| sinks.as_slice()).transpose()?,
        alibi: alibi.as_ref().map(|alibi| alibi.as_slice()).transpose()?,
        position_bias: bias.as_ref().map(|bias| bias.as_slice()).transpose()?,
        causal,
    };
    let numbers_per_key =
        shape.num_kv_heads.saturating_mul(shape.key_size.saturating_add(shape.value_size));
    let keys = Work::numbers(&[arrays.num_keys()?, numbers_per_key]);
    let queries = Work::numbers(&[rows.slot_mapping.len(), shape.num_heads, shape.key_size]);
    on_threads(py, num_threads, instructions, keys.and(queries), move |execution| {
        // SAFETY: the caller promises, as the stub says, that the addresses are those of live
        // tensors of these sizes; everything else is checked.
        unsafe { kernel::paged_attention(&shape, &memory, &rows, &options, execution) }
    })
}
