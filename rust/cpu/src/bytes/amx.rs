//! Sums of bytes by AMX, which multiplies 64 inputs of 16 rows and 16 features at once.
//!
//! Groups of 64 inputs leave the tiles as whole numbers, one by one; whole rows do so once.
#![expect(unsafe_code, reason = "rows and weights are addresses")]
#![expect(clippy::inline_always, reason = "must become part of a function with the instructions")]

use std::mem::MaybeUninit;

use crate::bytes::open::{OPENED, Opened};
use crate::bytes::tile::{VECTORS, open};
use crate::bytes::{BytePanels, Format, Part, panel_at};
use crate::kernel::Rows;
use crate::linear::PANEL_FEATURES;
use crate::number::PANEL;
use crate::vectors::{Instructions, Vectors};
use crate::x86::amx::{Lines, OfBytes, ROWS, STEP, Steps, Tiles, WHOLE};

/// Bytes of a unit.
const UNIT: usize = 4;
/// Inputs of a step.
const STEP_INPUTS: usize = UNIT * STEP;

/// Sums of some rows with a panel, `[rows][64]`: those of [`super::sum_panel`], to the last bit.
///
/// # Safety
/// As there; the CPU has AMX, and [`BytePanels::amx_rows`] is not None.
#[inline(always)]
pub(crate) unsafe fn sum_panel_by_amx<I: Instructions>(
    weights: &BytePanels<'_>,
    in_features: usize,
    panel: usize,
    rows: Part<'_>,
    (sums, tiles): (*mut f32, &mut Tiles),
) {
    // SAFETY: the caller's promise.
    unsafe {
        if let Some(scales) = weights.panel_scales(panel) {
            sum_whole_rows((weights, &scales), in_features, panel, rows, (sums, tiles));
        } else {
            sum_groups::<I>(weights, in_features, panel, rows, (sums, tiles));
        }
    }
}

#[inline(always)]
unsafe fn sum_whole_rows(
    (weights, scales): (&BytePanels<'_>, &[f32; PANEL_FEATURES]),
    in_features: usize,
    panel: usize,
    rows: Part<'_>,
    (sums, tiles): (*mut f32, &mut Tiles),
) {
    let depth = in_features / UNIT;
    let panel = units(weights.values.as_ptr()).wrapping_add(panel * depth * PANEL_FEATURES);
    let at = |step: usize, vector: usize| {
        panel.wrapping_add(step * STEP * PANEL_FEATURES + vector * PANEL)
    };
    let steps = Steps { depth, parts: WHOLE, len: STEP, stride: PANEL_FEATURES };
    // SAFETY: the caller's promise; whole numbers are written in the place of sums.
    unsafe {
        let mut ahead = Lines::after(panel, depth, rows.first, rows.rows.num_rows);
        tiles.product::<OfBytes>(
            (rows_from(rows, 0, 0, sums), rows.num),
            VECTORS,
            steps,
            at,
            &mut ahead,
        );
        for row in 0..rows.num {
            let sums = sums.add(row * PANEL_FEATURES);
            let scale = *rows.rows.scales.add(rows.first + row);
            for (feature, feature_scale) in scales.iter().enumerate() {
                let sum = sums.add(feature);
                // 0 is added as other sums are, whose first group it precedes.
                sum.write(whole_at(sum) * scale * feature_scale + 0.0);
            }
        }
    }
}

/// Whole numbers of 32 rows.
#[repr(align(64))]
struct Whole([MaybeUninit<f32>; ROWS * PANEL_FEATURES]);

#[inline(always)]
unsafe fn sum_groups<I: Instructions>(
    weights: &BytePanels<'_>,
    in_features: usize,
    panel: usize,
    rows: Part<'_>,
    (sums, tiles): (*mut f32, &mut Tiles),
) {
    let (format, bytes) = panel_at(weights.sections, in_features, panel);
    let blocks = weights.values.as_ptr().wrapping_add(bytes.start);
    let mut opened = MaybeUninit::<Opened>::uninit();
    let mut whole = Whole([MaybeUninit::uninit(); ROWS * PANEL_FEATURES]);
    let whole = whole.0.as_mut_ptr().cast::<f32>();
    let steps = Steps { depth: STEP, parts: WHOLE, len: STEP, stride: PANEL_FEATURES };
    // SAFETY: any bits are an `Opened`; what is read of it was filled.  The caller's promise.
    unsafe {
        let opened = &mut *opened.as_mut_ptr();
        for index in 0..rows.num * PANEL_FEATURES {
            sums.add(index).write(0.0);
        }
        for first in (0..in_features).step_by(OPENED) {
            let num = OPENED.min(in_features - first);
            let from = blocks.wrapping_add(format.panel_bytes(first));
            let groups = open::<I>(opened, format, from, num);
            for first_row in (0..rows.num).step_by(ROWS) {
                let num_rows = ROWS.min(rows.num - first_row);
                for input in (0..num).step_by(STEP_INPUTS) {
                    let quads = units(groups.quads).wrapping_add(input / UNIT * PANEL_FEATURES);
                    let at = |_, vector: usize| quads.wrapping_add(vector * PANEL);
                    let part = rows_from(rows, first_row, first + input, whole);
                    tiles.product::<OfBytes>((part, num_rows), VECTORS, steps, at, &mut ());
                    let numbers = input / STEP_INPUTS * PANEL_FEATURES;
                    let group = Group {
                        whole,
                        scales: groups.scales.wrapping_add(numbers),
                        minima: groups.minima.wrapping_add(numbers),
                        place: rows.place((first + input) / STEP_INPUTS) + first_row,
                    };
                    let sums = sums.add(first_row * PANEL_FEATURES);
                    match format {
                        Format::Q4_0_64 => group.add::<I, 8>(rows, num_rows, sums),
                        Format::Q4_1_64 => group.add::<I, 0>(rows, num_rows, sums),
                        _ => unreachable!("other formats have other groups"),
                    }
                }
            }
        }
    }
}

/// Whole sums of a group, `[rows][64]`, and what they are multiplied with.
struct Group {
    whole: *const f32,
    scales: *const f32,
    minima: *const f32,
    /// Index of the numbers of the first row.
    place: usize,
}

impl Group {
    /// Adds them as vectors do; `ZERO` is that of the weights, and where it is 0 there are minima.
    #[inline(always)]
    unsafe fn add<I: Vectors, const ZERO: i32>(
        &self,
        rows: Part<'_>,
        num_rows: usize,
        sums: *mut f32,
    ) {
        let &Self { whole, scales, minima, place } = self;
        // SAFETY: the caller's promise.
        unsafe {
            for row in 0..num_rows {
                let sums = sums.add(row * PANEL_FEATURES);
                let at = whole.add(row * PANEL_FEATURES);
                let numbers: [f32; PANEL_FEATURES] =
                    std::array::from_fn(|index| whole_at(at.add(index)));
                let scale = I::splat(*rows.rows.scales.add(place + row));
                let shift = I::splat(*rows.rows.shifts.add(place + row));
                #[expect(clippy::cast_precision_loss, reason = "below 2^24")]
                let zero = I::splat((-ZERO * *rows.rows.totals.add(place + row)) as f32);
                for first in (0..PANEL_FEATURES).step_by(PANEL) {
                    // Both are below 2^24, so that the sum is exact.
                    let number = I::add(I::load(numbers.as_ptr().add(first)), zero);
                    let (to, scales) = (sums.add(first), I::load(scales.add(first)));
                    let mut sum = I::multiply_add(I::mul(number, scale), scales, I::load(to));
                    if ZERO == 0 {
                        sum = I::multiply_add(shift, I::load(minima.add(first)), sum);
                    }
                    I::store(sum, to);
                }
            }
        }
    }
}

/// Units of bytes.
fn units(bytes: *const u8) -> *const u32 {
    bytes.cast()
}

/// Rows for tiles, from one of a part on and from an input on.
#[inline(always)]
fn rows_from(part: Part<'_>, row: usize, input: usize, result: *mut f32) -> Rows {
    Rows {
        units: units(part.bytes(row, input).cast()),
        unit_stride: part.rows.num_inputs / UNIT,
        result,
        result_stride: PANEL_FEATURES,
        adds: false,
    }
}

/// A whole number in the place of a sum, as float32, rounded once.
#[inline(always)]
#[expect(clippy::cast_precision_loss, reason = "as conversions of vectors")]
unsafe fn whole_at(sum: *const f32) -> f32 {
    // SAFETY: the caller's promise.
    unsafe { sum.cast::<i32>().read() as f32 }
}
