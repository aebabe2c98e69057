//! The register tile: whole sums of some rows with 16 features a vector.
#![expect(clippy::needless_range_loop, reason = "constant bounds over several arrays at once")]

use crate::bytes::format::{Format, GROUP, QUADS};
use crate::bytes::open::{Groups, OPENED, Opened};
use crate::bytes::rows::ByteRows;
use crate::bytes::{BytePanels, panel_at};
use crate::linear::PANEL_FEATURES;
use crate::number::PANEL;
use crate::storage::WIDENING;
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
    /// The four bits of each byte that begin at bit `from_bit`, 0 or 4.
    unsafe fn load_nibbles(from: *const u8, from_bit: i32) -> Self::Quads;
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

/// How the weights of a group are met; by default they have no sign.
trait Kind {
    /// Inputs that share a scale of the weights.
    const INPUTS: usize;
    /// Loads of a group.
    const LOADS: usize;
    /// Loads between two calls of `flush`.
    const FEW_LOADS: usize;
    const HAS_MINIMA: bool = true;
    /// Whether weights lie in the panel itself: the first rows read it from memory.
    const IS_PANEL: bool;
    type Weights<I: Dots>: Copy;

    /// Where the weights lie of the group that begins with an input.
    #[inline(always)]
    fn place(groups: Groups, input: usize) -> *const u8 {
        groups.quads.wrapping_add(input / GROUP * groups.stride + input % GROUP / 4 * QUADS)
    }

    /// Where the sums of a row begin, whose bytes of the group add up to what `total` points at.
    #[inline(always)]
    unsafe fn start<I: Dots>(_total: *const i32) -> I::Sums {
        // SAFETY: the caller's promise.
        unsafe { I::no_sums() }
    }

    #[inline(always)]
    unsafe fn flush<I: Dots>(sums: (I::Sums, I::Few)) -> I::Sums {
        // SAFETY: the caller's promise.
        unsafe { I::flush(sums) }
    }

    /// Weights of the group of an input.
    unsafe fn load<I: Dots>(from: *const u8, input: usize) -> Self::Weights<I>;
    /// Adds their products with the bytes of a row.
    unsafe fn dot<I: Dots>(
        sums: (I::Sums, I::Few),
        row: *const i8,
        weights: Self::Weights<I>,
    ) -> (I::Sums, I::Few);
}

/// Weights that are signed bytes of the panel.
struct Signed;

impl Kind for Signed {
    const INPUTS: usize = GROUP;
    const LOADS: usize = 8;
    const FEW_LOADS: usize = 8;
    const HAS_MINIMA: bool = false;
    const IS_PANEL: bool = true;
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
    unsafe fn load<I: Dots>(from: *const u8, _: usize) -> I::Signed {
        // SAFETY: the caller's promise.
        unsafe { I::signed(I::load_quads(from)) }
    }

    #[inline(always)]
    unsafe fn dot<I: Dots>(
        (sums, few): (I::Sums, I::Few),
        row: *const i8,
        weights: I::Signed,
    ) -> (I::Sums, I::Few) {
        // SAFETY: the caller's promise.
        (unsafe { I::dot_signed(sums, I::broadcast(row), weights) }, few)
    }
}

/// Opened weights of 4 bits: eight loads; of 5 bits: four; of 6 bits: two, of groups of 16.
struct Small<const FEW_LOADS: usize, const INPUTS: usize>;

impl<const FEW_LOADS: usize, const INPUTS: usize> Kind for Small<FEW_LOADS, INPUTS> {
    const INPUTS: usize = INPUTS;
    const LOADS: usize = INPUTS / 4;
    const FEW_LOADS: usize = FEW_LOADS;
    const IS_PANEL: bool = false;
    type Weights<I: Dots> = I::Quads;

    #[inline(always)]
    unsafe fn load<I: Dots>(from: *const u8, _: usize) -> I::Quads {
        // SAFETY: the caller's promise.
        unsafe { I::load_quads(from) }
    }

    #[inline(always)]
    unsafe fn dot<I: Dots>(
        sums: (I::Sums, I::Few),
        row: *const i8,
        weights: I::Quads,
    ) -> (I::Sums, I::Few) {
        // SAFETY: the caller's promise.
        unsafe { I::dot_small(sums, I::broadcast(row), weights) }
    }
}

/// Weights of 4 bits in the panel: low halves are a group's first 16 inputs, high ones the others.
struct Nibbles;

impl Kind for Nibbles {
    const INPUTS: usize = GROUP;
    const LOADS: usize = 4;
    const FEW_LOADS: usize = 4;
    const IS_PANEL: bool = true;
    type Weights<I: Dots> = [I::Quads; 2];

    #[inline(always)]
    unsafe fn load<I: Dots>(from: *const u8, _: usize) -> [I::Quads; 2] {
        // SAFETY: the caller's promise.
        unsafe { [I::load_nibbles(from, 0), I::load_nibbles(from, 4)] }
    }

    #[inline(always)]
    unsafe fn dot<I: Dots>(
        sums: (I::Sums, I::Few),
        row: *const i8,
        [low, high]: [I::Quads; 2],
    ) -> (I::Sums, I::Few) {
        // SAFETY: the caller's promise; the group has these bytes.
        unsafe {
            let sums = I::dot_small(sums, I::broadcast(row), low);
            I::dot_small(sums, I::broadcast(row.add(GROUP / 2)), high)
        }
    }
}

/// Weights of 4 bits in the panel, as those of `Nibbles`, that stand for signed bytes.
struct Widening;

impl Kind for Widening {
    const INPUTS: usize = GROUP;
    const LOADS: usize = 4;
    const FEW_LOADS: usize = 4;
    const HAS_MINIMA: bool = false;
    const IS_PANEL: bool = true;
    type Weights<I: Dots> = [I::Signed; 2];

    #[inline(always)]
    unsafe fn start<I: Dots>(total: *const i32) -> I::Sums {
        // SAFETY: the caller's promise.
        unsafe { Signed::start::<I>(total) }
    }

    #[inline(always)]
    unsafe fn flush<I: Dots>((sums, _): (I::Sums, I::Few)) -> I::Sums {
        sums
    }

    #[inline(always)]
    unsafe fn load<I: Dots>(from: *const u8, input: usize) -> [I::Signed; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let [low, high] = Nibbles::load::<I>(from, input);
            [I::signed(I::look_up(&WIDENING, low)), I::signed(I::look_up(&WIDENING, high))]
        }
    }

    #[inline(always)]
    unsafe fn dot<I: Dots>(
        sums: (I::Sums, I::Few),
        row: *const i8,
        [low, high]: [I::Signed; 2],
    ) -> (I::Sums, I::Few) {
        // SAFETY: the caller's promise; the group has these bytes.
        unsafe {
            let sums = Signed::dot::<I>(sums, row, low);
            Signed::dot::<I>(sums, row.add(GROUP / 2), high)
        }
    }
}

/// Weights of 4 bits in the panel: low halves are a group, high ones the next.
struct PairedNibbles;

impl Kind for PairedNibbles {
    const INPUTS: usize = GROUP;
    const LOADS: usize = 8;
    const FEW_LOADS: usize = 8;
    const IS_PANEL: bool = true;
    type Weights<I: Dots> = I::Quads;

    #[inline(always)]
    fn place(groups: Groups, input: usize) -> *const u8 {
        groups.quads.wrapping_add(input / (2 * GROUP) * Self::LOADS * QUADS)
    }

    #[inline(always)]
    unsafe fn load<I: Dots>(from: *const u8, input: usize) -> I::Quads {
        let from_bit = if (input / GROUP).is_multiple_of(2) { 0 } else { 4 };
        // SAFETY: the caller's promise.
        unsafe { I::load_nibbles(from, from_bit) }
    }

    #[inline(always)]
    unsafe fn dot<I: Dots>(
        sums: (I::Sums, I::Few),
        row: *const i8,
        weights: I::Quads,
    ) -> (I::Sums, I::Few) {
        // SAFETY: the caller's promise.
        unsafe { I::dot_small(sums, I::broadcast(row), weights) }
    }
}

/// How far ahead a panel is read, in bytes.
const AHEAD: usize = 8 * 1024;
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
    let panel = weights.values.as_ptr().wrapping_add(bytes.start);
    let is_closed = format.is_multiplied_closed(rows.num);
    let mut opened = std::mem::MaybeUninit::<Opened>::uninit();
    // SAFETY: any bits are an `Opened`; what is read of it was filled.  The caller's promise.
    unsafe {
        for index in 0..rows.num * PANEL_FEATURES {
            sums.add(index).write(0.0);
        }
        let opened = &mut *opened.as_mut_ptr();
        for first in (0..in_features).step_by(OPENED) {
            let num = OPENED.min(in_features - first);
            let from = panel.wrapping_add(format.panel_bytes(first));
            let groups = opened.fill::<I>(format, from, num, is_closed);
            let inputs = (first, num);
            match format {
                Format::Q8_0 => add_groups::<I, Signed>(groups, inputs, rows, sums),
                Format::Iq4Nl => add_groups::<I, Widening>(groups, inputs, rows, sums),
                Format::Q4_0 | Format::Q4_1 if is_closed => {
                    add_groups::<I, Nibbles>(groups, inputs, rows, sums);
                }
                Format::Q4K if is_closed => {
                    add_groups::<I, PairedNibbles>(groups, inputs, rows, sums);
                }
                Format::Q4_0 | Format::Q4_1 | Format::Q4K => {
                    add_groups::<I, Small<8, 32>>(groups, inputs, rows, sums);
                }
                Format::Q5_0 | Format::Q5_1 | Format::Q5K => {
                    add_groups::<I, Small<4, 32>>(groups, inputs, rows, sums);
                }
                Format::Q6K => add_groups::<I, Small<2, 16>>(groups, inputs, rows, sums),
            }
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
    if K::IS_PANEL && rows.num == 1 {
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
        let reads_memory = K::IS_PANEL && first_row == 0;
        let share = groups.stride / VECTORS;
        for input in (0..num).step_by(K::INPUTS) {
            if reads_memory {
                let ahead = input / GROUP * groups.stride + feature / PANEL * share + AHEAD;
                for line in (ahead..ahead + F * share).step_by(LINE) {
                    I::prefetch(groups.quads.wrapping_add(line).cast());
                }
            }
            let mut from = K::place(groups, input).wrapping_add(4 * feature);
            let mut sums = [[(I::no_sums(), I::no_few()); F]; R];
            for row in 0..R {
                let start = K::start::<I>(rows.rows.totals.add(places[row] + input / GROUP));
                for vector in 0..F {
                    sums[row][vector].0 = start;
                }
            }
            for load in 0..K::LOADS {
                for vector in 0..F {
                    let weights = K::load::<I>(from.wrapping_add(4 * PANEL * vector), input);
                    for row in 0..R {
                        let bytes = bytes[row].add(input + 4 * load);
                        sums[row][vector] = K::dot::<I>(sums[row][vector], bytes, weights);
                    }
                }
                if (load + 1).is_multiple_of(K::FEW_LOADS) {
                    for row in 0..R {
                        for vector in 0..F {
                            let sum = K::flush::<I>(sums[row][vector]);
                            sums[row][vector] = (sum, I::no_few());
                        }
                    }
                }
                from = from.wrapping_add(QUADS);
            }
            for vector in 0..F {
                let numbers = input / K::INPUTS * PANEL_FEATURES + feature + PANEL * vector;
                let scales = I::load(groups.scales.wrapping_add(numbers));
                for row in 0..R {
                    let place = places[row] + input / GROUP;
                    let to = result.wrapping_add(row * PANEL_FEATURES + PANEL * vector);
                    let scale = I::splat(*rows.rows.scales.add(place));
                    let sum = I::mul(I::to_floats(sums[row][vector].0), scale);
                    let mut total = I::multiply_add(sum, scales, I::load(to));
                    if K::HAS_MINIMA {
                        let minima = I::load(groups.minima.wrapping_add(numbers));
                        let shift = match K::INPUTS {
                            GROUP => rows.rows.shifts.add(place),
                            _ => rows.rows.half_shifts.add(2 * place + input % GROUP / K::INPUTS),
                        };
                        total = I::multiply_add(I::splat(*shift), minima, total);
                    }
                    I::store(total, to);
                }
            }
        }
    }
}
