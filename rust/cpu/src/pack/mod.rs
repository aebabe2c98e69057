//! Panels of linear layers, packed straight from the rows of files.
//!
//! The rows of a panel are read from their file, converted to float32 in chunks, rounded to the
//! layer's dtype and written to the panel: no copy of a tensor lies in between.  [`crate::linear`]
//! describes the panels.  The blocks of a file may also be kept, for products of bytes.
//!
//! # Invariants
//!
//! 1. Panels are those that the same numbers make when they are first rounded to the dtype and then
//!    packed; int8 weights are the nearest multiples, ties to even, of a 127th of a feature's
//!    largest.  Rows of another storage are rounded to blocks (`rounding.rs`).
//! 2. Each panel is written by one thread; features beyond the rows are zero.
//! 3. Files are read, not mapped: one that becomes shorter meanwhile is an error, not a signal.
//!
//! # Costs
//!
//! The files are read once, the panels are written once, by all threads; a thread has the bytes of
//! one panel's rows.
#![expect(unsafe_code, reason = "panels are shared by threads")]
#![expect(clippy::inline_always, reason = "must become part of a function with the instructions")]

mod blocks;
mod fetch;
mod whole;

use std::cell::Cell;
use std::io;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::bytes::{self, Format, Section, TURNED, turn};
use crate::error::{Error, Result};
use crate::linear::PANEL_FEATURES;
use crate::number::{BFloat16, DType, Float16, PANEL, Stored};
use crate::scratch::pieces;
use crate::team::Execution;
use crate::vectors::{Instructions, Kernel};

pub use crate::storage::Storage;
use fetch::Fetched;
pub use fetch::Rows;

/// Weights of a row that are converted at once: whole blocks of every storage.
const CHUNK: usize = 256;
/// Numbers from a row of a chunk to the next: an odd number of cache lines, so that 64 rows do not
/// meet in the same few sets of a cache.
const CHUNK_STRIDE: usize = CHUNK + PANEL;
/// Features of the gate that a panel with a gate begins with; as many of the other half follow.
const HALF: usize = PANEL_FEATURES / 2;

/// What weights are multiplied with before they are turned.
#[expect(clippy::cast_precision_loss, reason = "a power of two")]
const PART: f32 = 1.0 / TURNED as f32;

thread_local! {
    static NUMBERS: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
    static BYTES: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// Panels to be written.
#[derive(Debug)]
pub enum PanelsMut<'a> {
    /// Numbers of the layer's dtype.
    Units(&'a mut [u32]),
    /// Whole numbers, and what a feature's are multiples of.
    Int8 {
        /// The panels.
        values: &'a mut [i8],
        /// Scale of each feature, `[N]`.
        scales: &'a mut [f32],
    },
    /// Blocks of the file, which products of bytes take.
    Bytes {
        /// The formats: those of the rows, or `Q8_0`, `Q4_1` or `I8Turned`, which rows of any
        /// storage become.
        sections: &'a [Section],
        /// The panels.
        values: &'a mut [u8],
        /// Scale of each feature, `[N]`, of [`Format::I8Rows`] and [`Format::I8Turned`], and of no
        /// other.
        scales: Option<&'a mut [f32]>,
    },
}

/// A linear layer to be packed.
#[derive(Debug)]
pub struct Layer<'a> {
    /// Its rows, one part of them after another.
    pub parts: Vec<Rows<'a>>,
    /// Type that its weights are rounded to.
    pub dtype: DType,
    /// Input features K.
    pub in_features: usize,
    /// Whether the first of two parts is the gate of the second.
    pub is_gated: bool,
    /// Its panels.
    pub panels: PanelsMut<'a>,
}

/// Reason why layers were not packed.
#[derive(Debug)]
pub enum PackError {
    /// Arguments that do not fit each other; nothing was written.
    Arguments(Error),
    /// A file that cannot be read, or that ends before its rows do; panels are written in part.
    File(io::Error),
}

/// Packs layers.
///
/// Returns how many numbers of each part of each layer are not finite in its dtype.
///
/// # Errors
/// Rows that are not whole blocks, panels of another length, a gate of other sizes than what it
/// gates, heads that cannot be interleaved, an instruction set that the CPU lacks; a file that
/// cannot be read.
pub fn pack(
    layers: Vec<Layer<'_>>,
    execution: &Execution<'_>,
) -> std::result::Result<Vec<Vec<usize>>, PackError> {
    execution.check().map_err(PackError::Arguments)?;
    let layers = layers.into_iter().map(Packing::new);
    let layers: Vec<_> = layers.collect::<Result<_>>().map_err(PackError::Arguments)?;
    let mut ends = Vec::with_capacity(layers.len());
    for layer in &layers {
        ends.push(ends.last().unwrap_or(&0) + layer.num_panels());
    }
    let failure = OnceLock::new();
    execution.for_each(ends.last().copied().unwrap_or(0), &|item| {
        if failure.get().is_some() {
            return;
        }
        let index = ends.partition_point(|end| *end <= item);
        let packing = &layers[index];
        let panel = packing.num_panels() - (ends[index] - item);
        if let Err(error) = packing.write_panel(panel, execution) {
            failure.get_or_init(|| error);
        }
    });
    if let Some(error) = failure.into_inner() {
        return Err(PackError::File(error));
    }
    let odd = |layer: Packing<'_>| layer.odd.into_iter().map(AtomicUsize::into_inner).collect();
    Ok(layers.into_iter().map(odd).collect())
}

fn check_rows(parts: &[Rows<'_>], in_features: usize, is_gated: bool) -> Result<()> {
    for (index, part) in parts.iter().enumerate() {
        let (weights, _) = part.storage.block();
        if part.num_rows == 0 || in_features == 0 || !in_features.is_multiple_of(weights) {
            return Err(Error(format!(
                "rows[{index}] must be rows of whole blocks of {weights} weights; got {} of \
                 {in_features}",
                part.num_rows
            )));
        }
        let expected = (part.storage == Storage::I8Rows).then_some(part.num_rows);
        let found = part.scales.map(<[f32]>::len);
        if found != expected {
            return Err(Error(format!(
                "rows[{index}] must have {} scales as {:?}; got {}",
                expected.unwrap_or(0),
                part.storage,
                found.unwrap_or(0)
            )));
        }
        if let Some(size) = part.interleaved
            && (size == 0 || !size.is_multiple_of(2) || !part.num_rows.is_multiple_of(size))
        {
            return Err(Error(format!(
                "rows[{index}] must be whole heads of an even size; got {} of {size}",
                part.num_rows
            )));
        }
    }
    let is_gate = |parts: &[Rows<'_>]| {
        matches!(parts, [gate, up]
            if gate.num_rows == up.num_rows && gate.num_rows.is_multiple_of(HALF))
    };
    if parts.is_empty() || (is_gated && !is_gate(parts)) {
        let sizes: Vec<usize> = parts.iter().map(|part| part.num_rows).collect();
        return Err(Error(format!(
            "rows must have a part, and a gated layer two of the same multiple of {HALF}; got \
             {sizes:?}"
        )));
    }
    Ok(())
}

fn check_panels(
    panels: &PanelsMut<'_>,
    num_rows: usize,
    in_features: usize,
    dtype: DType,
) -> Result<()> {
    let unit = dtype.per_unit();
    if !in_features.is_multiple_of(unit) {
        return Err(Error(format!(
            "in_features must be a multiple of {unit} for {dtype:?}; got {in_features}"
        )));
    }
    let size = num_rows.div_ceil(PANEL_FEATURES) * PANEL_FEATURES * in_features;
    let (found, expected) = match panels {
        PanelsMut::Units(units) => (units.len(), size / unit),
        PanelsMut::Int8 { values, .. } => (values.len(), size),
        PanelsMut::Bytes { sections, values, scales } => {
            let sizes = (values.len(), scales.as_ref().map(|scales| scales.len()));
            return bytes::check(sections, in_features, num_rows, sizes);
        }
    };
    if found != expected {
        return Err(Error(format!(
            "panels of {num_rows} rows of {in_features} must have {expected} elements; got {found}"
        )));
    }
    match panels {
        PanelsMut::Int8 { scales, .. } if scales.len() != num_rows => {
            Err(Error(format!("scales must have {num_rows} numbers; got {}", scales.len())))
        }
        _ => Ok(()),
    }
}

/// Panels in the form that threads share.
enum Target<'a> {
    Units(*mut u32),
    Int8 { values: *mut i8, scales: *mut f32 },
    Bytes { sections: &'a [Section], values: *mut u8, scales: Option<*mut f32> },
}

/// A checked layer.
struct Packing<'a> {
    parts: Vec<Rows<'a>>,
    in_features: usize,
    num_rows: usize,
    dtype: DType,
    is_gated: bool,
    target: Target<'a>,
    /// Numbers of each part that are not finite.
    odd: Vec<AtomicUsize>,
}

// SAFETY: each panel is written by one thread.
unsafe impl Sync for Packing<'_> {}

/// One panel of a layer, whose rows were read.
struct Panel<'a> {
    packing: &'a Packing<'a>,
    index: usize,
    fetched: &'a Fetched<'a>,
}

impl Kernel for Panel<'_> {
    #[inline(always)]
    unsafe fn run<I: Instructions>(self) {
        // SAFETY: the caller's promise.
        unsafe { self.packing.write::<I>(self.index, self.fetched) };
    }
}

/// A chunk of each row of a panel, to be converted to float32, rounded to the layer's dtype, and turned
/// if the panels are.
struct Chunk<'a> {
    packing: &'a Packing<'a>,
    panel: usize,
    fetched: &'a Fetched<'a>,
    /// The weights of a row.
    weights: Range<usize>,
    /// `[64][CHUNK_STRIDE]`
    rows: &'a mut [f32],
    /// Whether numbers that are not finite are counted.
    counts: bool,
}

impl Kernel for Chunk<'_> {
    #[inline(always)]
    unsafe fn run<I: Instructions>(self) {
        let Self { packing, panel, fetched, weights, rows, counts } = self;
        for (feature, numbers) in rows.chunks_exact_mut(CHUNK_STRIDE).enumerate() {
            let Some((index, row)) = packing.source(panel, feature) else { continue };
            let part = &packing.parts[index];
            let storage = part.storage;
            let stored =
                fetched.row(index, part.place(row), storage.row_bytes(packing.in_features));
            let numbers = &mut numbers[..weights.len()];
            let bytes = storage.row_bytes(weights.start)..storage.row_bytes(weights.end);
            storage.read(&stored[bytes], numbers);
            if let Some(scales) = part.scales {
                let scale = scales[part.place(row)];
                for number in &mut *numbers {
                    *number *= scale;
                }
            }
            let odd = match packing.dtype {
                DType::Float32 => round::<f32>(numbers),
                DType::BFloat16 => round::<BFloat16>(numbers),
                DType::Float16 => round::<Float16>(numbers),
            };
            if counts && odd > 0 {
                packing.odd[index].fetch_add(odd as usize, Ordering::Relaxed);
            }
            if packing.is_turned() {
                // SAFETY: the caller's promise; a chunk is whole groups of those turned together.
                unsafe { turn_part::<I>(numbers) };
            }
        }
    }
}

/// Turns 64ths of numbers.
///
/// # Safety
/// The CPU has the instructions.
#[inline(always)]
unsafe fn turn_part<I: Instructions>(numbers: &mut [f32]) {
    for numbers in numbers.chunks_exact_mut(TURNED) {
        for number in &mut *numbers {
            *number *= PART;
        }
        // SAFETY: these are 64 numbers; the caller's promise.
        unsafe { turn::<I, f32>(numbers.as_ptr(), numbers.as_mut_ptr()) };
    }
}

/// Rounds numbers to `E`; returns how many are not finite.
#[inline(always)]
fn round<E: Stored>(numbers: &mut [f32]) -> u32 {
    let mut odd = 0_u32;
    for number in numbers {
        *number = E::from_f32(*number).to_f32();
        // A chunk has few numbers; a checked sum would not be vectorised.
        odd = odd.wrapping_add(u32::from(!number.is_finite()));
    }
    odd
}

impl<'a> Packing<'a> {
    fn new(layer: Layer<'a>) -> Result<Self> {
        let Layer { parts, dtype, in_features, is_gated, panels } = layer;
        let num_rows = parts.iter().map(|part| part.num_rows).sum();
        check_rows(&parts, in_features, is_gated)?;
        check_panels(&panels, num_rows, in_features, dtype)?;
        let target = match panels {
            PanelsMut::Units(units) => Target::Units(units.as_mut_ptr()),
            PanelsMut::Int8 { values, scales } => {
                Target::Int8 { values: values.as_mut_ptr(), scales: scales.as_mut_ptr() }
            }
            PanelsMut::Bytes { sections, values, scales } => {
                let scales = scales.map(<[f32]>::as_mut_ptr);
                Target::Bytes { sections, values: values.as_mut_ptr(), scales }
            }
        };
        let odd = parts.iter().map(|_| AtomicUsize::new(0)).collect();
        let packing = Self { parts, in_features, num_rows, dtype, is_gated, target, odd };
        packing.check_blocks()?;
        Ok(packing)
    }

    fn num_panels(&self) -> usize {
        self.num_rows.div_ceil(PANEL_FEATURES)
    }

    /// Whether weights are turned, which sections of a layer share.
    fn is_turned(&self) -> bool {
        matches!(
            self.target,
            Target::Bytes { sections: [Section { format: Format::I8Turned, .. }, ..], .. }
        )
    }

    /// Reads the rows of a panel and writes it; one thread has each panel.
    fn write_panel(&self, panel: usize, execution: &Execution<'_>) -> io::Result<()> {
        let mut memory = BYTES.take();
        let features = (0..PANEL_FEATURES).filter_map(|feature| self.source(panel, feature));
        let fetched = Fetched::read(&self.parts, features, self.in_features, &mut memory);
        if let Ok(fetched) = &fetched {
            // SAFETY: the target has this panel, which no other thread accesses.
            unsafe { execution.instructions.run(Panel { packing: self, index: panel, fetched }) };
        }
        let done = fetched.map(|_| ());
        BYTES.set(memory);
        done
    }

    /// The part of a panel's feature, and its index there; None beyond the rows.
    #[inline(always)]
    fn source(&self, panel: usize, feature: usize) -> Option<(usize, usize)> {
        if self.is_gated {
            return Some((feature / HALF, panel * HALF + feature % HALF));
        }
        let mut row = panel * PANEL_FEATURES + feature;
        for (index, part) in self.parts.iter().enumerate() {
            if row < part.num_rows {
                return Some((index, row));
            }
            row -= part.num_rows;
        }
        None
    }

    /// Writes a panel.
    ///
    /// # Safety
    /// The target has the panel, which no other thread accesses.
    #[inline(always)]
    unsafe fn write<I: Instructions>(&self, panel: usize, fetched: &Fetched<'_>) {
        let mut memory = NUMBERS.take();
        let [rows] = pieces(&mut memory, [PANEL_FEATURES * CHUNK_STRIDE]);
        // SAFETY: the buffer has this many numbers, each of which is a float32.
        let rows = unsafe { std::slice::from_raw_parts_mut(rows, PANEL_FEATURES * CHUNK_STRIDE) };
        rows.fill(0.0);
        // SAFETY: the caller's promise.
        unsafe {
            match self.target {
                Target::Units(units) => match self.dtype {
                    DType::Float32 => self.write_units::<I, f32>(panel, fetched, rows, units),
                    DType::BFloat16 => self.write_units::<I, BFloat16>(panel, fetched, rows, units),
                    DType::Float16 => self.write_units::<I, Float16>(panel, fetched, rows, units),
                },
                Target::Int8 { values, scales } => {
                    let values = values.add(panel * self.in_features * PANEL_FEATURES);
                    let place = |k: usize, feature: usize| k * PANEL_FEATURES + feature;
                    self.write_whole::<I>(panel, fetched, rows, (values, scales), place);
                }
                Target::Bytes { sections, values, scales } => {
                    let (format, bytes) = bytes::panel_at(sections, self.in_features, panel);
                    let values = values.add(bytes.start);
                    match (format, scales) {
                        (Format::I8Turned, Some(scales)) => {
                            let to = (values.cast(), scales);
                            let place = |k: usize, feature: usize| {
                                (k / 4 * PANEL_FEATURES + feature) * 4 + k % 4
                            };
                            self.write_whole::<I>(panel, fetched, rows, to, place);
                        }
                        _ if self.other_storage(panel, format).is_some() => {
                            self.write_rounded::<I>(panel, fetched, rows, (format, values));
                        }
                        (_, scales) => {
                            self.write_blocks(panel, fetched, format, values);
                            if let Some(scales) = scales {
                                self.write_scales(panel, scales);
                            }
                        }
                    }
                }
            }
        }
        NUMBERS.set(memory);
    }

    #[inline(always)]
    unsafe fn write_units<I: Instructions, E: Stored>(
        &self,
        panel: usize,
        fetched: &Fetched<'_>,
        rows: &mut [f32],
        panels: *mut u32,
    ) {
        let per_unit = 4 / size_of::<E>();
        for first in (0..self.in_features).step_by(CHUNK) {
            // SAFETY: the caller's promise.
            let len = unsafe { self.read::<I>(panel, fetched, first, rows, true) };
            let place = (panel * self.in_features + first) / per_unit * PANEL_FEATURES;
            // SAFETY: the caller's promise; the panel has these units.
            unsafe { transpose_units::<E>(rows, len, panels.add(place)) };
        }
    }

    /// Converts a chunk of each row of a panel; returns the weights of a row.
    ///
    /// # Safety
    /// The CPU has the instructions.
    #[inline(always)]
    unsafe fn read<I: Instructions>(
        &self,
        panel: usize,
        fetched: &Fetched<'_>,
        first: usize,
        rows: &mut [f32],
        counts: bool,
    ) -> usize {
        let len = CHUNK.min(self.in_features - first);
        let weights = first..first + len;
        // SAFETY: the caller's promise.
        unsafe { I::call(Chunk { packing: self, panel, fetched, weights, rows, counts }) };
        len
    }
}

/// Writes the units of 64 rows of numbers of `E`, `PANEL` numbers of a row at a time.
///
/// # Safety
/// `units` can hold those of `len` numbers of 64 rows.
#[inline(always)]
unsafe fn transpose_units<E: Stored>(rows: &[f32], len: usize, units: *mut u32) {
    let per_unit = 4 / size_of::<E>();
    for first in (0..len).step_by(PANEL) {
        for (feature, row) in rows.chunks_exact(CHUNK_STRIDE).enumerate() {
            let numbers = &row[first..len.min(first + PANEL)];
            // SAFETY: the caller's promise.
            unsafe {
                let to = units.add(first / per_unit * PANEL_FEATURES + feature);
                for (index, numbers) in numbers.chunks_exact(per_unit).enumerate() {
                    to.add(index * PANEL_FEATURES).write(E::unit(numbers));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
