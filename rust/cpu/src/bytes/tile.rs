//! The register tile: whole sums of some rows with 16 features a vector.
#![expect(clippy::needless_range_loop, reason = "constant bounds over several arrays at once")]

use std::marker::PhantomData;
use std::mem::MaybeUninit;

use crate::bytes::format::{Format, GROUP};
use crate::bytes::layout::{
    Bytes, Fives, Layout, Nibbles, PairedFives, PairedNibbles, Sixes, Widening,
};
use crate::bytes::open::{Groups, OPENED, Opened};
use crate::bytes::rows::ByteRows;
use crate::bytes::{BytePanels, panel_at};
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
    /// Bits of each byte, those of a mask after a shift down by `from_bit`, 0 to 7.
    unsafe fn load_bits(from: *const u8, from_bit: i32, mask: u8) -> Self::Quads;
    /// Bytes of which one holds the low four bits, the other those above.
    unsafe fn join(low: Self::Quads, high: Self::Quads) -> Self::Quads;
    /// Adds 16 to byte n of a lane where bit `4 * quad + n` of the lane's word is set.
    unsafe fn add_fifth_bits(low: Self::Quads, words: *const u8, quad: usize) -> Self::Quads;
    unsafe fn store_quads(quads: Self::Quads, to: *mut u8);
    /// The bytes of a table at places from 0 to 15.
    unsafe fn look_up(table: &[i8; 16], places: Self::Quads) -> Self::Quads;
    /// Bytes that have a sign, from -127.
    unsafe fn signed(quads: Self::Quads) -> Self::Signed;
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

/// How the weights of a group are met.
trait Kind {
    type Layout: Layout;
    const HAS_MINIMA: bool;
    type Weights<I: Dots>: Copy;

    /// Where the sums of a row begin, whose bytes of the group add up to what `total` points at.
    unsafe fn start<I: Dots>(total: *const i32) -> I::Sums;
    unsafe fn flush<I: Dots>(sums: (I::Sums, I::Few)) -> I::Sums;
    /// What is made of weights once for all rows.
    unsafe fn prepare<I: Dots>(quads: I::Quads) -> Self::Weights<I>;
    /// Adds their products with the bytes of a row.
    unsafe fn dot<I: Dots>(
        sums: (I::Sums, I::Few),
        row: I::Row,
        weights: Self::Weights<I>,
    ) -> (I::Sums, I::Few);
}

/// Weights that are signed bytes.
struct Signed<L>(PhantomData<L>);

impl<L: Layout> Kind for Signed<L> {
    type Layout = L;
    const HAS_MINIMA: bool = false;
    type Weights<I: Dots> = I::Signed;

    #[inline(always)]
    unsafe fn start<I: Dots>(total: *const i32) -> I::Sums {
        // SAFETY: the caller's promise.
        unsafe { I::start_signed(total.read()) }
    }

    #[inline(always)]
    unsafe fn flush<I: Dots>((sums, _): (I::Sums, I::Few)) -> I::Sums {
        sums
    }

    #[inline(always)]
    unsafe fn prepare<I: Dots>(quads: I::Quads) -> I::Signed {
        // SAFETY: the caller's promise.
        unsafe { I::signed(quads) }
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

/// Weights of 4 to 6 bits without a sign.
struct Small<L>(PhantomData<L>);

impl<L: Layout> Kind for Small<L> {
    type Layout = L;
    const HAS_MINIMA: bool = true;
    type Weights<I: Dots> = I::Quads;

    #[inline(always)]
    unsafe fn start<I: Dots>(_: *const i32) -> I::Sums {
        // SAFETY: the caller's promise.
        unsafe { I::no_sums() }
    }

    #[inline(always)]
    unsafe fn flush<I: Dots>(sums: (I::Sums, I::Few)) -> I::Sums {
        // SAFETY: the caller's promise.
        unsafe { I::flush(sums) }
    }

    #[inline(always)]
    unsafe fn prepare<I: Dots>(quads: I::Quads) -> I::Quads {
        quads
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

/// How far ahead a panel is read, in bytes.
const AHEAD: usize = 14 * 1024;
/// Bytes of a line of the caches.
const LINE: usize = 64;
/// Vectors of a panel's features.
const VECTORS: usize = PANEL_FEATURES / PANEL;

/// Calls a tile of one vector for groups of rows as equal as can be: `$first` is the first row of
/// each.
macro_rules! for_rows {
    ($num_rows:expr, $limit:expr, $first:ident, $tile:ident<$($kind:ty),+>, $($argument:expr),*) => {{
        let (mut left, mut $first) = ($num_rows, 0);
        let mut groups = left.div_ceil($limit);
        while groups > 0 {
            let size = left.div_ceil(groups);
            match size {
                1 => $tile::<$($kind),+, 1, 1>($($argument),*),
                2 => $tile::<$($kind),+, 2, 1>($($argument),*),
                3 if $limit >= 3 => $tile::<$($kind),+, 3, 1>($($argument),*),
                4 if $limit >= 4 => $tile::<$($kind),+, 4, 1>($($argument),*),
                5 if $limit >= 5 => $tile::<$($kind),+, 5, 1>($($argument),*),
                _ if $limit >= 6 => $tile::<$($kind),+, 6, 1>($($argument),*),
                _ => unreachable!("a group has no more rows than the largest tile"),
            }
            (left, groups, $first) = (left - size, groups - 1, $first + size);
        }
    }};
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
        self.rows.bytes.wrapping_add(self.place(row, 0) * GROUP + input)
    }

    #[inline(always)]
    fn place(&self, row: usize, group: usize) -> usize {
        (self.first + row) * self.rows.num_groups + group
    }
}

/// Sums of some rows with a panel, `[rows][64]`: whole sums of a group, float32 from group to group.
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
    let (format, bytes) = panel_at(weights.sections, in_features, panel);
    let blocks = Blocks {
        format,
        first: weights.values.as_ptr().wrapping_add(bytes.start),
        num_inputs: in_features,
    };
    // SAFETY: the caller's promise.
    unsafe {
        for index in 0..rows.num * PANEL_FEATURES {
            sums.add(index).write(0.0);
        }
        match format {
            Format::Q8_0 => sum_blocks::<I, Bytes, Signed<Bytes>>(blocks, rows, sums),
            Format::Iq4Nl => sum_blocks::<I, Widening, Signed<Widening>>(blocks, rows, sums),
            Format::Q4_0 | Format::Q4_1 => sum_small::<I, Nibbles>(blocks, rows, sums),
            Format::Q5_0 | Format::Q5_1 => sum_small::<I, Fives>(blocks, rows, sums),
            Format::Q4K => sum_small::<I, PairedNibbles>(blocks, rows, sums),
            Format::Q5K => sum_small::<I, PairedFives>(blocks, rows, sums),
            Format::Q6K => sum_small::<I, Sixes>(blocks, rows, sums),
        }
    }
}

/// A panel's blocks.
#[derive(Clone, Copy)]
struct Blocks {
    format: Format,
    first: *const u8,
    num_inputs: usize,
}

/// Adds the sums with weights that have no sign: a single row takes them from the panel, for several
/// they are opened once.
#[inline(always)]
unsafe fn sum_small<I: Dots, L: Layout>(blocks: Blocks, rows: Part<'_>, sums: *mut f32) {
    // SAFETY: the promise of `sum_panel`.
    unsafe {
        if rows.num == 1 {
            sum_blocks::<I, L, Small<L>>(blocks, rows, sums);
        } else {
            sum_blocks::<I, L, Small<L::Opened>>(blocks, rows, sums);
        }
    }
}

/// Adds the sums with all blocks, whose weights lie as `L` says and are met as `K` says.
#[inline(always)]
unsafe fn sum_blocks<I: Dots, L: Layout, K: Kind>(blocks: Blocks, rows: Part<'_>, sums: *mut f32) {
    let mut opened = MaybeUninit::<Opened>::uninit();
    // SAFETY: any bits are an `Opened`; what is read of it was filled.  The promise of `sum_panel`.
    unsafe {
        let opened = &mut *opened.as_mut_ptr();
        for first in (0..blocks.num_inputs).step_by(OPENED) {
            let num = OPENED.min(blocks.num_inputs - first);
            let from = blocks.first.wrapping_add(blocks.format.panel_bytes(first));
            let groups = if K::Layout::IS_PANEL {
                opened.open_numbers::<I>(blocks.format, from, num)
            } else {
                opened.open::<I, L>(blocks.format, from, num)
            };
            add_groups::<I, K>(groups, (first, num), rows, sums);
        }
    }
}

/// Adds the sums of some groups.
#[inline(always)]
unsafe fn add_groups<I: Dots, K: Kind>(
    groups: Groups,
    inputs: (usize, usize),
    rows: Part<'_>,
    sums: *mut f32,
) {
    if K::Layout::IS_PANEL && rows.num == 1 {
        // All features of a group at once: memory is read in its order.
        // SAFETY: the promise of `sum_panel`.
        return unsafe { groups_tile::<I, K, 1, VECTORS>(groups, 0, inputs, rows, 0, sums) };
    }
    for feature in (0..PANEL_FEATURES).step_by(PANEL) {
        // SAFETY: the promise of `sum_panel`.
        unsafe {
            for_rows!(rows.num, I::DOT_ROWS, row, groups_tile<I, K>, groups, feature, inputs, rows,
                row, sums.wrapping_add(row * PANEL_FEATURES + feature));
        }
    }
}

/// Adds the sums of `R` rows with `F` vectors of features.
#[inline(always)]
unsafe fn groups_tile<I: Dots, K: Kind, const R: usize, const F: usize>(
    groups: Groups,
    feature: usize,
    (first, num): (usize, usize),
    rows: Part<'_>,
    first_row: usize,
    result: *mut f32,
) {
    // SAFETY: the promise of `sum_panel`.
    unsafe {
        let bytes: [*const i8; R] = std::array::from_fn(|row| rows.bytes(first_row + row, first));
        // Of each row the first of its groups here.
        let places: [usize; R] =
            std::array::from_fn(|row| rows.place(first_row + row, first / GROUP));
        let reads_memory = K::Layout::IS_PANEL && first_row == 0;
        let share = groups.stride / VECTORS;
        for input in (0..num).step_by(K::Layout::INPUTS) {
            if reads_memory && input.is_multiple_of(GROUP) {
                let ahead = input / GROUP * groups.stride + feature / PANEL * share + AHEAD;
                for line in (ahead..ahead + F * share).step_by(LINE) {
                    I::prefetch(groups.quads.wrapping_add(line).cast());
                }
            }
            let mut sums = [[(I::no_sums(), I::no_few()); F]; R];
            for row in 0..R {
                let start = K::start::<I>(rows.rows.totals.add(places[row] + input / GROUP));
                for vector in 0..F {
                    sums[row][vector].0 = start;
                }
            }
            for load in 0..K::Layout::INPUTS / 4 {
                for vector in 0..F {
                    let from = groups.quads.wrapping_add(4 * (feature + PANEL * vector));
                    let quads = K::Layout::quads::<I>(from, groups.stride, input, load);
                    let weights = K::prepare::<I>(quads);
                    for row in 0..R {
                        let bytes = I::broadcast(bytes[row].add(input + 4 * load));
                        sums[row][vector] = K::dot::<I>(sums[row][vector], bytes, weights);
                    }
                }
                if (load + 1).is_multiple_of(K::Layout::FEW_LOADS) {
                    for row in 0..R {
                        for vector in 0..F {
                            let sum = K::flush::<I>(sums[row][vector]);
                            sums[row][vector] = (sum, I::no_few());
                        }
                    }
                }
            }
            for vector in 0..F {
                let numbers = input / K::Layout::INPUTS * PANEL_FEATURES + feature + PANEL * vector;
                let scales = I::load(groups.scales.wrapping_add(numbers));
                for row in 0..R {
                    let place = places[row] + input / GROUP;
                    let to = result.wrapping_add(row * PANEL_FEATURES + PANEL * vector);
                    let scale = I::splat(*rows.rows.scales.add(place));
                    let sum = I::mul(I::to_floats(sums[row][vector].0), scale);
                    let mut total = I::multiply_add(sum, scales, I::load(to));
                    if K::HAS_MINIMA {
                        let minima = I::load(groups.minima.wrapping_add(numbers));
                        let shift = match K::Layout::INPUTS {
                            GROUP => rows.rows.shifts.add(place),
                            _ => rows
                                .rows
                                .half_shifts
                                .add(2 * place + input % GROUP / K::Layout::INPUTS),
                        };
                        total = I::multiply_add(I::splat(*shift), minima, total);
                    }
                    I::store(total, to);
                }
            }
        }
    }
}
