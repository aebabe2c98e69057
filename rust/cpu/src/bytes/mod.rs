//! Products of bytes: rows as signed bytes times weights of 4 to 8 bits, as files store them.
//!
//! # Layout of packed weights
//!
//! A panel of 64 output features is a row of blocks, each of which holds what the file's blocks of
//! the 64 features hold, four bytes of each feature side by side (`[words][64][4]`), then their
//! scales and minima, `[64]` each.  No bit is changed.  A kernel *opens* a few blocks at a time:
//! whole numbers become bytes, `[inputs / 4][64][4]`, scales and minima float32.
//!
//! # Invariants
//!
//! 1. A weight is `scale * whole + minimum` of its group; a row's number is `scale * whole` of its
//!    group, the whole numbers from -127 to 127.
//! 2. The products of a group are summed exactly.  Groups are added in the order of the inputs, in
//!    float32: a row's result is the same in any batch and with any number of threads.
//! 3. A row that holds a number that is not finite has no finite result.
//!
//! # Costs
//!
//! With few rows the time is that of reading the weights, once.  With many it is that of the
//! products: four of them an instruction and lane, and opening is paid once for all rows of an item.
#![expect(unsafe_code, reason = "panels and rows are addresses")]
#![expect(clippy::inline_always, reason = "must become part of a function with the instructions")]

use crate::linear::PANEL_FEATURES;

mod format;
mod rows;
mod tile;

pub use format::Format;
pub(crate) use format::{GROUP, QUADS};
pub(crate) use rows::{ByteRows, quantise_rows};
pub(crate) use tile::{Dots, Part, sum_panel};

/// Packed weights whose products are those of bytes.
#[derive(Clone, Copy, Debug)]
pub struct BytePanels<'a> {
    /// How the weights are stored.
    pub format: Format,
    /// The panels.
    pub values: &'a [u8],
    /// `[N]`, what a feature's whole numbers are multiples of, where a format has no groups.
    pub scales: &'a [f32],
}

impl BytePanels<'_> {
    /// Gives the numbers that a feature's weights stand for, one after another.
    pub(crate) fn feature(&self, in_features: usize, feature: usize) -> impl Iterator<Item = f32> {
        let (format, lane) = (self.format, feature % PANEL_FEATURES);
        let size = format.panel_bytes(in_features);
        let panel = &self.values[feature / PANEL_FEATURES * size..][..size];
        let scale = self.scales.get(feature).copied().unwrap_or(0.0);
        (0..in_features).map(move |input| format.number(panel, lane, input, scale))
    }
}

#[cfg(test)]
mod tests;
