//! Arguments of a call: sizes, memory, rows, options.

use crate::number::{DType, PANEL};

/// How a pool stores keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheDType {
    /// In the dtype of queries.
    Auto,
    /// As int8, with a bfloat16 scale for the key and one for the value of each token and KV head.
    Int8,
    /// As float8 with 4 bits of exponent and 3 of fraction, with scales as int8.
    Float8E4M3,
    /// As float8 with 5 bits of exponent and 2 of fraction, with scales as int8.
    Float8E5M2,
}

impl CacheDType {
    /// Whether numbers are bytes, with a scale for each key and value.
    pub fn has_scales(self) -> bool {
        self != Self::Auto
    }
}

/// Bytes of the scales of a token's key and value in one KV head.
const SCALE_BYTES: usize = 4;

/// The sizes of one layer.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Type of queries, keys, values and output.
    pub dtype: DType,
    /// Type of keys and values in the pool.
    pub cache_dtype: CacheDType,
    /// Number of query heads, H.
    pub num_heads: usize,
    /// Number of KV heads, Hkv; query head h reads KV head h / (H / Hkv).
    pub num_kv_heads: usize,
    /// Elements of a key, D.
    pub key_size: usize,
    /// Elements of a value, Dv.
    pub value_size: usize,
    /// Number of blocks of the pool.
    pub num_blocks: usize,
    /// Tokens of a block.
    pub block_size: usize,
}

impl Shape {
    /// Query heads of a KV head.
    pub(crate) fn group(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// Bytes of a number in the pool.
    pub fn cache_item_size(&self) -> usize {
        if self.cache_dtype.has_scales() { 1 } else { self.dtype.size() }
    }

    /// Bytes of a token's key and value in one KV head of a pool.
    pub(crate) fn token_bytes(&self) -> usize {
        let scales = if self.cache_dtype.has_scales() { SCALE_BYTES } else { 0 };
        (self.key_size + self.value_size) * self.cache_item_size() + scales
    }

    /// Bytes of a block.
    pub fn block_bytes(&self) -> usize {
        self.block_size * self.num_kv_heads * self.token_bytes()
    }

    /// Numbers of a key or of weights in a unit.
    pub(crate) fn per_unit(&self) -> usize {
        if self.cache_dtype.has_scales() { 1 } else { self.dtype.per_unit() }
    }

    /// Whether blocks are stored as panels, the fast way: `block_size` and Dv are multiples of
    /// 16, and keys of 16-bit numbers have an even size.
    pub fn has_panels(&self) -> bool {
        self.block_size.is_multiple_of(PANEL)
            && self.value_size.is_multiple_of(PANEL)
            && self.key_size.is_multiple_of(self.per_unit())
    }
}

/// `[T, heads, size]` in memory: the elements of a head are contiguous.
#[derive(Clone, Copy, Debug)]
pub struct Tokens {
    /// The first element.
    pub pointer: *const u8,
    /// Elements from a token to the next.
    pub token_stride: usize,
    /// Elements from a head to the next.
    pub head_stride: usize,
}

/// The memory of a call.  Pool and output overlap nothing else.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// `[T, H, D]`.
    pub query: Tokens,
    /// `[T, Hkv, D]`, the step's keys.
    pub key: Tokens,
    /// `[T, Hkv, Dv]`, the step's values.
    pub value: Tokens,
    /// `num_blocks * block_bytes()` bytes, contiguous.
    pub pool: *mut u8,
    /// `[T, H, Dv]`, contiguous.
    pub output: *mut u8,
}

/// The rows of a step, row-major; R rows, T tokens.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// `[R, B]` block ids; entries past a row's last block, or before its window, are ignored.
    pub block_tables: &'a [i32],
    /// `[R + 1]`, from 0 to T.
    pub query_start: &'a [i32],
    /// `[R]`: number of keys of each row, its queries' included.
    pub seq_lens: &'a [i32],
    /// `[T]`: slot of each token's key and value; -1 means that they are not written.
    pub slot_mapping: &'a [i64],
}

/// Options of the scores.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    /// Factor of the scores.
    pub scale: f32,
    /// A query sees only keys with position > query position - window.
    pub window: Option<usize>,
    /// Scores become `softcap * tanh(scores / softcap)`, before the mask.
    pub softcap: Option<f32>,
    /// `[H]`: attention sinks, one more score a head, which takes weight and has no value.
    pub sinks: Option<&'a [f32]>,
    /// `[H]`: slopes; a score gets its head's slope times the key's position minus the query's,
    /// after the cap.
    pub alibi: Option<&'a [f32]>,
    /// `[H, N]`: bias that a key `n` before a query, or as the last if further, adds to its head's
    /// score, after the cap.
    pub position_bias: Option<&'a [f32]>,
    /// Whether a query attends to no later key; if not, a window has two sides, and a query also
    /// sees the keys with position < query position + window.
    pub causal: bool,
}

impl Options<'_> {
    /// The first key that a query at `position` sees.
    pub(crate) fn first_key(&self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }

    /// One past the last key that a query at `position` sees, of a row with `seq_len` keys.
    pub(crate) fn end_key(&self, position: usize, seq_len: usize) -> usize {
        if self.causal {
            return position + 1;
        }
        self.window.map_or(seq_len, |window| position.saturating_add(window).min(seq_len))
    }
}

/// Converts a count; the checks refuse one below zero.
pub(crate) fn count(number: i32) -> usize {
    usize::try_from(number).unwrap_or(0)
}

impl Rows<'_> {
    /// Number of rows, R.
    pub(crate) fn len(&self) -> usize {
        self.seq_lens.len()
    }

    /// Blocks of a row of the tables, B.
    pub(crate) fn width(&self) -> usize {
        self.block_tables.len() / self.len().max(1)
    }

    /// The tokens of a row.
    pub(crate) fn queries(&self, row: usize) -> std::ops::Range<usize> {
        count(self.query_start[row])..count(self.query_start[row + 1])
    }

    /// The keys of a row.
    pub(crate) fn seq_len(&self, row: usize) -> usize {
        count(self.seq_lens[row])
    }

    /// A row's block ids.
    pub(crate) fn blocks(&self, row: usize) -> &[i32] {
        let width = self.width();
        &self.block_tables[row * width..(row + 1) * width]
    }
}
