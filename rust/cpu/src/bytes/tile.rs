//! The register tile: whole sums of some rows with 16 features a vector.
#![expect(clippy::needless_range_loop, reason = "constant bounds over several arrays at once")]

use crate::bytes::BytePanels;
use crate::bytes::format::{Format, GROUP, OPENED, Opened, QUADS};
use crate::bytes::rows::ByteRows;
use crate::linear::PANEL_FEATURES;
use crate::number::PANEL;
use crate::vectors::Vectors;

/// Dot products of four bytes in each of 16 lanes.
///
/// # Safety
/// Every function may be called only where the CPU has the instructions, and pointers are valid for
/// what is read.
pub(crate) trait Dots: Vectors {
    /// Sixteen whole numbers of 32 bits.
    type Sums: Copy;
    /// Sums of a few products, where they are made with fewer bits.
    type Few: Copy;
    /// Four bytes of each lane.
    type Quads: Copy;
    /// Four signed bytes of each lane, and what is made of them once for all rows.
    type Signed: Copy;
    /// Four bytes of a row in every lane.
    type Row: Copy;
    /// Rows of the largest tile.
    const DOT_ROWS: usize;

    unsafe fn no_sums() -> Self::Sums;
    unsafe fn no_few() -> Self::Few;
    /// Where sums of products with signed weights begin, for a row whose bytes add up to `total`.
    unsafe fn start_signed(total: i32) -> Self::Sums;
    unsafe fn load_quads(from: *const u8) -> Self::Quads;
    unsafe fn load_signed(from: *const u8) -> Self::Signed;
    unsafe fn broadcast(row: *const i8) -> Self::Row;
    /// Adds products of weights that are signed.
    unsafe fn dot_signed(sums: Self::Sums, row: Self::Row, weights: Self::Signed) -> Self::Sums;
    /// Adds products of weights from 0 to `32767 / 254 / n`, of at most n calls between two `flush`.
    unsafe fn dot_small(
        sums: (Self::Sums, Self::Few),
        row: Self::Row,
        weights: Self::Quads,
    ) -> (Self::Sums, Self::Few);
    /// Brings the sums up to date.
    unsafe fn flush(sums: (Self::Sums, Self::Few)) -> Self::Sums;
    unsafe fn to_floats(sums: Self::Sums) -> Self::V;
}

/// How the bytes of an opened panel are met.
trait Kind {
    /// Quads between two calls of `flush`.
    const QUADS: usize;
    const HAS_MINIMA: bool;
    type Weights<I: Dots>: Copy;

    unsafe fn start<I: Dots>(total: i32) -> I::Sums;
    unsafe fn flush<I: Dots>(sums: (I::Sums, I::Few)) -> I::Sums;
    unsafe fn load<I: Dots>(from: *const u8) -> Self::Weights<I>;
    unsafe fn dot<I: Dots>(
        sums: (I::Sums, I::Few),
        row: I::Row,
        weights: Self::Weights<I>,
    ) -> (I::Sums, I::Few);
}

struct Signed;

impl Kind for Signed {
    const QUADS: usize = 8;
    const HAS_MINIMA: bool = false;
    type Weights<I: Dots> = I::Signed;

    #[inline(always)]
    unsafe fn start<I: Dots>(total: i32) -> I::Sums {
        // SAFETY: the caller's promise.
        unsafe { I::start_signed(total) }
    }

    #[inline(always)]
    unsafe fn flush<I: Dots>((sums, _): (I::Sums, I::Few)) -> I::Sums {
        sums
    }

    #[inline(always)]
    unsafe fn load<I: Dots>(from: *const u8) -> I::Signed {
        // SAFETY: the caller's promise.
        unsafe { I::load_signed(from) }
    }

    #[inline(always)]
    unsafe fn dot<I: Dots>(
        (sums, few): (I::Sums, I::Few),
        row: I::Row,
        weights: I::Signed,
    ) -> (I::Sums, I::Few) {
        // SAFETY: the caller's promise.
        (unsafe { I::dot_signed(sums, row, weights) }, few)
    }
}

/// Weights of 4 bits: eight quads; of 5 bits: four.
struct Small<const N: usize>;

impl<const N: usize> Kind for Small<N> {
    const QUADS: usize = N;
    const HAS_MINIMA: bool = true;
    type Weights<I: Dots> = I::Quads;

    #[inline(always)]
    unsafe fn start<I: Dots>(_: i32) -> I::Sums {
        // SAFETY: the caller's promise.
        unsafe { I::no_sums() }
    }

    #[inline(always)]
    unsafe fn flush<I: Dots>(sums: (I::Sums, I::Few)) -> I::Sums {
        // SAFETY: the caller's promise.
        unsafe { I::flush(sums) }
    }

    #[inline(always)]
    unsafe fn load<I: Dots>(from: *const u8) -> I::Quads {
        // SAFETY: the caller's promise.
        unsafe { I::load_quads(from) }
    }

    #[inline(always)]
    unsafe fn dot<I: Dots>(
        sums: (I::Sums, I::Few),
        row: I::Row,
        weights: I::Quads,
    ) -> (I::Sums, I::Few) {
        // SAFETY: the caller's promise.
        unsafe { I::dot_small(sums, row, weights) }
    }
}

/// Calls a tile for groups of rows as equal as can be: `$first` is the first row of each.
macro_rules! for_rows {
    ($num_rows:expr, $limit:expr, $first:ident, $tile:ident<$($kind:ty),+>, $($argument:expr),*) => {{
        let (mut left, mut $first) = ($num_rows, 0);
        let mut groups = left.div_ceil($limit);
        while groups > 0 {
            let size = left.div_ceil(groups);
            match size {
                1 => $tile::<$($kind),+, 1>($($argument),*),
                2 => $tile::<$($kind),+, 2>($($argument),*),
                3 if $limit >= 3 => $tile::<$($kind),+, 3>($($argument),*),
                4 if $limit >= 4 => $tile::<$($kind),+, 4>($($argument),*),
                5 if $limit >= 5 => $tile::<$($kind),+, 5>($($argument),*),
                _ if $limit >= 6 => $tile::<$($kind),+, 6>($($argument),*),
                _ => unreachable!("a group has no more rows than the largest tile"),
            }
            (left, groups, $first) = (left - size, groups - 1, $first + size);
        }
    }};
}

/// Sums of some rows with a panel, `[rows][64]`.
///
/// # Safety
/// The CPU has the instructions; panel and rows exist; there is room for the sums.
#[inline(always)]
pub(crate) unsafe fn sum_panel<I: Dots>(
    weights: &BytePanels<'_>,
    in_features: usize,
    panel: usize,
    rows: Part<'_>,
    sums: *mut f32,
) {
    let from = weights.values.as_ptr().wrapping_add(panel * weights.format.panel_bytes(in_features));
    // SAFETY: the caller's promise.
    unsafe {
        match weights.format {
            Format::Int8 => sum_features::<I>(from, in_features, weights.scales, panel, rows, sums),
            Format::Q8_0 => sum_groups::<I, Signed>(weights.format, from, in_features, rows, sums),
            Format::Q4_0 | Format::Q4_1 => {
                sum_groups::<I, Small<8>>(weights.format, from, in_features, rows, sums);
            }
            Format::Q5_0 | Format::Q5_1 => {
                sum_groups::<I, Small<4>>(weights.format, from, in_features, rows, sums);
            }
        }
    }
}

/// Some of the rows.
#[derive(Clone, Copy)]
pub(crate) struct Part<'a> {
    pub(crate) rows: &'a ByteRows,
    pub(crate) first: usize,
    pub(crate) num: usize,
}

impl Part<'_> {
    #[inline(always)]
    fn bytes(&self, row: usize, input: usize) -> *const i8 {
        self.rows.bytes.wrapping_add((self.first + row) * self.rows.stride + input)
    }

    #[inline(always)]
    fn place(&self, row: usize, group: usize) -> usize {
        (self.first + row) * self.rows.num_scales + group
    }
}

/// A scale a feature: whole sums over all inputs.
#[inline(always)]
unsafe fn sum_features<I: Dots>(
    panel: *const u8,
    in_features: usize,
    scales: &[f32],
    number: usize,
    rows: Part<'_>,
    sums: *mut f32,
) {
    let mut padded = [0.0_f32; PANEL_FEATURES];
    for (to, from) in padded.iter_mut().zip(&scales[number * PANEL_FEATURES..]) {
        *to = *from;
    }
    for first in (0..PANEL_FEATURES).step_by(PANEL) {
        let from = panel.wrapping_add(4 * first);
        let (scales, num_quads) = (padded.as_ptr().wrapping_add(first), in_features.div_ceil(4));
        // SAFETY: the caller's promise.
        unsafe {
            for_rows!(rows.num, I::DOT_ROWS, row, features_tile<I>, from, num_quads, scales, rows,
                row, sums.wrapping_add(row * PANEL_FEATURES + first));
        }
    }
}

#[inline(always)]
unsafe fn features_tile<I: Dots, const R: usize>(
    mut from: *const u8,
    num_quads: usize,
    scales: *const f32,
    rows: Part<'_>,
    first_row: usize,
    result: *mut f32,
) {
    // SAFETY: the promise of `sum_panel`.
    unsafe {
        let mut sums = [I::no_sums(); R];
        let bytes: [*const i8; R] = std::array::from_fn(|row| rows.bytes(first_row + row, 0));
        for row in 0..R {
            sums[row] = I::start_signed(*rows.rows.totals.add(rows.place(first_row + row, 0)));
        }
        for quad in 0..num_quads {
            let weights = I::load_signed(from);
            if R <= 4 {
                I::prefetch(from.wrapping_add(8 * 1024).cast());
            }
            for row in 0..R {
                sums[row] = I::dot_signed(sums[row], I::broadcast(bytes[row].add(4 * quad)), weights);
            }
            from = from.wrapping_add(QUADS);
        }
        let scales = I::load(scales);
        for row in 0..R {
            let scale = I::splat(*rows.rows.scales.add(rows.place(first_row + row, 0)));
            let sum = I::mul(I::to_floats(sums[row]), scale);
            I::store(I::mul(sum, scales), result.wrapping_add(row * PANEL_FEATURES));
        }
    }
}

/// Scales for groups of inputs: whole sums of a group, float32 from group to group.
#[inline(always)]
unsafe fn sum_groups<I: Dots, K: Kind>(
    format: Format,
    panel: *const u8,
    in_features: usize,
    rows: Part<'_>,
    sums: *mut f32,
) {
    let mut opened = std::mem::MaybeUninit::<Opened>::uninit();
    let num_groups = in_features / GROUP;
    let group_bytes = format.panel_bytes(GROUP);
    // SAFETY: any bits are an `Opened`; what is read of it was filled.  The caller's promise.
    unsafe {
        for index in 0..rows.num * PANEL_FEATURES {
            sums.add(index).write(0.0);
        }
        let opened = &mut *opened.as_mut_ptr();
        for first in (0..num_groups).step_by(OPENED) {
            let num = OPENED.min(num_groups - first);
            opened.fill::<I>(format, panel.wrapping_add(first * group_bytes), num);
            for feature in (0..PANEL_FEATURES).step_by(PANEL) {
                for_rows!(rows.num, I::DOT_ROWS, row, groups_tile<I, K>, opened, feature, (first, num),
                    rows, row, sums.wrapping_add(row * PANEL_FEATURES + feature));
            }
        }
    }
}

#[inline(always)]
unsafe fn groups_tile<I: Dots, K: Kind, const R: usize>(
    opened: &Opened,
    feature: usize,
    (first, num): (usize, usize),
    rows: Part<'_>,
    first_row: usize,
    result: *mut f32,
) {
    // SAFETY: the promise of `sum_panel`.
    unsafe {
        let mut from = opened.quads.as_ptr().wrapping_add(4 * feature);
        let mut bytes: [*const i8; R] =
            std::array::from_fn(|row| rows.bytes(first_row + row, first * GROUP));
        for group in 0..num {
            let mut sums = [(I::no_sums(), I::no_few()); R];
            for row in 0..R {
                let place = rows.place(first_row + row, first + group);
                sums[row].0 = K::start::<I>(*rows.rows.totals.add(place));
            }
            for quad in 0..GROUP / 4 {
                let weights = K::load::<I>(from);
                for row in 0..R {
                    let four = I::broadcast(bytes[row].add(4 * quad));
                    sums[row] = K::dot::<I>(sums[row], four, weights);
                }
                if (quad + 1).is_multiple_of(K::QUADS) {
                    for row in 0..R {
                        sums[row] = (K::flush::<I>(sums[row]), I::no_few());
                    }
                }
                from = from.wrapping_add(QUADS);
            }
            let at = group * PANEL_FEATURES + feature;
            let scales = I::load(opened.scales.as_ptr().wrapping_add(at));
            for row in 0..R {
                bytes[row] = bytes[row].wrapping_add(GROUP);
                let place = rows.place(first_row + row, first + group);
                let to = result.wrapping_add(row * PANEL_FEATURES);
                let scale = *rows.rows.scales.add(place);
                let sum = I::mul(I::to_floats(sums[row].0), I::splat(scale));
                let mut total = I::multiply_add(sum, scales, I::load(to));
                if K::HAS_MINIMA {
                    let minima = I::load(opened.minima.as_ptr().wrapping_add(at));
                    #[expect(clippy::cast_precision_loss, reason = "a group's is below 2^12")]
                    let whole = *rows.rows.totals.add(place) as f32;
                    total = I::multiply_add(I::splat(scale * whole), minima, total);
                }
                I::store(total, to);
            }
        }
    }
}
