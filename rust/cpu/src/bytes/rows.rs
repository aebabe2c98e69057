//! Rows as signed bytes.

use crate::bytes::Dots;
use crate::bytes::format::GROUP;
use crate::element::Element;
use crate::linear::Matrix;
use crate::number::{BFloat16, DType, Float16, PANEL};
use crate::team::Execution;
use crate::vectors::{Kernel, Vectors};

// SAFETY: addresses; rows are written before they are shared for reading.
unsafe impl Sync for ByteRows {}

/// Rows of a call as bytes; R rows of K inputs.
#[derive(Clone, Copy)]
pub(crate) struct ByteRows {
    /// `[R][stride]`, from K on zero.
    pub(crate) bytes: *mut i8,
    /// K, rounded up to whole groups.
    pub(crate) stride: usize,
    /// Scales of a row: one, or one for each group.
    pub(crate) num_scales: usize,
    /// `[R][num_scales]`, what the bytes are multiples of.
    pub(crate) scales: *mut f32,
    /// `[R][num_scales]`, the sums of the bytes.
    pub(crate) totals: *mut i32,
}

/// Numbers that one thread quantises in less time than a second one takes to begin.
const FEW_NUMBERS: usize = 16_384;
/// The largest whole number; -128 has no positive counterpart.
const LARGEST: f32 = 127.0;

/// Quantises rows; a few numbers are not worth a second thread.
///
/// # Safety
/// The rows exist, and there is room for their bytes, scales and totals; no other code accesses
/// these during the call.
pub(crate) unsafe fn quantise_rows(
    (input, dtype): (Matrix, DType),
    in_features: usize,
    num_rows: usize,
    to: &ByteRows,
    execution: &Execution<'_>,
) {
    let call = Call { input, dtype, in_features, to };
    let quantise = |row: usize| {
        // SAFETY: the caller's promise; each row is done once.
        unsafe { execution.instructions.run(Quantise { call: &call, row }) };
    };
    if num_rows * in_features <= FEW_NUMBERS {
        (0..num_rows).for_each(quantise);
    } else {
        execution.for_each(num_rows, &quantise);
    }
}

struct Call<'a> {
    input: Matrix,
    dtype: DType,
    in_features: usize,
    to: &'a ByteRows,
}

// SAFETY: each row is read and written by one thread.
unsafe impl Sync for Call<'_> {}

/// One row of a call.
struct Quantise<'a> {
    call: &'a Call<'a>,
    row: usize,
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
        let &Call { input, in_features, to, .. } = self.call;
        let row = self.row;
        let from = input.pointer.cast::<E>().wrapping_add(row * input.stride).cast_const();
        let bytes = to.bytes.wrapping_add(row * to.stride);
        let group = if to.num_scales == 1 { to.stride } else { GROUP };
        for number in 0..to.num_scales {
            let first = number * group;
            let len = group.min(in_features.saturating_sub(first));
            let place = row * to.num_scales + number;
            // SAFETY: the row has these numbers, and there is room for them.
            unsafe {
                let (scale, total) = quantise::<I, E>(from.add(first), len, group, bytes.add(first));
                to.scales.add(place).write(scale);
                to.totals.add(place).write(total);
            }
        }
    }
}

/// Writes `len` numbers as multiples of a scale, then zeros up to `room`; returns the scale and
/// the sum of the bytes.
#[inline(always)]
unsafe fn quantise<I: Vectors, E: Element>(
    from: *const E,
    len: usize,
    room: usize,
    to: *mut i8,
) -> (f32, i32) {
    let mut buffer = [0.0_f32; PANEL];
    let (mut peak, mut odd) = (0.0_f32, 0.0_f32);
    let numbers = |first: usize, buffer: &mut [f32; PANEL]| {
        let num = PANEL.min(len - first);
        // SAFETY: the caller's promise.
        unsafe {
            if num == PANEL {
                I::store(E::load::<I>(from.add(first)), buffer.as_mut_ptr());
            } else {
                buffer.fill(0.0);
                for (index, number) in buffer.iter_mut().enumerate().take(num) {
                    *number = from.add(first + index).read().to_f32();
                }
            }
        }
    };
    for first in (0..len).step_by(PANEL) {
        numbers(first, &mut buffer);
        for number in buffer {
            peak = peak.max(number.abs());
            odd += number * 0.0; // NaN where it is not finite
        }
    }
    let inverse = if peak == 0.0 { 0.0 } else { LARGEST / peak };
    let mut total = 0_i32;
    for first in (0..room).step_by(PANEL) {
        if first < len {
            numbers(first, &mut buffer);
        } else {
            buffer.fill(0.0);
        }
        for (index, number) in buffer.iter().enumerate() {
            #[expect(clippy::cast_possible_truncation, reason = "at most 127, or NaN")]
            let whole = (number * inverse).round_ties_even() as i8;
            total += i32::from(whole);
            // SAFETY: there is room.
            unsafe { to.add(first + index).write(whole) };
        }
    }
    (peak / LARGEST + odd, total)
}
