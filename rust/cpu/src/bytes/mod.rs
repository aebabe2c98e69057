//! Products of bytes: rows as signed bytes times weights of 4 to 8 bits, as files store them.
//!
//! # Layout of packed weights
//!
//! A panel of 64 output features is a row of blocks, each of which holds what the file's blocks of
//! the 64 features hold, four bytes of each feature side by side (`[words][64][4]`), then the
//! float16 numbers, `[64]` each.  No bit is changed.  A kernel *opens* 256 inputs at a time: scales
//! and minima become float32, and for many rows whole numbers become bytes, `[inputs / 4][64][4]`.
//! For few rows, and for weights of 8 bits or of a table, these are taken from the panel.
//!
//! The panels of a product may have several formats, a [`Section`] of panels each: files mix them.
//! Those of [`Format::I8Rows`] have no blocks, but a scale for each output feature, and a row of
//! their products has one scale as well; with [`Format::I8Turned`] both are turned before they
//! become bytes (`bytes::turn`).  AMX multiplies 64 inputs at once: it takes these panels as
//! they are, and opened blocks of 64 inputs.
//!
//! # Invariants
//!
//! 1. A weight is `scale * (whole - zero) + minimum` of its group, one of zero and minimum being 0;
//!    a row's number is `scale * whole` of its group, the whole numbers from -127 to 127; of
//!    [`Format::I8Turned`] these are the turned numbers.
//! 2. The products of a group are summed exactly.  Groups are added in the order of the inputs, in
//!    float32: a row's result is the same in any batch and with any number of threads.
//! 3. A row that holds a number that is not finite has no finite result.
//!
//! # Costs
//!
//! With few rows the time is that of reading the weights, once.  With many it is that of the
//! products, four of them an instruction and lane, and of adding groups, which cost less the more
//! inputs they have; opening is done once for an item's rows.
#![expect(unsafe_code, reason = "panels and rows are addresses")]
#![expect(clippy::inline_always, reason = "must become part of a function with the instructions")]

use std::ops::Range;

use crate::error::{Error, Result};
use crate::linear::PANEL_FEATURES;
use crate::portable::Portable;

#[cfg(target_arch = "x86_64")]
mod amx;
mod format;
mod layout;
mod open;
mod rows;
mod tile;
pub(crate) mod turn;

use format::GROUP;

#[cfg(target_arch = "x86_64")]
pub(crate) use amx::sum_panel_by_amx;
pub use format::Format;
pub(crate) use rows::{ByteRows, quantise_rows};
pub(crate) use tile::{Dots, Part, sum_panel};
pub(crate) use turn::{TURNED, turn};

/// Adjacent output features of one format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Section {
    /// How their weights are stored.
    pub format: Format,
    /// How many there are: whole panels, but for the last section.
    pub num_features: usize,
}

/// Packed weights that are multiplied as bytes.
#[derive(Clone, Copy, Debug)]
pub struct BytePanels<'a> {
    /// Formats of the features.
    pub sections: &'a [Section],
    /// The panels.
    pub values: &'a [u8],
    /// `[N]`, what a feature's whole numbers are multiples of, where the format is
    /// [`Format::I8Rows`] or [`Format::I8Turned`]; None for others, whose blocks have scales.
    pub scales: Option<&'a [f32]>,
}

impl BytePanels<'_> {
    /// Refuses panels of other sizes.
    pub(crate) fn check(&self, in_features: usize, out_features: usize) -> Result<()> {
        let sizes = (self.values.len(), self.scales.map(<[f32]>::len));
        check(self.sections, in_features, out_features, sizes)
    }

    /// Inputs of a row that share a scale, of checked panels.
    pub(crate) fn group(&self, in_features: usize) -> usize {
        self.sections.first().map_or(GROUP, |section| section.format.group(in_features))
    }

    /// Whether rows are turned before they become bytes, of checked panels.
    pub(crate) fn is_turned(&self) -> bool {
        self.sections.first().is_some_and(|section| section.format == Format::I8Turned)
    }

    /// Rows from which AMX, which takes 64 inputs at once, costs less than vectors; None if it
    /// cannot multiply them.
    pub(crate) fn amx_rows(&self, in_features: usize) -> Option<usize> {
        match (self.scales, self.group(in_features)) {
            (Some(_), 64..) => Some(8),
            (None, 64) => Some(12),
            _ => None,
        }
    }

    /// The scales of a panel's features, 0 beyond the last; None where blocks have scales.
    #[inline(always)]
    pub(crate) fn panel_scales(&self, panel: usize) -> Option<[f32; PANEL_FEATURES]> {
        let scales = &self.scales?[panel * PANEL_FEATURES..];
        let mut padded = [0.0; PANEL_FEATURES];
        let num = scales.len().min(PANEL_FEATURES);
        padded[..num].copy_from_slice(&scales[..num]);
        Some(padded)
    }

    /// Returns the numbers that a feature's weights stand for, to the last bit those of the file.
    pub(crate) fn feature(&self, in_features: usize, feature: usize) -> Vec<f32> {
        let (format, bytes) = panel_at(self.sections, in_features, feature / PANEL_FEATURES);
        let (panel, lane) = (&self.values[bytes], feature % PANEL_FEATURES);
        let (storage, block) = (format.storage(), format.block());
        let mut stored = vec![0; storage.row_bytes(in_features)];
        let size = PANEL_FEATURES * block.num_bytes();
        for (to, from) in stored.chunks_exact_mut(block.num_bytes()).zip(panel.chunks_exact(size)) {
            block.take(from, lane, to);
        }
        let mut numbers = vec![0.0; in_features];
        storage.read(&stored, &mut numbers);
        if let Some(scales) = self.scales {
            for number in &mut numbers {
                *number *= scales[feature];
            }
        }
        if self.is_turned() {
            for numbers in numbers.chunks_exact_mut(TURNED) {
                // SAFETY: these are 64 numbers, and any CPU has the instructions.
                unsafe { turn::<Portable, f32>(numbers.as_ptr(), numbers.as_mut_ptr()) };
            }
        }
        numbers
    }
}

/// Refuses sections, panels of `num_bytes`, or a number of scales, that do not fit a layer.
pub(crate) fn check(
    sections: &[Section],
    in_features: usize,
    out_features: usize,
    (num_bytes, num_scales): (usize, Option<usize>),
) -> Result<()> {
    for section in sections {
        section.format.check(in_features)?;
    }
    let has_scales = sections.iter().any(|section| section.format.is_whole());
    if num_scales != has_scales.then_some(out_features) {
        return Err(Error(format!(
            "scales must be {out_features} numbers for sections of I8Rows or I8Turned, and none for \
             others; got \
             {num_scales:?} for {sections:?}"
        )));
    }
    let rows = |Section { format, .. }: &Section| {
        (format.is_whole(), *format == Format::I8Turned, format.group(in_features))
    };
    if !sections.windows(2).all(|pair| rows(&pair[0]) == rows(&pair[1])) {
        return Err(Error(format!(
            "sections of a product must share the scales of its rows; got {sections:?}"
        )));
    }
    let num_features: usize = sections.iter().map(|section| section.num_features).sum();
    let is_split = |section: &Section| !section.num_features.is_multiple_of(PANEL_FEATURES);
    let whole = sections.split_last().is_some_and(|(_, others)| !others.iter().any(is_split));
    if num_features != out_features || !whole {
        return Err(Error(format!(
            "sections must be {out_features} features, whole panels of {PANEL_FEATURES} but for \
             the last; got {sections:?}"
        )));
    }
    let expected: usize = sections.iter().map(|section| section.num_bytes(in_features)).sum();
    if num_bytes != expected {
        return Err(Error(format!(
            "packed weights of {out_features} in {in_features} features must have {expected} \
             bytes; got {num_bytes}"
        )));
    }
    Ok(())
}

impl Section {
    fn num_panels(&self) -> usize {
        self.num_features.div_ceil(PANEL_FEATURES)
    }

    fn num_bytes(&self, in_features: usize) -> usize {
        self.num_panels() * self.format.panel_bytes(in_features)
    }
}

/// Format of a panel, and its bytes among those of all panels.
#[inline]
pub(crate) fn panel_at(
    sections: &[Section],
    in_features: usize,
    panel: usize,
) -> (Format, Range<usize>) {
    let (mut left, mut start) = (panel, 0);
    for section in sections {
        let size = section.format.panel_bytes(in_features);
        if left < section.num_panels() {
            let start = start + left * size;
            return (section.format, start..start + size);
        }
        (left, start) = (left - section.num_panels(), start + section.num_bytes(in_features));
    }
    unreachable!("sections were checked to have all panels")
}

#[cfg(test)]
mod tests;
