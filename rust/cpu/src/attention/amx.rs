//! Chunks of pairs of bfloat16 by AMX.
//!
//! The steps of keys are 16 units of a panel, those of values the tokens of a panel: whatever else
//! is computed, the products of a row are added in one order.
#![expect(unsafe_code, reason = "reads and writes through the caller's pointers, and kernels")]
#![expect(clippy::inline_always, reason = "must become part of a function with the instructions")]

use std::ops::Range;

use crate::attention::softmax::Cap;
use crate::attention::tile::{Chunk, weigh};
use crate::kernel::Rows;
use crate::number::{BFloat16, CHUNK, CHUNK_PANELS, PANEL};
use crate::vectors::{Instructions, Vectors};
use crate::x86::amx::{Beside, OfBFloat16, STEP, Steps, TILE_ROWS, Tiles, WHOLE};

/// Units of a token's values in a panel, each of two tokens.
const UNITS: usize = PANEL / 2;

impl Chunk<'_> {
    /// Computes the result of the `keys` of the chunk that any query sees, in the `used` panels.
    ///
    /// # Safety
    /// As [`super::tile::Attend`]; the CPU has AMX.
    #[inline(always)]
    pub(super) unsafe fn attend_by_amx<I: Instructions>(
        self,
        (keys, used): (&Range<usize>, &Range<usize>),
        panels: &[*const u32; CHUNK_PANELS],
        cap: Cap,
    ) {
        let Self { call, item, index, buffers, part, .. } = self;
        let (depth, columns, num_rows) = (call.depth(), call.columns(), item.queries.len());
        let scores = Rows {
            units: buffers.queries,
            unit_stride: depth,
            result: buffers.scores.wrapping_add(used.start * PANEL),
            result_stride: CHUNK,
            adds: false,
        };
        let weights = Rows {
            units: buffers.weights.wrapping_add(used.start * UNITS),
            unit_stride: CHUNK / 2,
            result: part.values,
            result_stride: columns,
            adds: false,
        };
        let of_keys = Steps { depth, parts: WHOLE, len: STEP, stride: PANEL };
        let of_values =
            Steps { depth: used.len() * UNITS, parts: WHOLE, len: UNITS, stride: columns };
        let keys_at = |step: usize, panel: usize| {
            panels[used.start + panel].wrapping_add(step * STEP * PANEL)
        };
        // For a few rows, which take less time than reading does: values lie after their keys.
        let mut values_ahead = Beside(if num_rows <= TILE_ROWS { depth * PANEL } else { 0 });
        // SAFETY: the promise of `Attend`.
        unsafe {
            let mut tiles = Tiles::default();
            tiles.product::<OfBFloat16>(
                (scores, num_rows),
                used.len(),
                of_keys,
                keys_at,
                &mut values_ahead,
            );
            multiply::<I>(scores, num_rows, used.len(), cap.factor);
            weigh::<I, BFloat16>(call, item, index, (used, cap), buffers, part);
            let values = seen_values((keys, used), panels, (depth, columns), buffers.halves);
            let values_at =
                |step: usize, vector: usize| values[used.start + step].wrapping_add(vector * PANEL);
            tiles.product::<OfBFloat16>(
                (weights, num_rows),
                columns / PANEL,
                of_values,
                values_at,
                &mut (),
            );
        }
    }
}

/// Multiplies the scores of some panels by a factor.
#[inline(always)]
unsafe fn multiply<I: Vectors>(rows: Rows, num_rows: usize, num_panels: usize, factor: f32) {
    for row in 0..num_rows {
        for panel in 0..num_panels {
            // SAFETY: the rows have scores of these panels.
            unsafe {
                let scores = rows.result.add(row * rows.result_stride + panel * PANEL);
                I::store(I::mul(I::load(scores), I::splat(factor)), scores);
            }
        }
    }
}

/// The values of a chunk's panels; of a panel with tokens that are not visible, a copy in which
/// theirs are zero, since they may be NaN, which no weight removes.
unsafe fn seen_values(
    (keys, used): (&Range<usize>, &Range<usize>),
    panels: &[*const u32; CHUNK_PANELS],
    (depth, columns): (usize, usize),
    copies: *mut u32,
) -> [*const u32; CHUNK_PANELS] {
    let mut values = panels.map(|panel| panel.wrapping_add(depth * PANEL));
    let mut copy = copies;
    for (panel, values) in values.iter_mut().enumerate().take(used.end).skip(used.start) {
        let seen = |token: usize| keys.contains(&(panel * PANEL + token));
        if seen(0) && seen(PANEL - 1) {
            continue;
        }
        for unit in 0..UNITS {
            let first = if seen(2 * unit) { 0x0000_ffff } else { 0 };
            let second = if seen(2 * unit + 1) { 0xffff_0000 } else { 0 };
            for column in unit * columns..(unit + 1) * columns {
                // SAFETY: the panel has these units, and there is memory for two copies.
                unsafe { copy.add(column).write(values.add(column).read() & (first | second)) };
            }
        }
        *values = copy.cast_const();
        copy = copy.wrapping_add(UNITS * columns);
    }
    values
}
