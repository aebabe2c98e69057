//! The register tile: whole sums of some rows with 16 features a vector.
#![expect(clippy::needless_range_loop, reason = "constant bounds over several arrays at once")]

use std::marker::PhantomData;
use std::mem::MaybeUninit;

use crate::bytes::format::{Format, GROUP};
use crate::bytes::layout::{
    Bytes, Fives, Layout, Nibbles, OnlyBytes, PairedFives, PairedNibbles, Place, Sixes,
    WideNibbles, Widening,
};
use crate::bytes::open::{Groups, OPENED, Opened};
use crate::bytes::rows::ByteRows;
use crate::bytes::{BytePanels, panel_at};
use crate::linear::PANEL_FEATURES;
use crate::number::PANEL;
use crate::vectors::{Instructions, Kernel, Vectors};

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
    /// Four signed bytes of each lane, and what is computed from them once for all rows.
    type Signed: Copy;
    /// Four bytes of a row in every lane.
    type Row: Copy;
    /// Rows of the largest tile.
    const DOT_ROWS: usize;
    /// Vectors of features of a tile: with two, a row's bytes are loaded half as often.
    const DOT_VECTORS: usize = 1;
    /// The same of whole rows, whose floats need no registers.
    const WHOLE_VECTORS: usize = Self::DOT_VECTORS;
    /// Loads of whole rows that are compiled without a loop.
    const WHOLE_LOADS: usize = GROUP / 4;
    /// Rows up to which taking weights of less than 8 bits from the panel for each tile costs less
    /// than opening them once.
    const CLOSED_ROWS: usize = Self::DOT_ROWS;
    /// Number that `signed` adds to a weight.
    const SIGNED_FROM: i32 = 0;

    /// Sums that start at a number.
    unsafe fn start(number: i32) -> Self::Sums;
    unsafe fn no_few() -> Self::Few;
    unsafe fn load_quads(from: *const u8) -> Self::Quads;
    /// Masks each byte after a shift down by `from_bit`, 0 to 7.
    unsafe fn load_bits(from: *const u8, from_bit: i32, mask: u8) -> Self::Quads;
    /// Combines bytes of the low four bits with bytes of the bits above.
    unsafe fn join(low: Self::Quads, high: Self::Quads) -> Self::Quads;
    /// Adds 16 to byte n of a lane where bit `4 * quad + n` of the lane's word is set.
    unsafe fn add_fifth_bits(low: Self::Quads, words: *const u8, quad: usize) -> Self::Quads;
    unsafe fn store_quads(quads: Self::Quads, to: *mut u8);
    /// The bytes of a table at places from 0 to 15.
    unsafe fn look_up(table: &[i8; 16], places: Self::Quads) -> Self::Quads;
    /// Converts bytes that have a sign.
    unsafe fn signed(quads: Self::Quads) -> Self::Signed;
    unsafe fn broadcast(row: *const i8) -> Self::Row;
    /// Adds products of weights that are signed.
    unsafe fn dot_signed(sums: Self::Sums, row: Self::Row, weights: Self::Signed) -> Self::Sums;
    /// Adds products of weights from 0 to `32767 / 254 / n`, with at most n calls per `flush`.
    unsafe fn dot_small(
        sums: (Self::Sums, Self::Few),
        row: Self::Row,
        weights: Self::Quads,
    ) -> (Self::Sums, Self::Few);
    /// Adds the products in `Few` to the sums.
    unsafe fn flush(sums: (Self::Sums, Self::Few)) -> Self::Sums;
    unsafe fn to_floats(sums: Self::Sums) -> Self::V;
}

/// How the weights of a group are multiplied.
trait Kind {
    type Layout: Layout;
    const HAS_MINIMA: bool;
    type Weights<I: Dots>: Copy;

    /// Number that is subtracted from each weight.
    fn zero<I: Dots>() -> i32;
    unsafe fn flush<I: Dots>(sums: (I::Sums, I::Few)) -> I::Sums;
    /// Prepares weights once for all rows.
    unsafe fn prepare<I: Dots>(quads: I::Quads) -> Self::Weights<I>;
    /// Adds the products of weights with the bytes of a row.
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
    fn zero<I: Dots>() -> i32 {
        I::SIGNED_FROM
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

/// Weights of 4 to 6 bits without a sign, from each of which `ZERO` is subtracted; where that is 0,
/// groups have minima.
struct Small<L, const ZERO: i32>(PhantomData<L>);

impl<L: Layout, const ZERO: i32> Kind for Small<L, ZERO> {
    type Layout = L;
    const HAS_MINIMA: bool = ZERO == 0;
    type Weights<I: Dots> = I::Quads;

    #[inline(always)]
    fn zero<I: Dots>() -> i32 {
        ZERO
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
pub(super) const VECTORS: usize = PANEL_FEATURES / PANEL;

/// Calls a tile of some vectors for groups of rows as equal as can be:
/// `$first` is the first row of each.
macro_rules! for_rows {
    ($num_rows:expr, $limit:expr, $first:ident, $tile:ident<$($kind:ty),+>,
        $vectors:expr, $($argument:expr),*) => {{
        let (mut left, mut $first) = ($num_rows, 0);
        let mut groups = left.div_ceil($limit);
        macro_rules! tile {
            ($rows:literal) => {
                match const { $vectors } {
                    1 => $tile::<$($kind),+, $rows, 1>($($argument),*),
                    2 => $tile::<$($kind),+, $rows, 2>($($argument),*),
                    _ => $tile::<$($kind),+, $rows, VECTORS>($($argument),*),
                }
            };
        }
        while groups > 0 {
            let size = left.div_ceil(groups);
            match size {
                1 => tile!(1),
                2 => tile!(2),
                3 if const { $limit >= 3 } => tile!(3),
                4 if const { $limit >= 4 } => tile!(4),
                5 if const { $limit >= 5 } => tile!(5),
                6 if const { $limit >= 6 } => tile!(6),
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
    pub(super) fn bytes(&self, row: usize, input: usize) -> *const i8 {
        self.rows.bytes.wrapping_add((self.first + row) * self.rows.num_inputs + input)
    }

    /// Index of a number of a group and the first row; those of the next rows follow.
    #[inline(always)]
    pub(super) fn place(&self, group: usize) -> usize {
        group * self.rows.num_rows + self.first
    }

    /// Sums of the bytes of the half or whole group that starts at an input, of the first row.
    #[inline(always)]
    fn totals(&self, input: usize, num_inputs: usize) -> *const i32 {
        let totals = if num_inputs < GROUP { self.rows.half_totals } else { self.rows.totals };
        totals.wrapping_add(self.place(input / num_inputs)).cast_const()
    }
}

/// Sums of some rows with a panel, `[rows][64]`: whole numbers in a group, then float32.
///
/// # Safety
/// The CPU has the instructions; panel and rows exist; `sums` can hold the result.
#[inline(always)]
pub(crate) unsafe fn sum_panel<I: Instructions>(
    weights: &BytePanels<'_>,
    in_features: usize,
    panel: usize,
    rows: Part<'_>,
    sums: *mut f32,
) {
    let (format, bytes) = panel_at(weights.sections, in_features, panel);
    let blocks = weights.values.as_ptr().wrapping_add(bytes.start);
    let is_signed = format.is_whole() || matches!(format, Format::Q8_0 | Format::Iq4Nl);
    let is_closed = is_signed || rows.num <= I::CLOSED_ROWS;
    let mut opened = MaybeUninit::<Opened>::uninit();
    // SAFETY: any bits are an `Opened`; what is read of it was filled.  The caller's promise.
    unsafe {
        let opened = &mut *opened.as_mut_ptr();
        for index in 0..rows.num * PANEL_FEATURES {
            sums.add(index).write(0.0);
        }
        let scales = weights.panel_scales(panel);
        let step = if scales.is_some() { in_features } else { OPENED };
        for first in (0..in_features).step_by(step) {
            let num = step.min(in_features - first);
            let from = blocks.wrapping_add(format.panel_bytes(first));
            let groups = if let Some(scales) = &scales {
                Groups::whole(from, scales)
            } else if is_closed {
                opened.open_numbers::<I>(format, from, num)
            } else {
                open::<I>(opened, format, from, num)
            };
            let inputs = (first, num);
            GroupSums { groups, inputs, rows, sums }.add_format::<I>(format, is_closed);
        }
    }
}

/// Opens numbers and weights of a format without signs.
#[inline(always)]
pub(super) unsafe fn open<I: Dots>(
    opened: &mut Opened,
    format: Format,
    from: *const u8,
    num: usize,
) -> Groups {
    // SAFETY: the promise of `sum_panel`.
    unsafe {
        match format {
            Format::Q4_0 | Format::Q4_1 => opened.open::<I, Nibbles>(format, from, num),
            Format::Q4_0_64 | Format::Q4_1_64 => opened.open::<I, WideNibbles>(format, from, num),
            Format::Q5_0 | Format::Q5_1 => opened.open::<I, Fives>(format, from, num),
            Format::Q4K => opened.open::<I, PairedNibbles>(format, from, num),
            Format::Q5K => opened.open::<I, PairedFives>(format, from, num),
            Format::Q6K => opened.open::<I, Sixes>(format, from, num),
            Format::I8Rows | Format::I8Turned | Format::Q8_0 | Format::Iq4Nl => {
                unreachable!("signed weights are never opened")
            }
        }
    }
}

/// Some groups, whose first input and number of inputs are `inputs`, with some rows.
#[derive(Clone, Copy)]
struct GroupSums<'a> {
    groups: Groups,
    inputs: (usize, usize),
    rows: Part<'a>,
    sums: *mut f32,
}

impl GroupSums<'_> {
    /// Adds the sums; closed weights are taken from the panel for each tile.
    #[inline(always)]
    unsafe fn add_format<I: Instructions>(self, format: Format, is_closed: bool) {
        // SAFETY: the promise of `sum_panel`.
        unsafe {
            match format {
                Format::I8Rows | Format::I8Turned => self.add::<I, Signed<OnlyBytes>>(),
                Format::Q8_0 => self.add::<I, Signed<Bytes>>(),
                Format::Iq4Nl => self.add::<I, Signed<Widening>>(),
                Format::Q4_0 => self.add_small::<I, Nibbles, 8>(is_closed),
                Format::Q4_1 => self.add_small::<I, Nibbles, 0>(is_closed),
                Format::Q4_0_64 => self.add_small::<I, WideNibbles, 8>(is_closed),
                Format::Q4_1_64 => self.add_small::<I, WideNibbles, 0>(is_closed),
                Format::Q5_0 => self.add_small::<I, Fives, 16>(is_closed),
                Format::Q5_1 => self.add_small::<I, Fives, 0>(is_closed),
                Format::Q4K => self.add_small::<I, PairedNibbles, 0>(is_closed),
                Format::Q5K => self.add_small::<I, PairedFives, 0>(is_closed),
                Format::Q6K => self.add_small::<I, Sixes, 32>(is_closed),
            }
        }
    }

    /// Adds the sums with weights that have no sign.
    #[inline(always)]
    unsafe fn add_small<I: Instructions, L: Layout, const ZERO: i32>(self, is_closed: bool) {
        // SAFETY: the promise of `sum_panel`.
        unsafe {
            if is_closed {
                self.add::<I, Small<L, ZERO>>();
            } else {
                self.add::<I, Small<L::Opened, ZERO>>();
            }
        }
    }

    #[inline(always)]
    unsafe fn add<I: Instructions, K: Kind>(self) {
        // SAFETY: the promise of `sum_panel`.
        unsafe { I::call(AddGroupSums::<K> { of: self, kind: PhantomData }) };
    }
}

/// Adds the sums of groups whose weights are multiplied as `K` defines.
struct AddGroupSums<'a, K> {
    of: GroupSums<'a>,
    kind: PhantomData<K>,
}

impl<K: Kind> Kernel for AddGroupSums<'_, K> {
    #[inline(always)]
    unsafe fn run<I: Instructions>(self) {
        let GroupSums { groups, inputs, rows, sums } = self.of;
        if const { K::Layout::IS_PANEL } && rows.num == 1 {
            // All features of a group at once: memory is read in its order.
            // SAFETY: the promise of `sum_panel`.
            return unsafe { groups_tile::<I, K, 1, VECTORS>(groups, 0, inputs, rows, 0, sums) };
        }
        let step = const { tile_vectors::<I, K>() * PANEL };
        for feature in (0..PANEL_FEATURES).step_by(step) {
            // SAFETY: the promise of `sum_panel`.
            unsafe {
                for_rows!(rows.num, I::DOT_ROWS, row, groups_tile<I, K>,
                    tile_vectors::<I, K>(), groups, feature, inputs, rows, row,
                    sums.wrapping_add(row * PANEL_FEATURES + feature));
            }
        }
    }
}

/// Vectors of features of a tile: 1, 2, or all of a panel.
const fn tile_vectors<I: Dots, K: Kind>() -> usize {
    if K::Layout::INPUTS.is_none() { I::WHOLE_VECTORS } else { I::DOT_VECTORS }
}

/// Loads that are compiled without a loop.
const fn num_loads<I: Dots, K: Kind>() -> usize {
    if K::Layout::INPUTS.is_none() { I::WHOLE_LOADS } else { K::Layout::LOADS }
}

/// Adds the sums of `R` rows with `F` vectors of features.
#[inline(always)]
unsafe fn groups_tile<I: Dots, K: Kind, const R: usize, const F: usize>(
    groups: Groups,
    feature: usize,
    (first, num): (usize, usize),
    rows: Part<'_>,
    first_row: usize,
    to: *mut f32,
) {
    let at = |row: usize, vector: usize| to.wrapping_add(row * PANEL_FEATURES + PANEL * vector);
    let reads_memory = K::Layout::IS_PANEL && first_row == 0;
    // SAFETY: the promise of `sum_panel`.
    unsafe {
        let bytes: [*const i8; R] = std::array::from_fn(|row| rows.bytes(first_row + row, first));
        let mut results = [[I::splat(0.0); F]; R];
        for row in 0..R {
            for vector in 0..F {
                results[row][vector] = I::load(at(row, vector));
            }
        }
        let size = K::Layout::INPUTS.unwrap_or(num);
        for input in (0..num).step_by(size) {
            let totals = rows.totals(first + input, size).add(first_row);
            let place = rows.place((first + input) / size.max(GROUP)) + first_row;
            let weights = GroupWeights { groups, feature, input, size, reads_memory };
            let sums = whole_sums::<I, K, R, F>(weights, bytes, totals);
            for vector in 0..F {
                let numbers = input / size * PANEL_FEATURES + feature + PANEL * vector;
                let scales = I::load(groups.scales.wrapping_add(numbers));
                for row in 0..R {
                    let scale = I::splat(*rows.rows.scales.add(place + row));
                    let sum = I::mul(I::to_floats(sums[row][vector]), scale);
                    let mut result = I::multiply_add(sum, scales, results[row][vector]);
                    if K::HAS_MINIMA {
                        let minima = I::load(groups.minima.wrapping_add(numbers));
                        let shift = I::splat(*rows.rows.shifts.add(place + row));
                        result = I::multiply_add(shift, minima, result);
                    }
                    results[row][vector] = result;
                }
            }
        }
        for row in 0..R {
            for vector in 0..F {
                I::store(results[row][vector], at(row, vector));
            }
        }
    }
}

/// Weights of a group with some features.
#[derive(Clone, Copy)]
struct GroupWeights {
    groups: Groups,
    feature: usize,
    /// First input of the group, of those that are open, and number of its inputs.
    input: usize,
    size: usize,
    /// Whether they are read from memory, not from a cache.
    reads_memory: bool,
}

impl GroupWeights {
    /// Prefetches what is ahead of 32 inputs of `F` vectors of features.
    #[inline(always)]
    unsafe fn prefetch<I: Dots, const F: usize>(self, input: usize) {
        let share = self.groups.stride / VECTORS;
        let ahead = input / GROUP * self.groups.stride + self.feature / PANEL * share + AHEAD;
        for line in (ahead..ahead + F * share).step_by(LINE) {
            // SAFETY: any address may be prefetched.
            unsafe { I::prefetch(self.groups.quads.wrapping_add(line).cast()) };
        }
    }
}

/// Exact sums of `R` rows with `F` vectors of features, of a group.
#[inline(always)]
unsafe fn whole_sums<I: Dots, K: Kind, const R: usize, const F: usize>(
    weights: GroupWeights,
    bytes: [*const i8; R],
    totals: *const i32,
) -> [[I::Sums; F]; R] {
    // SAFETY: the promise of `sum_panel`.
    unsafe {
        let mut sums = [[I::start(0); F]; R];
        for row in 0..R {
            sums[row] = [I::start(*totals.add(row) * -K::zero::<I>()); F];
        }
        if const { matches!(K::Layout::INPUTS, Some(inputs) if inputs <= GROUP) } {
            // Without a loop, so that the compiler sees constants.
            add_loads::<I, K, R, F>(weights, 0, bytes, &mut sums);
        } else {
            for first in (0..weights.size).step_by(4 * num_loads::<I, K>()) {
                add_loads::<I, K, R, F>(weights, first, bytes, &mut sums);
            }
        }
        sums
    }
}

/// Adds the products of the loads from an input of the group on.
#[inline(always)]
unsafe fn add_loads<I: Dots, K: Kind, const R: usize, const F: usize>(
    weights: GroupWeights,
    first: usize,
    bytes: [*const i8; R],
    sums: &mut [[I::Sums; F]; R],
) {
    const { assert!(K::Layout::LOADS.is_multiple_of(K::Layout::FEW_LOADS)) };
    let GroupWeights { groups, feature, input, reads_memory, .. } = weights;
    // SAFETY: the promise of `sum_panel`.
    unsafe {
        if reads_memory && (input + first).is_multiple_of(GROUP) {
            weights.prefetch::<I, F>(input + first);
        }
        let quads = groups.quads.wrapping_add(4 * feature);
        let mut few = [[I::no_few(); F]; R];
        for load in first / 4..first / 4 + num_loads::<I, K>() {
            for vector in 0..F {
                let from = quads.wrapping_add(4 * PANEL * vector);
                let at = Place { from, stride: groups.stride, input, load };
                let weights = K::prepare::<I>(K::Layout::quads::<I>(at));
                for row in 0..R {
                    let both = (sums[row][vector], few[row][vector]);
                    let bytes = I::broadcast(bytes[row].add(input + 4 * load));
                    (sums[row][vector], few[row][vector]) = K::dot::<I>(both, bytes, weights);
                }
            }
            if (load + 1).is_multiple_of(K::Layout::FEW_LOADS) {
                for row in 0..R {
                    for vector in 0..F {
                        sums[row][vector] = K::flush::<I>((sums[row][vector], few[row][vector]));
                        few[row][vector] = I::no_few();
                    }
                }
            }
        }
    }
}
