//! Linear layers: rows of numbers times weights that were packed once.
//!
//! # Layout of packed weights
//!
//! `[N / 64][units of K][64]` units: the weights of 64 output features, a *panel*, lie side by side
//! for each input feature (for each pair of 16-bit weights).  N is rounded up to whole
//! panels, the rest is zero.  A kernel multiplies each unit of up to six rows with four vectors of
//! a panel's weights; the 24 sums stay in registers.  (The blocking is that of Goto and
//! van de Geijn, "Anatomy of High-Performance Matrix Multiplication", section 4, without the
//! packing of the rows, which are few.)
//!
//! Rows of float32 may have weights of 16 bits, which become float32 in registers, for many rows a
//! block at a time; `linear::amx` multiplies parts of them with bfloat16.
//!
//! Of int8 weights a panel holds `[K][64]` whole numbers, and each feature has a float32 that they
//! are multiples of.  They become float32 in registers; rows of 16-bit numbers are written out as
//! float32 first, `CHUNK_ROWS` at a time.  Panels of [`crate::bytes`] are multiplied with rows of
//! bytes, which are quantised as many at a time.
//!
//! # Invariants
//!
//! 1. Each sum is that of its blocks of `BLOCK_UNITS`, all in the order of the input features, or
//!    that of AMX; then it is scaled where weights are int8, then the bias and the row's adapter are
//!    added, then the [`Finish`]: the result of a row is the same in any batch, to the last bit.
//! 2. Columns beyond N are not written.
//!
//! # Costs
//!
//! With few rows the time is that of reading the weights, once; with many it is arithmetic, which
//! is that of float32 where weights are int8.
#![expect(unsafe_code, reason = "rows and weights are addresses of tensors")]
#![expect(clippy::inline_always, reason = "must become part of a function with the instructions")]

#[cfg(target_arch = "x86_64")]
mod amx;
mod chunks;
mod items;
mod weights;

use std::cell::Cell;

use crate::bytes::{BytePanels, ByteRows, quantise_rows};
use crate::element::{Element, Factor, Float32Pair, Half, Lane};
use crate::elementwise::{Rowwise, for_rows};
use crate::error::{Error, Result};
use crate::isa::InstructionSet;
use crate::kernel::{self, Segment, unpack};
use crate::lora::{Adapters, Additions};
use crate::math::{gelu_tanh, silu};
use crate::number::{BFloat16, DType, Float16, PANEL, check_units};
use crate::scratch::pieces;
use crate::team::Execution;
use crate::vectors::{Instructions, Vectors};

use chunks::FEWEST_ROWS;
use items::{ByteItems, Items};

pub use weights::{Panels, Weights};

/// Output features of a panel.
pub const PANEL_FEATURES: usize = 64;
/// Units of a panel that are multiplied with all rows of an item before the next, and summed
/// separately.  Few: rounding errors grow with the length of a block plus the number of blocks
/// (Higham, "Accuracy and Stability of Numerical Algorithms", section 3.1).  They take 48 KiB.
pub(crate) const BLOCK_UNITS: usize = 192;
/// Rows of an item, whole register tiles.  Few, so that two threads share a few panels evenly;
/// more where rows are many, as each item reads its panel anew.
const FEW_ROWS: usize = 24;
const MANY_ROWS: usize = 48;
/// The most rows of an item: those that AMX multiplies, whole pairs of tiles.
pub(crate) const MOST_ROWS: usize = 64;
/// The most rows that are converted at once.
const CHUNK_ROWS: usize = 512;

thread_local! {
    /// Rows as bytes, their scales and totals.
    static ROWS: Cell<Vec<u32>> = const { Cell::new(Vec::new()) };
    static WIDE: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
    /// A block of weights as float32, `[2 * units][64]`.
    static BLOCK: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// Activation between the two halves of a gated layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// The approximation of GELU by tanh.
    GeluTanh,
}

/// Use of a product: written, added or gated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The product is the output.
    Store,
    /// The product is added to the output.
    Add,
    /// The first 32 features of each panel, activated, times the last 32 are 32 output features.
    Gate(Activation),
}

impl Finish {
    /// Features that are written of a product with these weights.
    pub(crate) fn out_features(self, weights: &Weights<'_>) -> usize {
        match self {
            Self::Gate(_) => weights.out_features / 2,
            Self::Store | Self::Add => weights.out_features,
        }
    }
}

// SAFETY: any thread may hold addresses; the caller of a kernel upholds the rest.
unsafe impl Send for Matrix {}

/// `[rows, features]` in memory; the features of a row are contiguous.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    /// The first element.
    pub pointer: *mut u8,
    /// Elements from a row to the next.
    pub stride: usize,
}

/// Multiplies `num_rows` rows with the weights, and adds the outputs of their adapters.
///
/// The output has `output_dtype`, float32 or that of the weights, and N features a row (N / 2 with
/// [`Finish::Gate`]).
///
/// # Errors
/// Weights that are not as their fields say, adapters of other features, strides below the
/// features, an odd address, an instruction set that the CPU lacks.
///
/// # Safety
/// Input and output are as [`Matrix`] describes for `num_rows` rows of this layer, and do not
/// overlap; no other code writes the input or accesses the output during the call.
pub unsafe fn linear(
    weights: &Weights<'_>,
    finish: Finish,
    num_rows: usize,
    input: Matrix,
    (output, output_dtype): (Matrix, DType),
    adapters: Adapters<'_>,
    execution: &Execution<'_>,
) -> Result<()> {
    weights.check()?;
    execution.check()?;
    if num_rows == 0 {
        return Ok(());
    }
    if matches!(finish, Finish::Gate(_)) && !weights.out_features.is_multiple_of(PANEL_FEATURES) {
        return Err(Error(format!(
            "a gated layer must have whole panels of {PANEL_FEATURES} features; got {}",
            weights.out_features
        )));
    }
    if ![DType::Float32, weights.dtype].contains(&output_dtype) {
        return Err(Error(format!(
            "output_dtype must be Float32 or {:?}, that of the weights; got {output_dtype:?}",
            weights.dtype
        )));
    }
    check_matrix("input", input, weights.dtype, weights.in_features)?;
    check_matrix("output", output, output_dtype, finish.out_features(weights))?;
    let features = (weights.in_features, weights.out_features);
    let rows = (input, weights.dtype);
    // SAFETY: the caller's promise.
    let additions = unsafe { Additions::make(adapters, features, num_rows, rows, execution)? };
    let additions = (&additions, 0);
    let rows = weights.dtype;
    let product = Product {
        weights,
        finish,
        num_rows,
        input,
        rows,
        #[cfg(target_arch = "x86_64")]
        parts: 1,
        bytes: None,
        output,
        output_dtype,
        additions,
        amx_rows: match (execution.instructions, weights.panels) {
            (InstructionSet::Amx, Panels::Units(_)) => {
                (weights.weight_dtype == DType::BFloat16).then_some(1)
            }
            (InstructionSet::Amx, Panels::Bytes(panels)) => panels.amx_rows(weights.in_features),
            _ => None,
        },
    };
    if let Panels::Bytes(panels) = weights.panels {
        // SAFETY: the caller's promise.
        unsafe { product.run_bytes(&panels, execution) };
        return Ok(());
    }
    #[cfg(target_arch = "x86_64")]
    if product.amx_rows.is_some() {
        // SAFETY: the caller's promise.
        unsafe { product.run_by_amx(execution) };
        return Ok(());
    }
    let is_widened = match (weights.panels, rows) {
        (_, DType::Float32) | (Panels::Units(_), DType::Float16) => false,
        (Panels::Int8 { .. } | Panels::Bytes(_), _) => true,
        (Panels::Units(_), DType::BFloat16) => {
            num_rows > FEW_ROWS && !execution.instructions.has_dots_of_bfloat16()
        }
    };
    if is_widened {
        // SAFETY: the caller's promise.
        unsafe { product.run_widened(execution) };
    } else {
        product.run(execution);
    }
    Ok(())
}

pub(crate) fn check_matrix(
    name: &str,
    matrix: Matrix,
    dtype: DType,
    features: usize,
) -> Result<()> {
    let unit = dtype.per_unit();
    check_units(name, matrix.pointer)?;
    if matrix.stride < features || !matrix.stride.is_multiple_of(unit) {
        return Err(Error(format!(
            "rows of {name} must be at least {features} elements apart, a multiple of {unit}; \
             got {}",
            matrix.stride
        )));
    }
    Ok(())
}

/// A checked call.
struct Product<'a> {
    weights: &'a Weights<'a>,
    finish: Finish,
    num_rows: usize,
    input: Matrix,
    /// Type of the input.
    rows: DType,
    /// Parts of a row of the input, whose numbers are their sums.
    #[cfg(target_arch = "x86_64")]
    parts: usize,
    /// The input once it is quantised.
    bytes: Option<ByteRows>,
    output: Matrix,
    output_dtype: DType,
    /// Adapter outputs to add, and their number of the first row.
    additions: (&'a Additions<'a>, usize),
    /// Rows of an item from which AMX multiplies; None without it.
    amx_rows: Option<usize>,
}

// SAFETY: the pointers are shared for reading, and each item writes separate features.
unsafe impl Sync for Product<'_> {}

impl Product<'_> {
    fn run(&self, execution: &Execution<'_>) {
        execution.share(self.num_items(), &|items| {
            // SAFETY: the creator of the product promises its memory; each item is done once.
            unsafe {
                match (self.weights.panels, &self.bytes) {
                    (Panels::Bytes(panels), Some(rows)) => {
                        let product = self;
                        execution.instructions.run(ByteItems { product, panels, rows, items });
                    }
                    _ => execution.instructions.run(Items { product: self, items }),
                }
            }
        });
    }

    /// Runs the product on rows that are converted to float32 first.
    ///
    /// # Safety
    /// That of [`linear`].
    unsafe fn run_widened(&self, execution: &Execution<'_>) {
        let len = self.weights.in_features;
        let mut wide = WIDE.take();
        for part in self.in_chunks(self.num_rows.div_ceil(CHUNK_ROWS)) {
            let [to] = pieces(&mut wide, [part.num_rows * len]);
            let Matrix { pointer: from, stride } = part.input;
            let work = Rowwise::Widen { from, stride, len, to };
            // SAFETY: the caller's promise; the buffer can hold the rows.
            unsafe { for_rows(work, part.rows, part.num_rows, len, execution) };
            let input = Matrix { pointer: to.cast(), stride: len };
            Product { input, rows: DType::Float32, ..part }.run(execution);
        }
        WIDE.set(wide);
    }

    /// Runs the product on rows that are quantised first, as the panels need them.
    ///
    /// # Safety
    /// That of [`linear`].
    unsafe fn run_bytes(&self, panels: &BytePanels<'_>, execution: &Execution<'_>) {
        let len = self.weights.in_features;
        self.for_chunks(CHUNK_ROWS, FEWEST_ROWS, execution, &|part, execution| {
            let mut memory = ROWS.take();
            let rows = ByteRows::new(&mut memory, part.num_rows, len, panels);
            let from = (part.input, part.rows);
            // SAFETY: the caller's promise; the buffer can hold the rows.
            unsafe { quantise_rows(from, len, part.num_rows, &rows, execution) };
            Product { bytes: Some(rows), ..*part }.run(execution);
            ROWS.set(memory);
        });
    }

    fn rows_per_item(&self) -> usize {
        match self.amx_rows.is_some() {
            // Two tiles of rows share what they read of a panel.
            true if self.num_rows >= 2 * MOST_ROWS => MOST_ROWS,
            true => MOST_ROWS / 2,
            false if self.num_rows >= 4 * MANY_ROWS => MANY_ROWS,
            false => FEW_ROWS,
        }
    }

    fn row_blocks(&self) -> usize {
        self.num_rows.div_ceil(self.rows_per_item())
    }

    fn num_items(&self) -> usize {
        self.weights.num_panels() * self.row_blocks()
    }
}

impl Product<'_> {
    /// Sums of an item of rows of `E` with lanes of `L`, `[rows][64]`.
    #[inline(always)]
    unsafe fn multiply<I: Instructions, E: Factor, L: Lane>(
        &self,
        panels: &[L],
        item: usize,
        sums: *mut f32,
    ) {
        let depth = self.weights.depth();
        let segment = |panel: usize, start: usize, len: usize| {
            let values = panels.as_ptr().wrapping_add((panel * depth + start) * PANEL_FEATURES);
            let ahead = values.wrapping_add(depth * PANEL_FEATURES);
            Segment { values, weight: start, len, ahead }
        };
        // SAFETY: the caller's promise; segments are those of the panels.
        unsafe { self.sum::<I, E, L>(segment, item, sums) };
    }

    /// Sums of an item of float32 rows with pairs of `H`, of more than a few rows widened a block at
    /// a time.
    #[inline(always)]
    unsafe fn multiply_halves<I: Instructions, H: Half>(
        &self,
        panels: &[u32],
        item: usize,
        sums: *mut f32,
    ) {
        if self.rows_of(item).2 <= I::MAX_ROWS {
            // SAFETY: the caller's promise.
            return unsafe { self.multiply::<I, Float32Pair<H>, _>(panels, item, sums) };
        }
        let depth = self.weights.depth();
        let mut scratch = BLOCK.take();
        let [block] = pieces(&mut scratch, [2 * BLOCK_UNITS * PANEL_FEATURES]);
        let segment = |panel: usize, start: usize, len: usize| {
            let pairs = panels.as_ptr().wrapping_add((panel * depth + start) * PANEL_FEATURES);
            // SAFETY: the panel has these pairs, and the block is as large as two of each.
            unsafe { unpack::<I, H>(pairs, len, PANEL_FEATURES, block) };
            let values = block.cast_const().cast::<u32>();
            Segment { values, weight: 2 * start, len: 2 * len, ahead: values }
        };
        // SAFETY: the caller's promise; segments are the panels' numbers in their order.
        unsafe { self.sum::<I, f32, u32>(segment, item, sums) };
        BLOCK.set(scratch);
    }

    /// Rows of an item for a kernel.
    #[inline(always)]
    fn rows(&self, first: usize, sums: *mut f32, adds: bool) -> kernel::Rows {
        let unit_stride = self.input.stride / self.rows.per_unit();
        #[expect(clippy::cast_ptr_alignment, reason = "checked: a multiple of 4")]
        let units = self.input.pointer.cast::<u32>().wrapping_add(first * unit_stride);
        kernel::Rows { units, unit_stride, result: sums, result_stride: PANEL_FEATURES, adds }
    }

    /// Panel of an item, its first row and the number of its rows.
    fn rows_of(&self, item: usize) -> (usize, usize, usize) {
        let (panel, block) = (item / self.row_blocks(), item % self.row_blocks());
        let first_row = block * self.rows_per_item();
        (panel, first_row, self.rows_per_item().min(self.num_rows - first_row))
    }

    /// Writes the outputs of an item's sums.
    #[inline(always)]
    unsafe fn end_item<I: Instructions>(&self, item: usize, sums: *mut f32) {
        let (panel, first_row, num_rows) = self.rows_of(item);
        // SAFETY: panel and rows exist; `sums` has the item's rows.
        unsafe {
            for row in 0..num_rows {
                self.scale_and_shift(panel, sums.add(row * PANEL_FEATURES));
            }
            let (additions, first_added) = self.additions;
            if !additions.is_empty() {
                additions.add::<I>(panel, first_added + first_row, num_rows, sums);
            }
            for row in 0..num_rows {
                let (row, sums) = (first_row + row, sums.add(row * PANEL_FEATURES));
                match self.output_dtype {
                    DType::Float32 => self.finish::<I, f32>(panel, row, sums),
                    DType::BFloat16 => self.finish::<I, BFloat16>(panel, row, sums),
                    DType::Float16 => self.finish::<I, Float16>(panel, row, sums),
                }
            }
        }
    }

    /// Sums of an item, `[rows][64]`; `segment` returns a part of a panel, by its first unit and
    /// their number.
    #[inline(always)]
    unsafe fn sum<I: Instructions, E: Factor, L: Lane>(
        &self,
        segment: impl Fn(usize, usize, usize) -> Segment<L>,
        item: usize,
        sums: *mut f32,
    ) {
        let (panel, first_row, num_rows) = self.rows_of(item);
        let (depth, block) = (self.weights.depth(), self.weights.block());
        for start in (0..depth).step_by(block) {
            let segment = segment(panel, start, block.min(depth - start));
            let rows = self.rows(first_row, sums, start > 0);
            // SAFETY: rows and panel have `depth` units.
            unsafe {
                kernel::values::<I, E, L>(rows, num_rows, &[segment], PANEL_FEATURES);
            }
        }
    }

    /// Applies the scales of int8 weights, and the bias, to a row's sums.
    #[inline(always)]
    unsafe fn scale_and_shift(&self, panel: usize, sums: *mut f32) {
        let first = panel * PANEL_FEATURES;
        // SAFETY: `sums` has 64 numbers.
        unsafe {
            if let Panels::Int8 { scales, .. } = self.weights.panels {
                for (index, scale) in scales[first..].iter().take(PANEL_FEATURES).enumerate() {
                    *sums.add(index) *= scale;
                }
            }
            if let Some(bias) = self.weights.bias {
                for (index, bias) in bias[first..].iter().take(PANEL_FEATURES).enumerate() {
                    *sums.add(index) += bias;
                }
            }
        }
    }

    /// Writes the outputs of a row's sums.
    #[inline(always)]
    unsafe fn finish<I: Vectors, O: Element>(&self, panel: usize, row: usize, sums: *mut f32) {
        let row = self.output.pointer.cast::<O>().wrapping_add(row * self.output.stride);
        let first = panel * PANEL_FEATURES;
        // SAFETY: the row has these features, and `sums` 64 numbers.
        unsafe {
            if let Finish::Gate(activation) = self.finish {
                const HALF: usize = PANEL_FEATURES / 2;
                for index in (0..HALF).step_by(PANEL) {
                    let gate = I::load(sums.add(index));
                    let gate = match activation {
                        Activation::Silu => silu::<I>(gate),
                        Activation::GeluTanh => gelu_tanh::<I>(gate),
                    };
                    let numbers = I::mul(gate, I::load(sums.add(HALF + index)));
                    O::store::<I>(numbers, row.add(panel * HALF + index).cast());
                }
                return;
            }
            let len = PANEL_FEATURES.min(self.weights.out_features - first);
            let adds = self.finish == Finish::Add;
            for index in (0..len).step_by(PANEL) {
                let (sums, to) = (sums.add(index), row.add(first + index));
                if index + PANEL <= len {
                    let numbers = I::load(sums);
                    let numbers = if adds { I::add(numbers, O::load::<I>(to)) } else { numbers };
                    O::store::<I>(numbers, to.cast());
                } else {
                    for index in 0..len - index {
                        let there = if adds { to.add(index).read().to_f32() } else { 0.0 };
                        to.add(index).write(O::from_f32(*sums.add(index) + there));
                    }
                }
            }
        }
    }
}
