//! A whole decoder layer in one call, of Llama and related models, for a flat batch.
//!
//! `h += output(attention(rotate(qkv(norm(h)))))`, then `h += down(gate_up(norm(h)))`, with norms
//! of heads, and of what is added, where a family has them.  Each of the four products may have
//! adapters.
//!
//! # Costs
//!
//! Eight thread barriers, and one more for each product with adapters.  Memory of the caller's
//! thread, kept for the next call: queries, keys, values and attention outputs of all tokens, and
//! the rest for `CHUNK_TOKENS` tokens at a time, which keeps it in the caches.
#![expect(unsafe_code, reason = "hidden states and pools are addresses of tensors")]

use std::cell::Cell;

use crate::attention::{
    CacheDType, Memory, Options, Rows, Shape, Tokens, paged_attention, write_cache,
};
use crate::elementwise::{Norm, Rotation, Rowwise, for_rows};
use crate::error::{Error, Result};
use crate::linear::{Activation, Finish, Matrix, PANEL_FEATURES, Weights, linear};
use crate::lora::{Adapters, Group};
use crate::number::{DType, check_units};
use crate::scratch::pieces;
use crate::team::Execution;

/// Tokens for which all linear layers after attention are computed before the next tokens.
const CHUNK_TOKENS: usize = 512;

thread_local! {
    static SCRATCH: Cell<Vec<u32>> = const { Cell::new(Vec::new()) };
}

/// Weights of a layer; F hidden features, H query heads and Hkv KV heads of size D.
#[derive(Clone, Copy, Debug)]
pub struct Layer<'a> {
    /// Type of hidden states, weights, keys and values.
    pub dtype: DType,
    /// Number of query heads, H.
    pub num_heads: usize,
    /// Number of KV heads, Hkv.
    pub num_kv_heads: usize,
    /// Size of keys and values of a head, D.
    pub head_size: usize,
    /// Norm weight before attention, `[F]`.
    pub attention_norm: Norm<'a>,
    /// Norm weight after attention, `[F]`.
    pub attention_output_norm: Option<Norm<'a>>,
    /// Norm weight before the MLP, `[F]`.
    pub mlp_norm: Norm<'a>,
    /// Norm weight after the MLP, `[F]`.
    pub mlp_output_norm: Option<Norm<'a>>,
    /// Norm weight of each query head, `[D]`.
    pub query_norm: Option<Norm<'a>>,
    /// Norm weight of each key head, `[D]`.
    pub key_norm: Option<Norm<'a>>,
    /// Query, key and value projection, F to `(H + 2 Hkv) * D`.
    pub qkv: Weights<'a>,
    /// Output projection, `H * D` to F.
    pub output: Weights<'a>,
    /// Gate and up projection, F to twice the inner features, half panels of each in turn.
    pub gate_up: Weights<'a>,
    /// Activation between gate and up.
    pub activation: Activation,
    /// Down projection, the inner features to F.
    pub down: Weights<'a>,
}

// SAFETY: any thread may hold addresses; the caller of a kernel upholds the rest.
unsafe impl Send for LayerMemory {}

/// The memory of a call; T tokens.
#[derive(Clone, Copy, Debug)]
pub struct LayerMemory {
    /// `[T, F]`, contiguous; changed in place.
    pub hidden: *mut u8,
    /// `[T, rotary_size]`, contiguous.
    pub cosines: *const u8,
    /// `[T, rotary_size]`, contiguous.
    pub sines: *const u8,
    /// Elements of a head that are rotated; even.
    pub rotary_size: usize,
    /// `num_blocks` blocks of `block_size` tokens in the layout of [`crate::attention`].
    pub pool: *mut u8,
    /// Type of keys and values in the pool.
    pub cache_dtype: CacheDType,
    /// Blocks of the pool.
    pub num_blocks: usize,
    /// Tokens of a block.
    pub block_size: usize,
}

/// Part of a layer to compute, and its output.  The hidden states change with the whole layer only;
/// partial sums are `[T, F]`, and the caller sums the parts of all ranks.
#[derive(Clone, Copy, Debug)]
pub enum Part {
    /// The whole layer, added to the hidden states.
    Whole,
    /// Output of attention, before its norm.
    Attention(*mut u8),
    /// Output of the gated MLP, before its norm.
    Mlp(*mut u8),
    /// Keys and values, in the pool.
    Cache,
}

// SAFETY: addresses, as above.
unsafe impl Send for Part {}

/// The adapters of a layer's products.
#[derive(Clone, Copy, Debug, Default)]
pub struct LayerAdapters<'a> {
    /// Adapters of the query, key and value projection.
    pub qkv: &'a [Group<'a>],
    /// Adapters of the output projection.
    pub output: &'a [Group<'a>],
    /// Adapters of the gate and up projection.
    pub gate_up: &'a [Group<'a>],
    /// Adapters of the down projection.
    pub down: &'a [Group<'a>],
}

impl Layer<'_> {
    fn hidden_size(&self) -> usize {
        self.attention_norm.weight.len()
    }

    /// Number of features of queries, keys and values.
    fn qkv_size(&self) -> usize {
        (self.num_heads + 2 * self.num_kv_heads) * self.head_size
    }

    /// Refuses parts that do not fit each other.
    ///
    /// # Errors
    /// Names the part, what it has and what it must have.
    pub fn check(&self) -> Result<()> {
        if self.num_kv_heads == 0 || !self.num_heads.is_multiple_of(self.num_kv_heads) {
            return Err(Error(format!(
                "num_heads must be a multiple of num_kv_heads; got {} and {}",
                self.num_heads, self.num_kv_heads
            )));
        }
        let hidden = self.hidden_size();
        let heads = self.num_heads * self.head_size;
        let inner = self.down.in_features;
        if !(2 * inner).is_multiple_of(PANEL_FEATURES) {
            return Err(Error(format!(
                "down must take a multiple of {} features, halves of whole panels; it takes {inner}",
                PANEL_FEATURES / 2
            )));
        }
        let linears = [
            ("qkv", &self.qkv, hidden, self.qkv_size()),
            ("output", &self.output, heads, hidden),
            ("gate_up", &self.gate_up, hidden, 2 * inner),
            ("down", &self.down, inner, hidden),
        ];
        for (name, weights, in_features, out_features) in linears {
            weights.check()?;
            let given = (weights.in_features, weights.out_features);
            if given != (in_features, out_features) || weights.dtype != self.dtype {
                return Err(Error(format!(
                    "{name} must take {in_features} to {out_features} features of {:?}; it takes \
                     {} to {} of {:?}",
                    self.dtype, given.0, given.1, weights.dtype
                )));
            }
        }
        let norms = [
            ("attention_output_norm", self.attention_output_norm, hidden),
            ("mlp_norm", Some(self.mlp_norm), hidden),
            ("mlp_output_norm", self.mlp_output_norm, hidden),
            ("query_norm", self.query_norm, self.head_size),
            ("key_norm", self.key_norm, self.head_size),
        ];
        for (name, norm, len) in norms {
            if let Some(norm) = norm
                && norm.weight.len() != len
            {
                return Err(Error(format!(
                    "{name} must have {len} numbers; got {}",
                    norm.weight.len()
                )));
            }
        }
        Ok(())
    }
}

/// Intermediate results of a call, each `[tokens, features]`.
struct Buffers {
    /// Normalised hidden states of a chunk, or the numbers to be added to them.
    normed: *mut u8,
    /// Queries, keys and values of all tokens.
    qkv: *mut u8,
    /// Attention outputs of all tokens.
    answers: *mut u8,
    /// Inner features of a chunk.
    inner: *mut u8,
}

impl Buffers {
    fn new(scratch: &mut Vec<u32>, layer: &Layer<'_>, num_tokens: usize) -> Self {
        let chunk = num_tokens.min(CHUNK_TOKENS);
        let per_unit = layer.dtype.per_unit();
        let lens = [
            chunk * layer.hidden_size(),
            num_tokens * layer.qkv_size(),
            num_tokens * layer.num_heads * layer.head_size,
            chunk * layer.down.in_features,
        ]
        .map(|len| len.div_ceil(per_unit));
        let [normed, qkv, answers, inner] = pieces(scratch, lens).map(<*mut u32>::cast);
        Self { normed, qkv, answers, inner }
    }
}

/// Computes a layer for the tokens of a step, in place.
///
/// `rows` and `options` are those of [`paged_attention`].
///
/// # Errors
/// Parts of the layer that do not fit each other, adapters of other features, an odd address, and
/// what [`paged_attention`] refuses.
///
/// # Safety
/// The memory is as [`LayerMemory`] and [`Part`] describe for T = `rows.slot_mapping.len()`; no
/// other code writes any of it, or reads hidden states, sums or pool, while the call lasts.
pub unsafe fn forward(
    layer: &Layer<'_>,
    part: Part,
    memory: &LayerMemory,
    rows: &Rows<'_>,
    options: &Options<'_>,
    adapters: &LayerAdapters<'_>,
    execution: &Execution<'_>,
) -> Result<()> {
    layer.check()?;
    check_memory(layer, part, memory)?;
    execution.check()?;
    let num_tokens = rows.slot_mapping.len();
    let mut scratch = SCRATCH.take();
    let buffers = Buffers::new(&mut scratch, layer, num_tokens);
    let call = Call { layer, part, memory, buffers: &buffers, adapters, execution };
    // SAFETY: the caller's promise; the buffers can hold the tokens.
    let result = unsafe { call.run(rows, options) };
    SCRATCH.set(scratch);
    result
}

fn check_memory(layer: &Layer<'_>, part: Part, memory: &LayerMemory) -> Result<()> {
    if let Part::Attention(sums) | Part::Mlp(sums) = part {
        check_units("sums", sums.cast_const())?;
    }
    let addresses = [
        ("hidden", memory.hidden.cast_const()),
        ("cosines", memory.cosines),
        ("sines", memory.sines),
    ];
    for (name, address) in addresses {
        check_units(name, address)?;
    }
    let rotary = memory.rotary_size;
    if rotary > layer.head_size || !rotary.is_multiple_of(2) {
        return Err(Error(format!(
            "rotary_size must be even and at most the size of a head, {}; got {rotary}",
            layer.head_size
        )));
    }
    Ok(())
}

/// A checked call.
struct Call<'a> {
    layer: &'a Layer<'a>,
    part: Part,
    memory: &'a LayerMemory,
    buffers: &'a Buffers,
    adapters: &'a LayerAdapters<'a>,
    execution: &'a Execution<'a>,
}

impl Call<'_> {
    unsafe fn run(&self, rows: &Rows<'_>, options: &Options<'_>) -> Result<()> {
        let num_tokens = rows.slot_mapping.len();
        let chunks = || {
            let len = move |first| CHUNK_TOKENS.min(num_tokens - first);
            (0..num_tokens).step_by(CHUNK_TOKENS).map(move |first| (first, len(first)))
        };
        let (has_keys, has_answers, has_mlp) = match self.part {
            Part::Whole => (true, true, true),
            Part::Attention(_) => (true, true, false),
            Part::Mlp(_) => (false, false, true),
            Part::Cache => (true, false, false),
        };
        // SAFETY: the caller's promise.
        unsafe {
            if has_keys {
                chunks().try_for_each(|(first, len)| self.make_qkv(first, len))?;
                self.attend(rows, options)?;
            }
            chunks().try_for_each(|(first, len)| {
                if has_answers {
                    self.add_answers(first, len)?;
                }
                if has_mlp { self.add_mlp(first, len) } else { Ok(()) }
            })
        }
    }

    /// Bytes of a number of elements.
    fn bytes(&self, numbers: usize) -> usize {
        numbers * self.layer.dtype.size()
    }

    /// The hidden states from a token on.
    fn hidden(&self, token: usize) -> *mut u8 {
        self.memory.hidden.wrapping_add(self.bytes(token * self.layer.hidden_size()))
    }

    /// Computes a product whose rows lie side by side.
    unsafe fn linear(
        &self,
        (weights, adapters): (&Weights<'_>, Adapters<'_>),
        finish: Finish,
        num_rows: usize,
        input: *mut u8,
        output: *mut u8,
    ) -> Result<()> {
        let stride = finish.out_features(weights);
        let input = Matrix { pointer: input, stride: weights.in_features };
        let output = (Matrix { pointer: output, stride }, self.layer.dtype);
        // SAFETY: the caller's promise.
        unsafe { linear(weights, finish, num_rows, input, output, adapters, self.execution) }
    }

    unsafe fn rowwise(&self, work: Rowwise<'_>, num_rows: usize, row_len: usize) {
        // SAFETY: the caller's promise.
        unsafe { for_rows(work, self.layer.dtype, num_rows, row_len, self.execution) };
    }

    unsafe fn make_qkv(&self, first: usize, num_tokens: usize) -> Result<()> {
        let Layer { num_heads, num_kv_heads, head_size, query_norm, key_norm, .. } = *self.layer;
        let (hidden_size, qkv_size) = (self.layer.hidden_size(), self.layer.qkv_size());
        let LayerMemory { cosines, sines, rotary_size, .. } = *self.memory;
        let normed = self.buffers.normed;
        let qkv = self.buffers.qkv.wrapping_add(self.bytes(first * qkv_size));
        let norm = Rowwise::Norm {
            norm: self.layer.attention_norm,
            from: self.hidden(first),
            to: normed,
            adds: false,
        };
        let angles = self.bytes(first * rotary_size);
        let rotation = Rowwise::Rotate(Rotation {
            heads: qkv,
            stride: qkv_size,
            num_heads,
            num_kv_heads,
            head_size,
            cosines: cosines.wrapping_add(angles),
            sines: sines.wrapping_add(angles),
            rotary_size,
            query_norm,
            key_norm,
        });
        let product = (&self.layer.qkv, Adapters { groups: self.adapters.qkv, first_row: first });
        // SAFETY: the caller's promise.
        unsafe {
            self.rowwise(norm, num_tokens, hidden_size);
            self.linear(product, Finish::Store, num_tokens, normed, qkv)?;
            self.rowwise(rotation, num_tokens, qkv_size);
        }
        Ok(())
    }

    /// Writes keys and values, and attends where a part has answers.
    unsafe fn attend(&self, rows: &Rows<'_>, options: &Options<'_>) -> Result<()> {
        let Layer { dtype, num_heads, num_kv_heads, head_size, .. } = *self.layer;
        let LayerMemory { pool, cache_dtype, num_blocks, block_size, .. } = *self.memory;
        let shape = Shape {
            dtype,
            cache_dtype,
            num_heads,
            num_kv_heads,
            key_size: head_size,
            value_size: head_size,
            num_blocks,
            block_size,
        };
        let tokens = |first_head: usize| Tokens {
            pointer: self.buffers.qkv.wrapping_add(self.bytes(first_head * head_size)),
            token_stride: self.layer.qkv_size(),
            head_stride: head_size,
        };
        let memory = Memory {
            query: tokens(0),
            key: tokens(num_heads),
            value: tokens(num_heads + num_kv_heads),
            pool,
            output: self.buffers.answers,
        };
        // SAFETY: the caller's promise.
        unsafe {
            if matches!(self.part, Part::Cache) {
                write_cache(&shape, &memory, rows, options, self.execution)
            } else {
                paged_attention(&shape, &memory, rows, options, self.execution)
            }
        }
    }

    unsafe fn add_answers(&self, first: usize, num_tokens: usize) -> Result<()> {
        let layer = self.layer;
        let answers = first * layer.num_heads * layer.head_size;
        let answers = self.buffers.answers.wrapping_add(self.bytes(answers));
        let adapters = Adapters { groups: self.adapters.output, first_row: first };
        let output = (&layer.output, adapters);
        // SAFETY: the caller's promise.
        unsafe { self.add(output, layer.attention_output_norm, answers, num_tokens) }
    }

    unsafe fn add_mlp(&self, first: usize, num_tokens: usize) -> Result<()> {
        let layer = self.layer;
        let Buffers { normed, inner, .. } = *self.buffers;
        let norm = Rowwise::Norm {
            norm: layer.mlp_norm,
            from: self.hidden(first),
            to: normed,
            adds: false,
        };
        let gate = Finish::Gate(layer.activation);
        let adapters = |groups| Adapters { groups, first_row: first };
        let gate_up = (&layer.gate_up, adapters(self.adapters.gate_up));
        let down = (&layer.down, adapters(self.adapters.down));
        // SAFETY: the caller's promise.
        unsafe {
            self.rowwise(norm, num_tokens, layer.hidden_size());
            self.linear(gate_up, gate, num_tokens, normed, inner)?;
            self.add(down, layer.mlp_output_norm, inner, num_tokens)
        }
    }

    /// Adds a product to the hidden states, normalised first where a norm is given; of a part of
    /// the layer, writes it where the part goes.
    unsafe fn add(
        &self,
        product: (&Weights<'_>, Adapters<'_>),
        norm: Option<Norm<'_>>,
        input: *mut u8,
        num_tokens: usize,
    ) -> Result<()> {
        let first = product.1.first_row;
        let hidden = self.hidden(first);
        // SAFETY: the caller's promise.
        unsafe {
            if let Part::Attention(sums) | Part::Mlp(sums) = self.part {
                let sums = sums.wrapping_add(self.bytes(first * self.layer.hidden_size()));
                return self.linear(product, Finish::Store, num_tokens, input, sums);
            }
            let Some(norm) = norm else {
                return self.linear(product, Finish::Add, num_tokens, input, hidden);
            };
            let normed = self.buffers.normed;
            self.linear(product, Finish::Store, num_tokens, input, normed)?;
            let work = Rowwise::Norm { norm, from: normed, to: hidden, adds: true };
            self.rowwise(work, num_tokens, self.layer.hidden_size());
        }
        Ok(())
    }
}
