//! Rows as signed bytes.

use std::cell::Cell;
use std::ops::Range;

use crate::bytes::format::GROUP;
use crate::bytes::{BytePanels, Dots, TURNED, turn};
use crate::element::Element;
use crate::linear::Matrix;
use crate::number::{BFloat16, DType, Float16, PANEL};
use crate::scratch::pieces;
use crate::team::Execution;
use crate::vectors::{Kernel, Vectors};

// SAFETY: addresses; rows are written before they are shared for reading.
unsafe impl Sync for ByteRows {}

/// Rows of a call as bytes; R rows of K inputs.  The numbers of a group lie beside those of the
/// next row, where a tile needs it.
#[derive(Clone, Copy)]
pub(crate) struct ByteRows {
    pub(crate) num_rows: usize,
    /// Inputs of a row.
    pub(crate) num_inputs: usize,
    /// Inputs that share a scale.
    pub(crate) group: usize,
    /// Whether rows are turned before they become bytes.
    is_turned: bool,
    /// `[R][K]`.
    pub(crate) bytes: *mut i8,
    /// `[num_groups][R]`, what the bytes are multiples of.
    pub(crate) scales: *mut f32,
    /// `[num_groups][R]`, the sums of the bytes.
    pub(crate) totals: *mut i32,
    /// `[num_groups][2][R]`, the same of each half of a group of 32.
    pub(crate) half_totals: *mut i32,
    /// `[num_groups][R]`, the sums times the scales: what a minimum is multiplied with.
    pub(crate) shifts: *mut f32,
}

impl ByteRows {
    /// Rows for checked panels, in the memory of a thread; valid until the memory is used again.
    pub(crate) fn new(
        memory: &mut Vec<u32>,
        num_rows: usize,
        num_inputs: usize,
        panels: &BytePanels<'_>,
    ) -> Self {
        let group = panels.group(num_inputs);
        let num = num_rows * (num_inputs / group);
        let [bytes, scales, totals, half_totals, shifts] =
            pieces(memory, [num_rows * num_inputs / 4, num, num, 2 * num, num]);
        Self {
            num_rows,
            num_inputs,
            group,
            is_turned: panels.is_turned(),
            bytes: bytes.cast(),
            scales: scales.cast(),
            totals: totals.cast(),
            half_totals: half_totals.cast(),
            shifts: shifts.cast(),
        }
    }
}

thread_local! {
    static TURNED_ROW: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// Numbers that one thread quantises in less time than a second one takes to start.
const FEW_NUMBERS: usize = 16_384;
/// Rows whose scales of a group share a cache line: two threads that wrote to one would wait for
/// each other.
const LINE_ROWS: usize = 16;
/// The largest whole number; -128 has no positive counterpart.
const LARGEST: f32 = 127.0;
/// Added to a number below 2^22 it leaves the nearest whole one, ties to even, in the lowest bits.
const ROUNDER: f32 = 12_582_912.0;

/// All bits of a float32 but its sign.
const MAGNITUDE: u32 = u32::MAX >> 1;

/// Quantises rows; a few numbers are not worth a second thread.
///
/// # Safety
/// The rows exist, and `to` can hold their bytes, scales and totals; no other code accesses these
/// during the call.
pub(crate) unsafe fn quantise_rows(
    (input, dtype): (Matrix, DType),
    in_features: usize,
    num_rows: usize,
    to: &ByteRows,
    execution: &Execution<'_>,
) {
    let call = Call { input, dtype, to };
    let per_item = LINE_ROWS.min(num_rows.div_ceil(2));
    let quantise = |item: usize| {
        let first = item * per_item;
        let rows = first..num_rows.min(first + per_item);
        // SAFETY: the caller's promise; each row is done once.
        unsafe { execution.instructions.run(Quantise { call: &call, rows }) };
    };
    let num_items = num_rows.div_ceil(per_item);
    if num_rows * in_features <= FEW_NUMBERS {
        (0..num_items).for_each(quantise);
    } else {
        execution.for_each(num_items, &quantise);
    }
}

struct Call<'a> {
    input: Matrix,
    dtype: DType,
    to: &'a ByteRows,
}

// SAFETY: each row is read and written by one thread.
unsafe impl Sync for Call<'_> {}

/// Some rows of a call.
struct Quantise<'a> {
    call: &'a Call<'a>,
    rows: Range<usize>,
}

impl Kernel for Quantise<'_> {
    #[inline(always)]
    unsafe fn run<I: Dots>(self) {
        // SAFETY: the caller's promise.
        unsafe {
            match self.call.dtype {
                DType::Float32 => self.convert::<I, f32>(),
                DType::BFloat16 => self.convert::<I, BFloat16>(),
                DType::Float16 => self.convert::<I, Float16>(),
            }
        }
    }
}

impl Quantise<'_> {
    #[inline(always)]
    unsafe fn convert<I: Vectors, E: Element>(&self) {
        // SAFETY: the caller's promise.
        unsafe {
            // Compiled for groups of this size, and for others.
            match self.call.to.group {
                _ if self.call.to.is_turned => self.convert_turned::<I, E>(),
                GROUP => self.convert_groups::<I, E>(GROUP),
                size => self.convert_groups::<I, E>(size),
            }
        }
    }

    #[inline(always)]
    unsafe fn convert_groups<I: Vectors, E: Element>(&self, size: usize) {
        let &Call { input, to, .. } = self.call;
        // Group by group, which is their order in memory.
        for (group, first) in (0..to.num_inputs).step_by(size).enumerate() {
            for row in self.rows.clone() {
                // SAFETY: the row has these numbers.
                unsafe {
                    let from = input.pointer.cast::<E>().add(row * input.stride + first);
                    to.write_group::<I, E>(from, size, group, row);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn convert_turned<I: Vectors, E: Element>(&self) {
        let &Call { input, to, .. } = self.call;
        let mut memory = TURNED_ROW.take();
        let [turned] = pieces(&mut memory, [to.num_inputs]);
        for row in self.rows.clone() {
            // SAFETY: the row has these numbers, and the buffer can hold them.
            unsafe {
                let from = input.pointer.cast::<E>().add(row * input.stride);
                for first in (0..to.num_inputs).step_by(TURNED) {
                    turn::<I, E>(from.add(first), turned.add(first));
                }
                to.write_group::<I, f32>(turned, to.num_inputs, 0, row);
            }
        }
        TURNED_ROW.set(memory);
    }
}

impl ByteRows {
    /// Writes the `size` numbers of a group of a row: bytes, scale and totals.
    ///
    /// # Safety
    /// The numbers can be read; the row exists, and no other thread accesses its group.
    #[inline(always)]
    unsafe fn write_group<I: Vectors, E: Element>(
        &self,
        from: *const E,
        size: usize,
        group: usize,
        row: usize,
    ) {
        let place = group * self.num_rows + row;
        // SAFETY: the caller's promise; the buffers can hold the results.
        unsafe {
            let bytes = self.bytes.add(row * self.num_inputs + group * size);
            let scale = scale_of::<I, E>(from, size);
            let mut totals = [0_i32; PANEL];
            for start in (0..size).step_by(PANEL) {
                let part = quantise::<I, E>(from.add(start), scale, bytes.add(start));
                // Checks for overflow would keep the compiler from vectors.
                for lane in 0..PANEL {
                    totals[lane] = totals[lane].wrapping_add(part[lane]);
                }
                if size == GROUP {
                    let half = 2 * group + start / PANEL;
                    let total = sum(&part);
                    self.half_totals.add(half * self.num_rows + row).write(total);
                }
            }
            let total = sum(&totals);
            self.scales.add(place).write(scale);
            self.totals.add(place).write(total);
            #[expect(clippy::cast_precision_loss, reason = "a group's total is below 2^24")]
            self.shifts.add(place).write(scale * total as f32);
        }
    }
}

/// The sum of whole numbers, which a group's is small enough for.
#[inline(always)]
fn sum(wholes: &[i32; PANEL]) -> i32 {
    wholes.iter().copied().fold(0, i32::wrapping_add)
}

/// 16 numbers.
#[inline(always)]
unsafe fn load<I: Vectors, E: Element>(from: *const E) -> [f32; PANEL] {
    let mut numbers = [0.0_f32; PANEL];
    // SAFETY: the caller's promise.
    unsafe { I::store(E::load::<I>(from), numbers.as_mut_ptr()) };
    numbers
}

/// The scale of the `size` numbers of a group; NaN if one of them is not finite.
#[inline(always)]
unsafe fn scale_of<I: Vectors, E: Element>(from: *const E, size: usize) -> f32 {
    // Compared as whole numbers, whose order is that of the magnitudes: the compiler may compare
    // them in any order, and a number that is not finite is the largest.
    let mut peaks = [0_u32; PANEL];
    for first in (0..size).step_by(PANEL) {
        // SAFETY: the caller's promise.
        let numbers = unsafe { load::<I, E>(from.add(first)) };
        for lane in 0..PANEL {
            peaks[lane] = peaks[lane].max(numbers[lane].to_bits() & MAGNITUDE);
        }
    }
    let peak = f32::from_bits(peaks.into_iter().fold(0, u32::max));
    if peak.is_finite() { peak / LARGEST } else { f32::NAN }
}

/// Writes 16 bytes; returns them as whole numbers.
#[inline(always)]
unsafe fn quantise<I: Vectors, E: Element>(
    from: *const E,
    scale: f32,
    to: *mut i8,
) -> [i32; PANEL] {
    // Bounded, so that 0 stays 0 where the scale is almost 0.
    let inverse = if scale > 0.0 { (1.0 / scale).min(f32::MAX) } else { 0.0 };
    // SAFETY: the caller's promise.
    let numbers = unsafe { load::<I, E>(from) };
    let mut wholes = [0_i32; PANEL];
    for lane in 0..PANEL {
        let rounded = (numbers[lane] * inverse).clamp(-LARGEST, LARGEST) + ROUNDER;
        // NaN becomes any byte.
        wholes[lane] = rounded.to_bits().wrapping_sub(ROUNDER.to_bits()).cast_signed() << 24 >> 24;
    }
    let mut bytes = [0_i8; PANEL];
    for lane in 0..PANEL {
        #[expect(clippy::cast_possible_truncation, reason = "from -128 to 127")]
        let byte = wholes[lane] as i8;
        bytes[lane] = byte;
    }
    // SAFETY: the caller's promise.
    unsafe { to.cast::<[i8; PANEL]>().write(bytes) };
    wholes
}
