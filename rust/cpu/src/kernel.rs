//! The two register tiles: scores of queries with keys, sums of values by weight; the second
//! is also the product of rows with a panel of a linear layer.
//!
//! Both iterate over the units of their operands and multiply one broadcast unit of a row with
//! whole vectors; the sums stay in registers.  Every sum is made in the order of its units,
//! whatever the tile's shape, so that a row's numbers do not depend on the rows beside it.
#![expect(unsafe_code, reason = "pointers that walk panels, without bounds checks between loads")]
#![expect(clippy::inline_always, reason = "must become part of a function with the instructions")]
#![expect(clippy::needless_range_loop, reason = "constant bounds over several arrays at once")]

use std::marker::PhantomData;

use crate::element::{Factor, Half, Lane};
use crate::number::PANEL;
use crate::vectors::{Instructions, Kernel, Vectors};

/// Rows of one operand and of the result.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    /// Units to broadcast, a row after the other.
    pub(crate) units: *const u32,
    /// Units from a row to the next.
    pub(crate) unit_stride: usize,
    /// The results, 16 times the number of vectors a row.
    pub(crate) result: *mut f32,
    /// Results from a row to the next.
    pub(crate) result_stride: usize,
    /// Whether sums are added to the existing results.
    pub(crate) adds: bool,
}

impl Rows {
    /// These rows without the first ones.
    #[inline(always)]
    pub(crate) unsafe fn skip(self, rows: usize) -> Self {
        // SAFETY: the caller has more rows than that.
        unsafe {
            Self {
                units: self.units.add(rows * self.unit_stride),
                result: self.result.add(rows * self.result_stride),
                ..self
            }
        }
    }
}

/// Consecutive rows of values in one panel.
#[derive(Clone, Copy)]
pub(crate) struct Segment<L> {
    /// The first lane of the first row.
    pub(crate) values: *const L,
    /// The first row's place among a row's weights.
    pub(crate) weight: usize,
    /// Rows.
    pub(crate) len: usize,
    /// Panels to prefetch, as many as the rows take.
    pub(crate) ahead: *const L,
}

/// Largest number of rows for which, as when decoding, reading takes longer than computing.
const PREFETCH_ROWS: usize = 4;
/// Bytes of a cache line.
const LINE: usize = 64;

/// The most vectors of a tile that are no more than `left`.
#[inline(always)]
pub(crate) fn tile_vectors<I: Vectors>(left: usize) -> usize {
    match left.min(I::MAX_VECTORS) {
        4.. => 4,
        2 | 3 => 2,
        _ => 1,
    }
}

/// Calls a tile of the right size for each group of rows, groups as equal as can be.
macro_rules! for_groups {
    (
        $rows:ident, $num_rows:ident, $kernel:ident<$($kind:ident),+>, $vectors:ident,
        $($argument:expr),*
    ) => {{
        let (mut rows, mut left) = ($rows, $num_rows);
        let mut groups = left.div_ceil(I::MAX_ROWS);
        macro_rules! tile {
            ($size:literal) => {
                $kernel::<$($kind),+, $size, $vectors>(rows, $($argument),*)
            };
        }
        while groups > 0 {
            let size = left.div_ceil(groups);
            match size {
                1 => tile!(1),
                2 => tile!(2),
                3 if const { I::MAX_ROWS >= 3 } => tile!(3),
                4 if const { I::MAX_ROWS >= 4 } => tile!(4),
                5 if const { I::MAX_ROWS >= 5 } => tile!(5),
                6 if const { I::MAX_ROWS >= 6 } => tile!(6),
                _ => unreachable!("a group has no more rows than the largest tile"),
            }
            (left, groups) = (left - size, groups - 1);
            if groups > 0 {
                rows = rows.skip(size);
            }
        }
    }};
}

/// Scores of all rows with the keys of some panels, times `factor`.
///
/// # Safety
/// The CPU has the instructions; rows have `depth` units, panels `depth * 16` lanes, results 16
/// numbers a panel; there are 1, 2 or 4 panels, as [`tile_vectors`] returns.
#[inline(always)]
pub(crate) unsafe fn scores<I: Instructions, E: Factor, L: Lane>(
    rows: Rows,
    num_rows: usize,
    panels: &[*const L],
    depth: usize,
    factor: f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match *panels {
            [a, b, c, d] if const { I::MAX_VECTORS >= 4 } => {
                I::call(Scores::<E, L, 4>::new(rows, num_rows, [a, b, c, d], depth, factor));
            }
            [a, b] if const { I::MAX_VECTORS >= 2 } => {
                I::call(Scores::<E, L, 2>::new(rows, num_rows, [a, b], depth, factor));
            }
            [a] => I::call(Scores::<E, L, 1>::new(rows, num_rows, [a], depth, factor)),
            _ => unreachable!("a tile has 1, 2 or 4 vectors"),
        }
    }
}

/// Scores with the keys of `N` panels.
struct Scores<E, L, const N: usize> {
    rows: Rows,
    num_rows: usize,
    panels: [*const L; N],
    depth: usize,
    factor: f32,
    element: PhantomData<E>,
}

impl<E: Factor, L: Lane, const N: usize> Scores<E, L, N> {
    fn new(rows: Rows, num_rows: usize, panels: [*const L; N], depth: usize, factor: f32) -> Self {
        Self { rows, num_rows, panels, depth, factor, element: PhantomData }
    }
}

impl<E: Factor, L: Lane, const N: usize> Kernel for Scores<E, L, N> {
    #[inline(always)]
    unsafe fn run<I: Instructions>(self) {
        let Self { rows, num_rows, panels, depth, factor, .. } = self;
        // SAFETY: the promise of `scores`.
        unsafe { for_groups!(rows, num_rows, scores_tile<I, E, L>, N, panels, depth, factor) };
    }
}

#[inline(always)]
unsafe fn scores_tile<I: Vectors, E: Factor, L: Lane, const R: usize, const N: usize>(
    rows: Rows,
    panels: [*const L; N],
    depth: usize,
    factor: f32,
) {
    // SAFETY: the promise of `scores`.
    unsafe {
        let mut sums = [[I::splat(0.0); N]; R];
        let mut starts = [rows.units; R];
        for row in 1..R {
            starts[row] = starts[row - 1].add(rows.unit_stride);
        }
        for unit in 0..depth {
            let mut keys = [I::splat(0.0); N];
            for vector in 0..N {
                let lanes = panels[vector].wrapping_add(unit * PANEL);
                keys[vector] = L::load::<I>(lanes);
                if R <= PREFETCH_ROWS && (unit * PANEL * size_of::<L>()).is_multiple_of(LINE) {
                    // Prefetch the values of the same tokens.
                    I::prefetch(lanes.wrapping_add(depth * PANEL).cast());
                }
            }
            for row in 0..R {
                for vector in 0..N {
                    sums[row][vector] = E::accumulate::<I>(
                        sums[row][vector],
                        starts[row].add(unit * E::UNITS),
                        keys[vector],
                    );
                }
            }
        }
        let factor = I::splat(factor);
        let mut result = rows.result;
        for row in 0..R {
            for vector in 0..N {
                I::store(I::mul(sums[row][vector], factor), result.add(vector * PANEL));
            }
            result = result.wrapping_add(rows.result_stride);
        }
    }
}

/// Sums of values by weight, for all rows and columns.
///
/// # Safety
/// The CPU has the instructions; rows have the weights that the segments name; values and results
/// have `columns` columns, whole vectors.
#[inline(always)]
pub(crate) unsafe fn values<I: Instructions, E: Factor, L: Lane>(
    rows: Rows,
    num_rows: usize,
    segments: &[Segment<L>],
    columns: usize,
) {
    let mut first = 0;
    while first < columns {
        let num_vectors = tile_vectors::<I>((columns - first) / PANEL);
        let rows = Rows { result: rows.result.wrapping_add(first), ..rows };
        let columns = (first, columns);
        // SAFETY: the caller's promise.
        unsafe {
            match num_vectors {
                4 if const { I::MAX_VECTORS >= 4 } => {
                    I::call(Values::<E, L, 4>::new(rows, num_rows, segments, columns));
                }
                2 if const { I::MAX_VECTORS >= 2 } => {
                    I::call(Values::<E, L, 2>::new(rows, num_rows, segments, columns));
                }
                _ => I::call(Values::<E, L, 1>::new(rows, num_rows, segments, columns)),
            }
        }
        first += num_vectors * PANEL;
    }
}

/// Sums for `N` vectors of columns, from the first of all columns on.
struct Values<'a, E, L, const N: usize> {
    rows: Rows,
    num_rows: usize,
    segments: &'a [Segment<L>],
    columns: (usize, usize),
    element: PhantomData<E>,
}

impl<'a, E: Factor, L: Lane, const N: usize> Values<'a, E, L, N> {
    fn new(
        rows: Rows,
        num_rows: usize,
        segments: &'a [Segment<L>],
        columns: (usize, usize),
    ) -> Self {
        Self { rows, num_rows, segments, columns, element: PhantomData }
    }
}

impl<E: Factor, L: Lane, const N: usize> Kernel for Values<'_, E, L, N> {
    #[inline(always)]
    unsafe fn run<I: Instructions>(self) {
        let Self { rows, num_rows, segments, columns: (first, columns), .. } = self;
        // SAFETY: the promise of `values`.
        unsafe { for_groups!(rows, num_rows, values_tile<I, E, L>, N, segments, columns, first) };
    }
}

#[inline(always)]
unsafe fn values_tile<I: Vectors, E: Factor, L: Lane, const R: usize, const N: usize>(
    rows: Rows,
    segments: &[Segment<L>],
    columns: usize,
    first: usize,
) {
    // SAFETY: the promise of `values`.
    unsafe {
        let mut sums = [[I::splat(0.0); N]; R];
        let mut starts = [rows.units; R];
        for row in 1..R {
            starts[row] = starts[row - 1].add(rows.unit_stride);
        }
        for segment in segments {
            let mut from = segment.values.add(first);
            let mut ahead = segment.ahead.wrapping_add(first);
            for weight in segment.weight..segment.weight + segment.len {
                let mut numbers = [I::splat(0.0); N];
                for vector in 0..N {
                    let lane = vector * PANEL;
                    numbers[vector] = L::load::<I>(from.add(lane));
                    if (lane * size_of::<L>()).is_multiple_of(LINE) {
                        I::prefetch(ahead.wrapping_add(lane).cast());
                    }
                }
                for row in 0..R {
                    for vector in 0..N {
                        sums[row][vector] = E::accumulate::<I>(
                            sums[row][vector],
                            starts[row].add(weight * E::UNITS),
                            numbers[vector],
                        );
                    }
                }
                from = from.wrapping_add(columns);
                ahead = ahead.wrapping_add(columns);
            }
        }
        let mut result = rows.result;
        for row in 0..R {
            for vector in 0..N {
                let to = result.add(vector * PANEL);
                let sum = sums[row][vector];
                I::store(if rows.adds { I::add(I::load(to), sum) } else { sum }, to);
            }
            result = result.wrapping_add(rows.result_stride);
        }
    }
}

/// Writes rows of pairs of halves as twice as many rows of float32: the firsts of a row of pairs,
/// then its seconds.
///
/// # Safety
/// The CPU has the instructions; there are `len` rows of `columns` pairs, a multiple of 16, and
/// memory for twice as many numbers.
#[inline(always)]
pub(crate) unsafe fn unpack<I: Vectors, H: Half>(
    pairs: *const u32,
    len: usize,
    columns: usize,
    to: *mut f32,
) {
    for row in 0..len {
        for column in (0..columns).step_by(PANEL) {
            // SAFETY: the caller's promise.
            unsafe {
                let pairs = I::load(pairs.add(row * columns + column).cast());
                let to = to.add(2 * row * columns + column);
                let (first, second) = H::widen::<I>(pairs);
                I::store(first, to);
                I::store(second, to.add(columns));
            }
        }
    }
}
