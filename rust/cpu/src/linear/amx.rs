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

use super::chunks::FEWEST_ROWS;
use super::{CHUNK_ROWS, MOST_ROWS, Matrix, PANEL_FEATURES, Product};
use crate::elementwise::{PARTS, Rowwise, for_rows};
use crate::number::{BFloat16, DType, PANEL};
use crate::scratch::pieces;
use crate::team::Execution;
use crate::x86::amx::{self, Lines, OfBFloat16, Steps, Tiles};

/// Numbers of bfloat16 in a cache line.
const LINE: usize = 32;

thread_local! {
    static DIVIDED: Cell<Vec<u32>> = const { Cell::new(Vec::new()) };
}

impl Product<'_> {
    /// Sums of an item of bfloat16 rows, or of rows in parts.
    pub(super) unsafe fn multiply_by_amx(
        &self,
        panels: &[u32],
        item: usize,
        (sums, tiles): (*mut f32, &mut Tiles),
    ) {
        let (panel, first_row, num_rows) = self.rows_of(item);
        let depth = self.weights.depth();
        let panel = panels.as_ptr().wrapping_add(panel * depth * PANEL_FEATURES);
        let rows = self.rows(first_row, sums, false);
        let mut ahead = Lines::after(panel, depth, first_row, self.num_rows);
        let parts = (self.parts, rows.unit_stride / self.parts);
        let steps = Steps { depth, parts, len: amx::STEP, stride: PANEL_FEATURES };
        let at = |step: usize, vector: usize| {
            panel.wrapping_add(step * amx::STEP * PANEL_FEATURES + vector * PANEL)
        };
        // SAFETY: the caller's promise.
        unsafe {
            let num_vectors = PANEL_FEATURES / PANEL;
            tiles.product::<OfBFloat16>((rows, num_rows), num_vectors, steps, at, &mut ahead);
        }
    }

    /// Runs the product, each thread chunks of rows that stay in its second cache; where rows are
    /// few, all threads one chunk after another.
    ///
    /// # Safety
    /// That of [`super::linear`].
    pub(super) unsafe fn run_by_amx(&self, execution: &Execution<'_>) {
        let (most_rows, parts) = self.rows_of_chunk();
        // SAFETY: the caller's promise; chunks share no row.
        self.for_chunks(
            most_rows,
            FEWEST_ROWS.div_ceil(parts),
            execution,
            &|chunk, execution| unsafe {
                chunk.run_chunk(execution);
            },
        );
    }

    /// Runs the product of a chunk.
    ///
    /// # Safety
    /// That of [`super::linear`].
    unsafe fn run_chunk(&self, execution: &Execution<'_>) {
        if self.rows != DType::Float32 {
            return self.run(execution);
        }
        let len = self.weights.in_features;
        let stride = stride_of_parts(len);
        let mut memory = DIVIDED.take();
        let [divided] = pieces(&mut memory, [PARTS * self.num_rows * stride / 2]);
        #[expect(clippy::cast_ptr_alignment, reason = "checked: a multiple of 4")]
        let from = self.input.pointer.cast::<f32>();
        let to = divided.cast::<BFloat16>();
        let work = Rowwise::Divide { from, stride: self.input.stride, len, to, to_stride: stride };
        // SAFETY: the caller's promise; the buffer can hold the parts.
        unsafe { for_rows(work, DType::Float32, self.num_rows, PARTS * len, execution) };
        let input = Matrix { pointer: divided.cast(), stride: PARTS * stride };
        Product { input, rows: DType::BFloat16, parts: PARTS, ..*self }.run(execution);
        DIVIDED.set(memory);
    }

    /// The most rows of a chunk, which stay in the second cache, and parts of a row.
    fn rows_of_chunk(&self) -> (usize, usize) {
        /// Half of a cache of 2 MiB; weights and sums take the rest.
        const BYTES: usize = 1 << 20;
        let len = self.weights.in_features;
        let (row_bytes, parts, most) = match self.rows {
            DType::Float32 => {
                let part_bytes = PARTS * size_of::<BFloat16>();
                (stride_of_parts(len) * (size_of::<f32>() + part_bytes), PARTS, CHUNK_ROWS)
            }
            rows => (len * rows.size(), 1, self.num_rows),
        };
        let fitting = BYTES / row_bytes;
        let is_enough = fitting * parts >= FEWEST_ROWS;
        (if is_enough { fitting.next_multiple_of(MOST_ROWS) } else { most }, parts)
    }
}

/// Numbers from a part of a row to the next: an odd number of cache lines, so that rows of a tile do
/// not meet in the same few sets of a cache.
fn stride_of_parts(len: usize) -> usize {
    (len.div_ceil(LINE) | 1) * LINE
}
