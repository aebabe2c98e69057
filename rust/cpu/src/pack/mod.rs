//! Panels of linear layers, packed straight from the rows of a file that is mapped into memory.
//!
//! A row is read in chunks, converted to float32, rounded to the layer's dtype and written to its
//! panel: no copy of a tensor lies in between.  [`crate::linear`] describes the panels.
//!
//! # Invariants
//!
//! 1. Panels are those that the same numbers make when they are first rounded to the dtype and then
//!    packed; int8 weights are the nearest multiples, ties to even, of a 127th of a feature's
//!    largest.
//! 2. Each panel is written by one thread; features beyond the rows are zero.
//!
//! # Costs
//!
//! The file is read once (twice for int8), the panels are written once, on all threads.
#![expect(unsafe_code, reason = "rows are addresses of a mapped file")]
#![expect(clippy::inline_always, reason = "must become part of a function with the instructions")]

mod storage;

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::bytes::{Format, GROUP, QUADS};
use crate::error::{Error, Result};
use crate::linear::PANEL_FEATURES;
use crate::number::{BFloat16, DType, Float16, PANEL, Stored};
use crate::scratch::pieces;
use crate::team::Execution;
use crate::vectors::{Kernel, Vectors};

pub use storage::Storage;

/// Weights of a row that are read at once: whole blocks of every storage.
const CHUNK: usize = 256;
/// Numbers from a row of a chunk to the next: an odd number of cache lines, so that 64 rows do not
/// meet in the same few sets of a cache.
const CHUNK_STRIDE: usize = CHUNK + PANEL;
/// Panels with a gate begin with so many of its features; as many of the other half follow.
const HALF: usize = PANEL_FEATURES / 2;
/// The largest whole number of an int8 weight; -128 has no positive counterpart.
const LARGEST_INT8: f32 = 127.0;

thread_local! {
    static ROWS: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

// SAFETY: an address, that any thread may hold; who packs with it answers for the rest.
unsafe impl Send for Rows {}
// SAFETY: the same; rows are only read.
unsafe impl Sync for Rows {}

/// Some rows of a file: output features of a layer.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// The first byte of the first row; rows lie side by side.
    pub first: *const u8,
    /// How many there are.
    pub num_rows: usize,
    /// How their weights are stored.
    pub storage: Storage,
    /// Size of heads whose halves are interleaved, element by element, as llama.cpp stores queries
    /// and keys of some families; None for rows in their order.
    pub interleaved: Option<usize>,
}

impl Rows {
    /// Index in the file of an output feature.
    #[inline(always)]
    fn place(&self, feature: usize) -> usize {
        let Some(size) = self.interleaved else { return feature };
        let (head, element) = (feature / size, feature % size);
        head * size + element % (size / 2) * 2 + element / (size / 2)
    }
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
        /// `[N]`.
        scales: &'a mut [f32],
    },
    /// The blocks of the file, or bytes with a scale a feature: see [`crate::bytes`].
    Bytes {
        /// How the weights lie; with groups as in the file.
        format: Format,
        /// The panels.
        values: &'a mut [u8],
        /// `[N]` without groups, else empty.
        scales: &'a mut [f32],
    },
}

/// Packs the rows of one layer, one part of them after another; with `is_gated` the first of two
/// parts is the gate of the second.
///
/// Returns how many numbers of each part are not finite in the layer's dtype.
///
/// # Errors
/// Rows that are not whole blocks, panels of another length, a gate of other sizes than what it
/// gates, heads that cannot be interleaved, an instruction set that the CPU lacks.
///
/// # Safety
/// The rows exist, and no other code writes them during the call.
pub unsafe fn pack(
    parts: &[Rows],
    in_features: usize,
    dtype: DType,
    is_gated: bool,
    panels: PanelsMut<'_>,
    execution: &Execution<'_>,
) -> Result<Vec<usize>> {
    execution.check()?;
    let num_rows = parts.iter().map(|part| part.num_rows).sum();
    check_rows(parts, in_features, is_gated)?;
    check_panels(&panels, num_rows, in_features, dtype)?;
    check_blocks(parts, in_features, &panels)?;
    let target = match panels {
        PanelsMut::Units(units) => Target::Units(units.as_mut_ptr()),
        PanelsMut::Int8 { values, scales } => {
            Target::Int8 { values: values.as_mut_ptr(), scales: scales.as_mut_ptr() }
        }
        PanelsMut::Bytes { format, values, scales } => Target::Bytes {
            format,
            values: values.as_mut_ptr(),
            scales: scales.as_mut_ptr(),
        },
    };
    let odd = parts.iter().map(|_| AtomicUsize::new(0)).collect();
    let packing = Packing { parts, in_features, num_rows, dtype, is_gated, target, odd };
    execution.for_each(num_rows.div_ceil(PANEL_FEATURES), &|panel| {
        // SAFETY: the caller's promise; each panel is written once.
        unsafe { execution.instructions.run(Panel { packing: &packing, panel }) };
    });
    Ok(packing.odd.iter().map(|odd| odd.load(Ordering::Relaxed)).collect())
}

fn check_rows(parts: &[Rows], in_features: usize, is_gated: bool) -> Result<()> {
    for (index, part) in parts.iter().enumerate() {
        let (weights, _) = part.storage.block();
        if part.num_rows == 0 || in_features == 0 || !in_features.is_multiple_of(weights) {
            return Err(Error(format!(
                "rows[{index}] must be rows of whole blocks of {weights} weights; got {} of \
                 {in_features}",
                part.num_rows
            )));
        }
        if part.first.is_null() {
            return Err(Error(format!("rows[{index}] must have an address; got 0")));
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
    let is_gate = |parts: &[Rows]| {
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
    let num_panels = num_rows.div_ceil(PANEL_FEATURES);
    let size = num_panels * PANEL_FEATURES * in_features;
    let (found, expected) = match panels {
        PanelsMut::Units(units) => (units.len(), size / unit),
        PanelsMut::Int8 { values, .. } => (values.len(), size),
        PanelsMut::Bytes { format, values, .. } => {
            (values.len(), num_panels * format.panel_bytes(in_features))
        }
    };
    if found != expected {
        return Err(Error(format!(
            "panels of {num_rows} rows of {in_features} must have {expected} elements; got {found}"
        )));
    }
    let (found, expected) = match panels {
        PanelsMut::Units(_) => (0, 0),
        PanelsMut::Int8 { scales, .. } => (scales.len(), num_rows),
        PanelsMut::Bytes { format, scales, .. } => {
            (scales.len(), if format.has_groups() { 0 } else { num_rows })
        }
    };
    if found != expected {
        return Err(Error(format!("scales must have {expected} numbers; got {found}")));
    }
    Ok(())
}

/// Refuses rows that are not stored as the panels keep them.
fn check_blocks(parts: &[Rows], in_features: usize, panels: &PanelsMut<'_>) -> Result<()> {
    let PanelsMut::Bytes { format, .. } = panels else { return Ok(()) };
    format.check(in_features)?;
    let Some(storage) = storage_of(*format) else { return Ok(()) };
    for (index, part) in parts.iter().enumerate() {
        if part.storage != storage {
            return Err(Error(format!(
                "rows[{index}] must be stored as {storage:?} for panels of {format:?}; got {:?}",
                part.storage
            )));
        }
    }
    Ok(())
}

/// How a file stores the blocks of a format; None where there are none.
fn storage_of(format: Format) -> Option<Storage> {
    match format {
        Format::Int8 => None,
        Format::Q8_0 => Some(Storage::Q8_0),
        Format::Q4_0 => Some(Storage::Q4_0),
        Format::Q4_1 => Some(Storage::Q4_1),
        Format::Q5_0 => Some(Storage::Q5_0),
        Format::Q5_1 => Some(Storage::Q5_1),
    }
}

/// Panels as threads share them.
enum Target {
    Units(*mut u32),
    Int8 { values: *mut i8, scales: *mut f32 },
    Bytes { format: Format, values: *mut u8, scales: *mut f32 },
}

/// A checked call.
struct Packing<'a> {
    parts: &'a [Rows],
    in_features: usize,
    num_rows: usize,
    dtype: DType,
    is_gated: bool,
    target: Target,
    /// Numbers of each part that are not finite.
    odd: Vec<AtomicUsize>,
}

// SAFETY: each panel is written by one thread.
unsafe impl Sync for Packing<'_> {}

/// One panel of a call.
struct Panel<'a> {
    packing: &'a Packing<'a>,
    panel: usize,
}

impl Kernel for Panel<'_> {
    #[inline(always)]
    unsafe fn run<I: Vectors>(self) {
        let Self { packing, panel } = self;
        // SAFETY: the caller's promise.
        unsafe {
            match packing.dtype {
                DType::Float32 => packing.write::<f32>(panel),
                DType::BFloat16 => packing.write::<BFloat16>(panel),
                DType::Float16 => packing.write::<Float16>(panel),
            }
        }
    }
}

impl Packing<'_> {
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

    /// Writes a panel of a layer with numbers of `E`.
    ///
    /// # Safety
    /// That of [`pack`]; no other thread has the panel.
    #[inline(always)]
    unsafe fn write<E: Stored>(&self, panel: usize) {
        let mut memory = ROWS.take();
        let [rows] = pieces(&mut memory, [PANEL_FEATURES * CHUNK_STRIDE]);
        // SAFETY: there are so many numbers, each of which is a float32.
        let rows = unsafe { std::slice::from_raw_parts_mut(rows, PANEL_FEATURES * CHUNK_STRIDE) };
        rows.fill(0.0);
        // SAFETY: the caller's promise.
        unsafe {
            match self.target {
                Target::Units(units) => self.write_units::<E>(panel, rows, units.cast()),
                Target::Int8 { values, scales } => {
                    let values = values.add(panel * self.in_features * PANEL_FEATURES);
                    let place = |k: usize, feature: usize| k * PANEL_FEATURES + feature;
                    self.write_int8::<E>(panel, rows, (values, place), scales);
                }
                Target::Bytes { format: Format::Int8, values, scales } => {
                    let values = values.add(panel * Format::Int8.panel_bytes(self.in_features));
                    // Past the inputs the last quads are zero.
                    let last = self.in_features / 4 * QUADS;
                    values.add(last).write_bytes(0, Format::Int8.panel_bytes(self.in_features) - last);
                    let place = |k: usize, feature: usize| k / 4 * QUADS + 4 * feature + k % 4;
                    self.write_int8::<E>(panel, rows, (values.cast(), place), scales);
                }
                Target::Bytes { format, values, .. } => self.write_blocks(panel, format, values),
            }
        }
        ROWS.set(memory);
    }

    #[inline(always)]
    unsafe fn write_units<E: Stored>(&self, panel: usize, rows: &mut [f32], panels: *mut E) {
        let per_unit = 4 / size_of::<E>();
        let lane = |k: usize, feature: usize| {
            (k / per_unit * PANEL_FEATURES + feature) * per_unit + k % per_unit
        };
        for first in (0..self.in_features).step_by(CHUNK) {
            // SAFETY: the caller's promise; the panel has these lanes.
            unsafe {
                let len = self.read::<E>(panel, first, rows, true);
                let panels = panels.add((panel * self.in_features + first) * PANEL_FEATURES);
                transpose(rows, len, |k, feature, number| {
                    panels.add(lane(k, feature)).write(E::from_f32(number));
                });
            }
        }
    }

    #[inline(always)]
    unsafe fn write_int8<E: Stored>(
        &self,
        panel: usize,
        rows: &mut [f32],
        (values, place): (*mut i8, impl Fn(usize, usize) -> usize),
        scales: *mut f32,
    ) {
        let mut steps = [0.0_f32; PANEL_FEATURES];
        for first in (0..self.in_features).step_by(CHUNK) {
            // SAFETY: the caller's promise.
            let len = unsafe { self.read::<E>(panel, first, rows, true) };
            for (step, row) in steps.iter_mut().zip(rows.chunks_exact(CHUNK_STRIDE)) {
                *step = row[..len].iter().fold(*step, |peak, number| peak.max(number.abs()));
            }
        }
        for step in &mut steps {
            *step /= LARGEST_INT8;
        }
        let first_row = panel * PANEL_FEATURES;
        for (index, step) in steps.iter_mut().enumerate().take(self.num_rows - first_row) {
            // SAFETY: the feature exists, and this thread has its panel.
            unsafe { scales.add(first_row + index).write(*step) };
        }
        // Without a scale all weights of a feature are zero, or so small that they become zero.
        let steps = steps.map(|step| if step == 0.0 { f32::INFINITY } else { step });
        for first in (0..self.in_features).step_by(CHUNK) {
            // SAFETY: the caller's promise; the panel has these lanes.
            unsafe {
                let len = self.read::<E>(panel, first, rows, false);
                transpose(rows, len, |k, feature, number| {
                    let whole = (number / steps[feature]).round_ties_even();
                    let whole = whole.clamp(-LARGEST_INT8, LARGEST_INT8);
                    #[expect(clippy::cast_possible_truncation, reason = "a whole number")]
                    values.add(place(first + k, feature)).write(whole as i8);
                });
            }
        }
    }

    /// Lays the blocks of a panel's features side by side, word by word.
    ///
    /// # Safety
    /// That of [`pack`]; no other thread has the panel.
    #[inline(always)]
    unsafe fn write_blocks(&self, panel: usize, format: Format, values: *mut u8) {
        let (words, halves) = format.block();
        let group_bytes = format.panel_bytes(GROUP);
        let values = values.wrapping_add(panel * format.panel_bytes(self.in_features));
        for feature in 0..PANEL_FEATURES {
            let source = self.source(panel, feature).map(|(index, row)| {
                let part = &self.parts[index];
                let start = part.place(row) * part.storage.row_bytes(self.in_features);
                (index, part.first.wrapping_add(start))
            });
            let mut odd = 0;
            for group in 0..self.in_features / GROUP {
                let mut to = values.wrapping_add(group * group_bytes);
                let block = source.map(|(_, row)| row.wrapping_add(group * format.block_bytes()));
                for &word in words {
                    let bits = block.map_or([0; 4], |block| {
                        // SAFETY: the block has this word.
                        unsafe { block.add(word).cast::<[u8; 4]>().read() }
                    });
                    // SAFETY: the panel has this word of each feature.
                    unsafe { to.add(4 * feature).cast::<[u8; 4]>().write(bits) };
                    to = to.wrapping_add(QUADS);
                }
                for &half in halves {
                    let bits = block.map_or([0; 2], |block| {
                        // SAFETY: the block has this number.
                        unsafe { block.add(half).cast::<[u8; 2]>().read() }
                    });
                    odd += usize::from(!half_of(bits).is_finite());
                    // SAFETY: the panel has this number of each feature.
                    unsafe { to.add(2 * feature).cast::<[u8; 2]>().write(bits) };
                    to = to.wrapping_add(QUADS / 2);
                }
            }
            if let Some((index, _)) = source
                && odd > 0
            {
                self.odd[index].fetch_add(odd, Ordering::Relaxed);
            }
        }
    }

    /// Reads a chunk of each row of a panel, rounded to `E`; returns the weights of a row.
    ///
    /// # Safety
    /// That of [`pack`].
    #[inline(always)]
    unsafe fn read<E: Stored>(
        &self,
        panel: usize,
        first: usize,
        rows: &mut [f32],
        counts: bool,
    ) -> usize {
        let len = CHUNK.min(self.in_features - first);
        for (feature, numbers) in rows.chunks_exact_mut(CHUNK_STRIDE).enumerate() {
            let Some((index, row)) = self.source(panel, feature) else { continue };
            let part = &self.parts[index];
            let storage = part.storage;
            let start = part.place(row) * storage.row_bytes(self.in_features);
            let from = part.first.wrapping_add(start + storage.row_bytes(first));
            // SAFETY: the row exists, and has this chunk.
            let from = unsafe { std::slice::from_raw_parts(from, storage.row_bytes(len)) };
            let numbers = &mut numbers[..len];
            storage.read(from, numbers);
            let mut odd = 0_usize;
            for number in numbers {
                *number = E::from_f32(*number).to_f32();
                odd += usize::from(!number.is_finite());
            }
            if counts && odd > 0 {
                self.odd[index].fetch_add(odd, Ordering::Relaxed);
            }
        }
        len
    }
}

fn half_of(bytes: [u8; 2]) -> f32 {
    Float16::from_bits(u32::from(u16::from_le_bytes(bytes))).to_f32()
}

/// Gives `write` each number of 64 rows, `PANEL` of a row at a time: lines of both sides stay in
/// the first cache.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::InstructionSet;
    use crate::team::Sequential;

    const DTYPES: [DType; 3] = [DType::Float32, DType::BFloat16, DType::Float16];

    /// Numbers of both signs and many magnitudes, from a linear congruential generator.
    fn numbers(num: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            #[expect(clippy::cast_precision_loss, reason = "any number will do")]
            let number = (state >> 8) as f32 / 8_388_608.0 - 1.0;
            number
        };
        (0..num).map(|_| next() * next()).collect()
    }

    fn rounded(number: f32, dtype: DType) -> f32 {
        match dtype {
            DType::Float32 => number,
            DType::BFloat16 => BFloat16::from_f32(number).to_f32(),
            DType::Float16 => Float16::from_f32(number).to_f32(),
        }
    }

    fn rows_of(numbers: &[f32], depth: usize) -> Rows {
        Rows {
            first: numbers.as_ptr().cast(),
            num_rows: numbers.len() / depth,
            storage: Storage::Float32,
            interleaved: None,
        }
    }

    fn packed(
        parts: &[Rows],
        depth: usize,
        dtype: DType,
        is_gated: bool,
        panels: PanelsMut<'_>,
    ) -> Result<Vec<usize>> {
        let instructions = InstructionSet::detect();
        let execution = Execution { instructions, team: &Sequential, num_threads: 1 };
        // SAFETY: the rows are those of the tests' arrays.
        unsafe { pack(parts, depth, dtype, is_gated, panels, &execution) }
    }

    /// The number of an output feature and an input feature in packed units.
    fn unit_number(units: &[u32], depth: usize, dtype: DType, feature: usize, k: usize) -> f32 {
        let per_unit = dtype.per_unit();
        let panel = feature / PANEL_FEATURES * depth / per_unit;
        let unit = units[(panel + k / per_unit) * PANEL_FEATURES + feature % PANEL_FEATURES];
        let bits = unit >> (k % per_unit * 16);
        match dtype {
            DType::Float32 => f32::from_bits(unit),
            DType::BFloat16 => f32::from_bits(bits << 16),
            DType::Float16 => Float16::from_bits(bits).to_f32(),
        }
    }

    #[test]
    fn units_are_the_rounded_numbers_of_all_parts() {
        let depth = 306; // more than a chunk, no multiple of a vector
        let (first, second) = (numbers(50 * depth, 1), numbers(33 * depth, 2));
        let parts = [rows_of(&first, depth), rows_of(&second, depth)];
        for dtype in DTYPES {
            let mut units = vec![7; 2 * PANEL_FEATURES * depth / dtype.per_unit()];
            let odd = packed(&parts, depth, dtype, false, PanelsMut::Units(&mut units));
            assert_eq!(odd, Ok(vec![0, 0]));
            let all: Vec<f32> = first.iter().chain(&second).copied().collect();
            for feature in 0..2 * PANEL_FEATURES {
                for k in 0..depth {
                    let expected = all.get(feature * depth + k).copied().unwrap_or(0.0);
                    let found = unit_number(&units, depth, dtype, feature, k);
                    assert_eq!(found.to_bits(), rounded(expected, dtype).to_bits());
                }
            }
        }
    }

    #[test]
    fn a_gate_and_what_it_gates_take_turns() {
        let depth = 4;
        let (gate, up) = (numbers(64 * depth, 3), numbers(64 * depth, 4));
        let parts = [rows_of(&gate, depth), rows_of(&up, depth)];
        let mut units = vec![7; 2 * PANEL_FEATURES * depth];
        let odd = packed(&parts, depth, DType::Float32, true, PanelsMut::Units(&mut units));
        assert_eq!(odd, Ok(vec![0, 0]));
        for row in 0..64 {
            for (half, from) in [&gate, &up].into_iter().enumerate() {
                let feature = row / HALF * PANEL_FEATURES + half * HALF + row % HALF;
                let found = unit_number(&units, depth, DType::Float32, feature, 1);
                assert_eq!(found.to_bits(), from[row * depth + 1].to_bits());
            }
        }
    }

    #[test]
    fn interleaved_heads_are_put_in_order() {
        let depth = 2;
        let all = numbers(12 * depth, 5);
        let rows = Rows { interleaved: Some(6), ..rows_of(&all, depth) };
        let mut units = vec![0; PANEL_FEATURES * depth];
        packed(&[rows], depth, DType::Float32, false, PanelsMut::Units(&mut units))
            .expect("correct rows");
        for (feature, place) in [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11].into_iter().enumerate() {
            let found = unit_number(&units, depth, DType::Float32, feature, 0);
            assert_eq!(found.to_bits(), all[place * depth].to_bits());
        }
    }

    #[test]
    fn int8_weights_are_nearest_multiples_of_a_scale() {
        let depth = 300;
        let mut all = numbers(70 * depth, 6);
        all[3 * depth..4 * depth].fill(0.0);
        for dtype in DTYPES {
            let (mut values, mut scales) = (vec![7; 2 * PANEL_FEATURES * depth], vec![7.0; 70]);
            let panels = PanelsMut::Int8 { values: &mut values, scales: &mut scales };
            packed(&[rows_of(&all, depth)], depth, dtype, false, panels).expect("correct rows");
            for feature in 0..70 {
                let row = &all[feature * depth..][..depth];
                let row: Vec<f32> = row.iter().map(|number| rounded(*number, dtype)).collect();
                let peak = row.iter().fold(0.0_f32, |peak, number| peak.max(number.abs()));
                assert_eq!(scales[feature].to_bits(), (peak / 127.0).to_bits());
                for (k, number) in row.iter().enumerate() {
                    let panel = feature / PANEL_FEATURES * depth;
                    let value = values[(panel + k) * PANEL_FEATURES + feature % PANEL_FEATURES];
                    let error = (f32::from(value) * scales[feature] - number).abs();
                    assert!(error <= 0.5001 * scales[feature], "{number} became {value}");
                }
            }
            let padding = &values[64 * depth + 6..];
            assert!(padding.iter().step_by(PANEL_FEATURES).all(|value| *value == 0));
        }
    }

    /// Rows of 96 weights, of random blocks whose scales and minima are finite.
    struct BlockFile {
        format: Format,
        storage: Storage,
        bytes: Vec<u8>,
    }

    impl BlockFile {
        const DEPTH: usize = 96;

        fn new(format: Format) -> Self {
            let storage = storage_of(format).expect("a format with blocks");
            let mut state = 9_u32;
            let mut bytes: Vec<u8> = (0..128 * storage.row_bytes(Self::DEPTH))
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (state >> 24).to_le_bytes()[0]
                })
                .collect();
            for block in bytes.chunks_mut(format.block_bytes()) {
                for half in format.block().1 {
                    block[half + 1] = block[half + 1] & 0x83 | 0x24;
                }
            }
            Self { format, storage, bytes }
        }

        fn rows(&self, first: usize, num_rows: usize) -> Rows {
            let first = self.bytes[first * self.storage.row_bytes(Self::DEPTH)..].as_ptr();
            Rows { first, num_rows, storage: self.storage, interleaved: None }
        }

        fn pack(&self, parts: &[Rows], is_gated: bool) -> Result<(Vec<usize>, Vec<u8>)> {
            let num_rows: usize = parts.iter().map(|part| part.num_rows).sum();
            let size = num_rows.div_ceil(64) * self.format.panel_bytes(Self::DEPTH);
            let mut values = vec![7; size];
            let format = self.format;
            let panels = PanelsMut::Bytes { format, values: &mut values, scales: &mut [] };
            let odd = packed(parts, Self::DEPTH, DType::Float32, is_gated, panels)?;
            Ok((odd, values))
        }

        /// Asserts that a feature has the numbers that a row of the file is read as.
        fn check(&self, values: &[u8], feature: usize, row: usize) {
            let (size, row_bytes) =
                (self.format.panel_bytes(Self::DEPTH), self.storage.row_bytes(Self::DEPTH));
            let mut numbers = vec![0.0_f32; Self::DEPTH];
            self.storage.read(&self.bytes[row * row_bytes..][..row_bytes], &mut numbers);
            let panel = &values[feature / PANEL_FEATURES * size..][..size];
            for (k, number) in numbers.iter().enumerate() {
                let found = self.format.number(panel, feature % PANEL_FEATURES, k, 0.0);
                assert_eq!(found.to_bits(), number.to_bits(), "{:?}", self.format);
            }
        }
    }

    const BLOCK_FORMATS: [Format; 5] =
        [Format::Q8_0, Format::Q4_0, Format::Q4_1, Format::Q5_0, Format::Q5_1];

    #[test]
    fn blocks_keep_their_numbers() {
        for format in BLOCK_FORMATS {
            let file = BlockFile::new(format);
            let parts = [Rows { interleaved: Some(6), ..file.rows(0, 30) }, file.rows(30, 40)];
            let (odd, values) = file.pack(&parts, false).expect("correct rows");
            assert_eq!(odd, [0, 0]);
            for feature in 0..70 {
                let row = if feature < 30 { parts[0].place(feature) } else { feature };
                file.check(&values, feature, row);
            }
            let parts = [file.rows(0, 64), file.rows(64, 64)];
            let (_, values) = file.pack(&parts, true).expect("correct rows");
            for feature in 0..128 {
                let row = feature / PANEL_FEATURES * HALF + feature % HALF;
                file.check(&values, feature, feature / HALF % 2 * 64 + row);
            }
        }
    }

    #[test]
    fn blocks_with_a_scale_that_is_not_finite_are_counted() {
        for format in BLOCK_FORMATS {
            let mut file = BlockFile::new(format);
            let scale = format.block().1[0];
            (file.bytes[scale], file.bytes[scale + 1]) = (0, 0x7c);
            let found = file.pack(&[file.rows(0, 64)], false).map(|(odd, _)| odd);
            assert_eq!(found, Ok(vec![1]));
        }
    }

    #[test]
    fn blocks_of_another_format_are_refused() {
        let file = BlockFile::new(Format::Q4_0);
        let rows = Rows { storage: Storage::Q4_1, ..file.rows(0, 32) };
        let refusal = file.pack(&[rows], false).expect_err("a refusal").to_string();
        assert!(refusal.contains("must be stored as Q4_0 for panels of Q4_0; got Q4_1"), "{refusal}");
    }

    #[test]
    fn numbers_that_are_not_finite_are_counted() {
        let (mut all, more) = (numbers(3 * 8, 7), numbers(8, 8));
        (all[5], all[17], all[18]) = (f32::NAN, f32::INFINITY, 1e6);
        for (dtype, num) in [(DType::Float32, 2), (DType::Float16, 3)] {
            let mut units = vec![0; PANEL_FEATURES * 8 / dtype.per_unit()];
            let parts = [rows_of(&more, 8), rows_of(&all, 8)];
            let odd = packed(&parts, 8, dtype, false, PanelsMut::Units(&mut units));
            assert_eq!(odd, Ok(vec![0, num]));
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let all = numbers(32 * 32, 9);
        let rows = rows_of(&all, 32);
        let refusal = |parts: &[Rows], depth: usize, dtype: DType, is_gated: bool, len: usize| {
            let mut units = vec![0; len];
            packed(parts, depth, dtype, is_gated, PanelsMut::Units(&mut units))
                .expect_err("a refusal")
                .to_string()
        };
        let float = DType::Float32;
        assert!(refusal(&[], 32, float, false, 0).contains("must have a part"));
        assert!(refusal(&[rows], 32, float, false, 99).contains("must have 2048 elements; got 99"));
        assert!(refusal(&[rows], 32, float, true, 2048).contains("gated layer two"));
        assert!(refusal(&[rows], 31, DType::BFloat16, false, 992).contains("multiple of 2"));
        let blocks = Rows { storage: Storage::Q4K, ..rows };
        assert!(refusal(&[blocks], 32, float, false, 2048).contains("whole blocks of 256"));
        let heads = Rows { interleaved: Some(5), ..rows };
        assert!(refusal(&[heads], 32, float, false, 2048).contains("whole heads of an even size"));
        let nowhere = Rows { first: std::ptr::null(), ..rows };
        assert!(refusal(&[nowhere], 32, float, false, 2048).contains("must have an address"));
    }
}
