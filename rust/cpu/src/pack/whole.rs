//! Panels of whole numbers with a scale for each feature, made of any numbers.

use super::fetch::Fetched;
use super::{CHUNK, CHUNK_STRIDE, Packing};
use crate::bytes::{TURNED, turn};
use crate::linear::PANEL_FEATURES;
use crate::number::PANEL;
use crate::vectors::Instructions;

/// The largest whole number of a weight; -128 has no positive counterpart.
const LARGEST: f32 = 127.0;
/// What weights are multiplied with before they are turned.
#[expect(clippy::cast_precision_loss, reason = "a power of two")]
const PART: f32 = 1.0 / TURNED as f32;

impl Packing<'_> {
    /// Writes a panel and its scales, of turned weights if `IS_TURNED`: `[K / 4][64][4]`, otherwise
    /// `[K][64]`.
    ///
    /// # Safety
    /// The targets can hold them, and no other thread accesses them; the CPU has the instructions.
    #[inline(always)]
    pub(super) unsafe fn write_whole<I: Instructions, const IS_TURNED: bool>(
        &self,
        panel: usize,
        fetched: &Fetched<'_>,
        rows: &mut [f32],
        (values, scales): (*mut i8, *mut f32),
    ) {
        // SAFETY: the caller's promise.
        let peaks = unsafe { self.peaks::<I, IS_TURNED>(panel, fetched, rows) };
        let steps = peaks.map(|peak| peak / LARGEST);
        let first_row = panel * PANEL_FEATURES;
        for (index, step) in steps.iter().enumerate().take(self.num_rows - first_row) {
            // SAFETY: the feature exists, and this thread has its panel.
            unsafe { scales.add(first_row + index).write(*step) };
        }
        // Without a scale all weights of a feature are zero, or so small that they become zero.
        let steps = steps.map(|step| if step == 0.0 { f32::INFINITY } else { step });
        for first in (0..self.in_features).step_by(CHUNK) {
            // SAFETY: the caller's promise; the panel has these weights.
            unsafe {
                let len = self.read_whole::<I, IS_TURNED>(panel, fetched, first, rows, false);
                transpose(rows, len, |k, feature, number| {
                    let whole = (number / steps[feature]).round_ties_even();
                    let whole = whole.clamp(-LARGEST, LARGEST);
                    let k = first + k;
                    let place = if IS_TURNED {
                        (k / 4 * PANEL_FEATURES + feature) * 4 + k % 4
                    } else {
                        k * PANEL_FEATURES + feature
                    };
                    #[expect(clippy::cast_possible_truncation, reason = "a whole number")]
                    values.add(place).write(whole as i8);
                });
            }
        }
    }

    /// The largest magnitude of each feature of a panel.
    #[inline(always)]
    unsafe fn peaks<I: Instructions, const IS_TURNED: bool>(
        &self,
        panel: usize,
        fetched: &Fetched<'_>,
        rows: &mut [f32],
    ) -> [f32; PANEL_FEATURES] {
        let mut peaks = [0.0_f32; PANEL_FEATURES];
        for first in (0..self.in_features).step_by(CHUNK) {
            // SAFETY: the caller's promise.
            let len = unsafe { self.read_whole::<I, IS_TURNED>(panel, fetched, first, rows, true) };
            for (peak, row) in peaks.iter_mut().zip(rows.chunks_exact(CHUNK_STRIDE)) {
                *peak = row[..len].iter().fold(*peak, |peak, number| peak.max(number.abs()));
            }
        }
        peaks
    }

    /// As `read`, and turns the weights if `IS_TURNED`.
    #[inline(always)]
    unsafe fn read_whole<I: Instructions, const IS_TURNED: bool>(
        &self,
        panel: usize,
        fetched: &Fetched<'_>,
        first: usize,
        rows: &mut [f32],
        counts: bool,
    ) -> usize {
        // SAFETY: the caller's promise; a chunk is whole groups of those that are turned together.
        unsafe {
            let len = self.read::<I>(panel, fetched, first, rows, counts);
            if IS_TURNED {
                for row in rows.chunks_exact_mut(CHUNK_STRIDE) {
                    for numbers in row[..len].chunks_exact_mut(TURNED) {
                        for number in &mut *numbers {
                            *number *= PART;
                        }
                        turn::<I, f32>(numbers.as_ptr(), numbers.as_mut_ptr());
                    }
                }
            }
            len
        }
    }
}

/// Passes each number of 64 rows to `write`, `PANEL` of a row at a time: lines of both sides stay
/// in the first cache.
#[inline(always)]
fn transpose(rows: &[f32], len: usize, mut write: impl FnMut(usize, usize, f32)) {
    for first in (0..len).step_by(PANEL) {
        for (feature, row) in rows.chunks_exact(CHUNK_STRIDE).enumerate() {
            for (index, number) in row[first..len.min(first + PANEL)].iter().enumerate() {
                write(first + index, feature, *number);
            }
        }
    }
}
