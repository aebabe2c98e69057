//! Panels of the blocks of a file, whose bits are kept.

use std::sync::atomic::Ordering;

use super::fetch::Fetched;
use super::{Packing, Target};
use crate::bytes::{self, Format};
use crate::error::{Error, Result};
use crate::linear::PANEL_FEATURES;
use crate::number::{Float16, Stored};

impl Packing<'_> {
    /// Refuses rows that are not stored as the panels keep them.
    pub(super) fn check_blocks(&self) -> Result<()> {
        let Target::Bytes { sections, .. } = self.target else { return Ok(()) };
        for panel in 0..self.num_panels() {
            let (format, _) = bytes::panel_at(sections, self.in_features, panel);
            let Some(storage) = format.storage() else { continue };
            for feature in 0..PANEL_FEATURES {
                let Some((index, _)) = self.source(panel, feature) else { continue };
                let found = self.parts[index].storage;
                if found != storage {
                    return Err(Error(format!(
                        "rows[{index}] must be stored as {storage:?} for panels of {format:?}; \
                         got {found:?}"
                    )));
                }
            }
        }
        Ok(())
    }

    /// Lays the blocks of a panel's features side by side, word by word.
    ///
    /// # Safety
    /// `to` has room for the panel, which no other thread has.
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
}

/// Writes a block of one feature of a panel.
///
/// # Safety
/// `to` has room for a block of each feature.
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
