//! Products by AMX with weights of bfloat16.
//!
//! AMX has no products of float32.  But a float32 is the sum of three bfloat16: each of them is
//! multiplied with the weights, which is exact, and all products are summed in float32.  (Henry et
//! al., "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision
//! Computations", section 2, where both operands are such sums.)
//!
//! # Invariants
//!
//! 1. The products that are summed are exact.  An infinite number gives NaN.
//!
//! # Costs
//!
//! Three products of bfloat16, each ten times as fast as one of float32, and half of its weights'
//! bytes.  Each panel of weights meets all rows of a chunk, which stay in the second cache: 768 rows
//! of float32 and 2,048 of bfloat16, of 576 to 1,536 inputs, took a fifth longer without.

use std::cell::Cell;

use super::{CHUNK_ROWS, MOST_ROWS, Matrix, PANEL_FEATURES, Product};
use crate::elementwise::{PARTS, Rowwise, for_rows};
use crate::number::{BFloat16, DType, PANEL};
use crate::scratch::pieces;
use crate::team::Execution;
use crate::x86::amx::{self, OfBFloat16, Steps};

/// Numbers of bfloat16 in a cache line.
const LINE: usize = 32;

thread_local! {
    static DIVIDED: Cell<Vec<u32>> = const { Cell::new(Vec::new()) };
}

/// Rows of a chunk that stays in the second cache, by the bytes of a row; None where each weight
/// would meet too few rows and parts of them: each chunk reads all weights.
fn rows_in_cache(row_bytes: usize, parts: usize) -> Option<usize> {
    /// Half of a cache of 2 MiB; weights and sums take the rest.
    const BYTES: usize = 1 << 20;
    const FEWEST: usize = 192;
    let fitting = BYTES / row_bytes;
    (fitting * parts >= FEWEST).then(|| fitting.next_multiple_of(MOST_ROWS))
}

impl Product<'_> {
    /// Sums of an item of bfloat16 rows, or of rows in parts.
    pub(super) unsafe fn multiply_by_amx(&self, panels: &[u32], item: usize, sums: *mut f32) {
        /// How far ahead a panel is read for a few rows, in bytes.
        const AHEAD: usize = 16 * 1024;
        let (panel, first_row, num_rows) = self.rows_of(item);
        let depth = self.weights.depth();
        let panel = panels.as_ptr().wrapping_add(panel * depth * PANEL_FEATURES);
        let rows = self.rows(first_row, sums, false);
        let ahead = AHEAD / size_of::<u32>();
        let parts = (self.parts, rows.unit_stride / self.parts);
        let steps = Steps { depth, parts, len: amx::STEP, stride: PANEL_FEATURES, ahead };
        let at = |step: usize, vector: usize| {
            panel.wrapping_add(step * amx::STEP * PANEL_FEATURES + vector * PANEL)
        };
        // SAFETY: the caller's promise.
        unsafe { amx::product::<OfBFloat16>(rows, num_rows, PANEL_FEATURES / PANEL, steps, at) };
    }

    /// Runs the product, chunk after chunk.
    ///
    /// # Safety
    /// That of [`super::linear`].
    pub(super) unsafe fn run_by_amx(&self, execution: &Execution<'_>) {
        if self.rows == DType::Float32 {
            // SAFETY: the caller's promise.
            return unsafe { self.run_in_parts(execution) };
        }
        let row_bytes = self.weights.in_features * self.rows.size();
        let num_rows = rows_in_cache(row_bytes, 1).unwrap_or(self.num_rows);
        self.in_chunks(num_rows).for_each(|part| part.run(execution));
    }

    /// Runs the product on float32 rows that are divided into parts first.
    ///
    /// # Safety
    /// That of [`super::linear`].
    unsafe fn run_in_parts(&self, execution: &Execution<'_>) {
        let len = self.weights.in_features;
        // An odd number of cache lines: rows of a tile do not meet in the same few sets of a cache.
        let stride = (len.div_ceil(LINE) | 1) * LINE;
        let row_bytes = stride * (size_of::<f32>() + PARTS * size_of::<BFloat16>());
        let num_rows = rows_in_cache(row_bytes, PARTS).unwrap_or(CHUNK_ROWS).min(CHUNK_ROWS);
        let mut memory = DIVIDED.take();
        for part in self.in_chunks(num_rows) {
            let [divided] = pieces(&mut memory, [PARTS * part.num_rows * stride / 2]);
            #[expect(clippy::cast_ptr_alignment, reason = "checked: a multiple of 4")]
            let from = part.input.pointer.cast::<f32>();
            let to = divided.cast::<BFloat16>();
            let work =
                Rowwise::Divide { from, stride: part.input.stride, len, to, to_stride: stride };
            // SAFETY: the caller's promise; the buffer can hold the parts.
            unsafe { for_rows(work, DType::Float32, part.num_rows, PARTS * len, execution) };
            let input = Matrix { pointer: divided.cast(), stride: PARTS * stride };
            Product { input, rows: DType::BFloat16, parts: PARTS, ..part }.run(execution);
        }
        DIVIDED.set(memory);
    }
}
