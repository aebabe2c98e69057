//! Panels of whole numbers with a scale for each feature, made of any numbers.

use super::fetch::Fetched;
use super::{CHUNK, CHUNK_STRIDE, Packing};
use crate::linear::PANEL_FEATURES;
use crate::number::PANEL;
use crate::vectors::Instructions;

/// The largest whole number of a weight; -128 has no positive counterpart.
const LARGEST: f32 = 127.0;

impl Packing<'_> {
    /// Writes a panel and its scales; `place` is that of an input's weight of a feature.
    ///
    /// # Safety
    /// The targets can hold them, and no other thread accesses them; the CPU has the instructions.
    #[inline(always)]
    pub(super) unsafe fn write_whole<I: Instructions>(
        &self,
        panel: usize,
        fetched: &Fetched<'_>,
        rows: &mut [f32],
        (values, scales): (*mut i8, *mut f32),
        place: impl Fn(usize, usize) -> usize,
    ) {
        // SAFETY: the caller's promise.
        let peaks = unsafe { self.peaks::<I>(panel, fetched, rows) };
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
                let len = self.read::<I>(panel, fetched, first, rows, false);
                transpose(rows, len, |k, feature, number| {
                    let whole = (number / steps[feature]).round_ties_even();
                    let whole = whole.clamp(-LARGEST, LARGEST);
                    #[expect(clippy::cast_possible_truncation, reason = "a whole number")]
                    values.add(place(first + k, feature)).write(whole as i8);
                });
            }
        }
    }

    /// The largest magnitude of each feature of a panel.
    #[inline(always)]
    unsafe fn peaks<I: Instructions>(
        &self,
        panel: usize,
        fetched: &Fetched<'_>,
        rows: &mut [f32],
    ) -> [f32; PANEL_FEATURES] {
        let mut peaks = [0.0_f32; PANEL_FEATURES];
        for first in (0..self.in_features).step_by(CHUNK) {
            // SAFETY: the caller's promise.
            let len = unsafe { self.read::<I>(panel, fetched, first, rows, true) };
            for (peak, row) in peaks.iter_mut().zip(rows.chunks_exact(CHUNK_STRIDE)) {
                *peak = row[..len].iter().fold(*peak, |peak, number| peak.max(number.abs()));
            }
        }
        peaks
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
