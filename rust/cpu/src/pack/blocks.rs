//! Panels of blocks: those of a file, unchanged, or blocks that other numbers are rounded to.

use std::sync::atomic::Ordering;

use super::fetch::Fetched;
use super::{CHUNK, CHUNK_STRIDE, Packing, Target};
use crate::bytes::{self, Format};
use crate::error::{Error, Result};
use crate::linear::PANEL_FEATURES;
use crate::number::{Float16, Stored};
use crate::rounding::{BLOCK, Rounding};
use crate::vectors::Instructions;

/// Bytes of the largest block that numbers are rounded to.
const MOST_BYTES: usize = Format::Q8_0.block().num_bytes();

impl Packing<'_> {
    /// Refuses rows that are not stored as the panels keep them, if these do not take any.
    pub(super) fn check_blocks(&self) -> Result<()> {
        let Target::Bytes { sections, .. } = self.target else { return Ok(()) };
        for panel in 0..self.num_panels() {
            let (format, _) = bytes::panel_at(sections, self.in_features, panel);
            if !format.takes_any()
                && let Some(index) = self.other_storage(panel, format)
            {
                return Err(Error(format!(
                    "rows[{index}] must be stored as {format:?} for panels of {format:?}; got {:?}",
                    self.parts[index].storage
                )));
            }
        }
        Ok(())
    }

    /// The first part of a panel that is not stored in its format.
    pub(super) fn other_storage(&self, panel: usize, format: Format) -> Option<usize> {
        (0..PANEL_FEATURES)
            .filter_map(|feature| self.source(panel, feature))
            .map(|(index, _)| index)
            .find(|index| self.parts[*index].storage != format.storage())
    }

    /// Lays the blocks of a panel's features side by side, word by word.
    ///
    /// # Safety
    /// `to` can hold the panel, and no other thread accesses it.
    pub(super) unsafe fn write_blocks(
        &self,
        panel: usize,
        fetched: &Fetched<'_>,
        format: Format,
        mut to: *mut u8,
    ) {
        let block = format.block();
        let rows: [Option<(usize, &[u8])>; PANEL_FEATURES] = std::array::from_fn(|feature| {
            self.source(panel, feature).map(|(index, row)| {
                let part = &self.parts[index];
                let row_bytes = part.storage.row_bytes(self.in_features);
                (index, fetched.row(index, part.place(row), row_bytes))
            })
        });
        for number in 0..self.in_features / block.num_inputs {
            for (feature, row) in rows.iter().enumerate() {
                let Some((index, row)) = row else { continue };
                let stored = &row[number * block.num_bytes()..][..block.num_bytes()];
                // SAFETY: the caller's promise: the panel has this block of each feature.
                unsafe { write_block(format, stored, feature, to) };
                if block.halves.iter().any(|half| !half_at(stored, *half).is_finite()) {
                    self.odd[*index].fetch_add(block.num_inputs, Ordering::Relaxed);
                }
            }
            to = to.wrapping_add(PANEL_FEATURES * block.num_bytes());
        }
    }

    /// Writes the scales of a panel's features.
    ///
    /// # Safety
    /// `scales` can hold those of all features; no other thread accesses the panel's.
    pub(super) unsafe fn write_scales(&self, panel: usize, scales: *mut f32) {
        for feature in 0..PANEL_FEATURES {
            let Some((index, row)) = self.source(panel, feature) else { continue };
            let part = &self.parts[index];
            let Some(stored) = part.scales else { continue };
            let scale = stored[part.place(row)];
            // SAFETY: the caller's promise; the feature exists.
            unsafe { scales.add(panel * PANEL_FEATURES + feature).write(scale) };
            // The largest weight is 128 scales.
            if !(128.0 * scale).is_finite() {
                self.odd[index].fetch_add(self.in_features, Ordering::Relaxed);
            }
        }
    }

    /// Writes a panel of blocks of numbers rounded to the dtype.
    ///
    /// # Safety
    /// That of `write_blocks`; the CPU has the instructions.
    pub(super) unsafe fn write_rounded<I: Instructions>(
        &self,
        panel: usize,
        fetched: &Fetched<'_>,
        rows: &mut [f32],
        (format, to): (Format, *mut u8),
    ) {
        let block = format.block();
        let mut stored = [0; CHUNK / BLOCK * MOST_BYTES];
        for first in (0..self.in_features).step_by(CHUNK) {
            // SAFETY: the caller's promise.
            let len = unsafe { self.read::<I>(panel, fetched, first, rows, true) };
            let to = to.wrapping_add(format.panel_bytes(first));
            for (feature, row) in rows.chunks_exact(CHUNK_STRIDE).enumerate() {
                let Some((index, _)) = self.source(panel, feature) else { continue };
                let (numbers, stored) =
                    (&row[..len], &mut stored[..len / BLOCK * block.num_bytes()]);
                // SAFETY: the caller's promise.
                unsafe { I::call(Rounding { format, numbers, to: &mut *stored }) };
                let blocks = stored.chunks_exact(block.num_bytes());
                for (number, (stored, numbers)) in
                    blocks.zip(numbers.chunks_exact(BLOCK)).enumerate()
                {
                    let to = to.wrapping_add(number * PANEL_FEATURES * block.num_bytes());
                    // SAFETY: the caller's promise: the panel has this block of each feature.
                    unsafe { write_block(format, stored, feature, to) };
                    // Numbers that are not finite were counted; others have too large a scale.
                    let is_odd = block.halves.iter().any(|at| !half_at(stored, *at).is_finite());
                    if is_odd && numbers.iter().all(|number| number.is_finite()) {
                        self.odd[index].fetch_add(BLOCK, Ordering::Relaxed);
                    }
                }
            }
        }
    }
}

/// Writes a block of one feature of a panel.
///
/// # Safety
/// `to` can hold a block of each feature.
unsafe fn write_block(format: Format, stored: &[u8], feature: usize, mut to: *mut u8) {
    let block = format.block();
    for &(first, num) in block.words {
        for word in stored[first..][..4 * num].as_chunks::<4>().0 {
            // SAFETY: the caller's promise.
            unsafe { to.add(4 * feature).cast::<[u8; 4]>().write(*word) };
            to = to.wrapping_add(4 * PANEL_FEATURES);
        }
    }
    for &half in block.halves {
        // SAFETY: the caller's promise.
        unsafe { to.add(2 * feature).cast::<[u8; 2]>().write([stored[half], stored[half + 1]]) };
        to = to.wrapping_add(2 * PANEL_FEATURES);
    }
}

fn half_at(stored: &[u8], at: usize) -> f32 {
    Float16::from_bits(u32::from(u16::from_le_bytes([stored[at], stored[at + 1]]))).to_f32()
}
