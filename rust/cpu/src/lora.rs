//! Adapters of linear layers: for some rows a product of low rank is added to that with the
//! weights.
//!
//! # Layout
//!
//! `a` is `[K][R rounded up to 16]`, so that the R sums of a row lie side by side in registers.
//! `b` is cut like the panels of the weights, into *strips* of 32 features: `[ranks of the
//! strip][32]`. A layer may be several that were laid side by side, each with a separate adapter: a
//! strip has only the ranks of those that it has features of.
//!
//! # Invariants
//!
//! 1. Both products are made in float32, each sum in one order: the output added to a row is the
//!    same in any batch, to the last bit.
//! 2. Each adapter is computed with its own rank.
//!
//! # Costs
//!
//! One more thread barrier per layer, and `a` and `b` are read once a call; nothing where no
//! row has an adapter.
#![expect(unsafe_code, reason = "rows are addresses of tensors")]
#![expect(clippy::inline_always, reason = "must become part of a function with the instructions")]

use std::cell::Cell;
use std::mem::MaybeUninit;
use std::ops::Range;

use crate::element::Element;
use crate::error::{Error, Result};
use crate::kernel::{self, Segment};
use crate::linear::{BLOCK_UNITS, MOST_ROWS, Matrix, PANEL_FEATURES};
use crate::number::{BFloat16, DType, Float16, PANEL};
use crate::scratch::pieces;
use crate::team::Execution;
use crate::vectors::{Instructions, Kernel, Vectors};

/// Features of a strip: half a panel, of which a gated layer has two kinds.
pub(crate) const STRIP: usize = 32;
/// Rows whose hidden numbers are made at once, two of the largest register tiles.
const ITEM_ROWS: usize = 12;

thread_local! {
    static HIDDEN: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
    static GATHERED: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// Slice of an adapter: its product for adjacent features of a layer.
#[derive(Clone, Copy, Debug)]
pub struct Slice<'a> {
    /// First feature in the layer; gates come before ups.
    pub first_feature: usize,
    /// Rank, r.
    pub rank: usize,
    /// `[r, K]`.
    pub a: &'a [f32],
    /// `[features, r]`.
    pub b: &'a [f32],
}

/// A cache line, and what a vector loads.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
struct Line([f32; PANEL]);

const ZEROS: Line = Line([0.0; PANEL]);

/// The ranks of a strip, and where they are in `b`.
#[derive(Clone, Debug)]
struct Strip {
    ranks: Range<usize>,
    first_line: usize,
}

/// Packed weights of one adapter of a layer.
#[derive(Debug)]
pub struct LowRank {
    in_features: usize,
    out_features: usize,
    /// R rounded up, in lines.
    width: usize,
    a: Vec<Line>,
    b: Vec<Line>,
    strips: Vec<Strip>,
}

impl LowRank {
    /// Packs the slices of a layer, which are in the order of their features.
    ///
    /// # Errors
    /// Slices that do not fit the layer, or each other.
    pub fn pack(
        slices: &[Slice<'_>],
        (in_features, out_features): (usize, usize),
        is_gated: bool,
    ) -> Result<Self> {
        check_slices(slices, in_features, out_features)?;
        let rank: usize = slices.iter().map(|slice| slice.rank).sum();
        let width = rank.div_ceil(PANEL);
        let mut packed = Self {
            in_features,
            out_features,
            width,
            a: vec![ZEROS; in_features * width],
            b: Vec::new(),
            strips: Vec::new(),
        };
        let mut first_rank = 0;
        for slice in slices {
            packed.place_a(slice, first_rank);
            first_rank += slice.rank;
        }
        for strip in 0..out_features.div_ceil(PANEL_FEATURES) * 2 {
            packed.place_strip(slices, features_of(strip, out_features, is_gated));
        }
        Ok(packed)
    }

    fn place_a(&mut self, slice: &Slice<'_>, first_rank: usize) {
        for (rank, row) in slice.a.chunks_exact(self.in_features).enumerate() {
            let column = first_rank + rank;
            let lines = self.a[column / PANEL..].iter_mut().step_by(self.width);
            for (line, number) in lines.zip(row) {
                line.0[column % PANEL] = *number;
            }
        }
    }

    /// Appends a strip of these features.
    fn place_strip(&mut self, slices: &[Slice<'_>], features: Range<usize>) {
        let mut ranks = 0..0;
        let mut next_rank = 0;
        let first_line = self.b.len();
        for slice in slices {
            let own = next_rank..next_rank + slice.rank;
            next_rank = own.end;
            let first = slice.first_feature.max(features.start);
            let last = (slice.first_feature + slice.b.len() / slice.rank).min(features.end);
            if first >= last {
                continue;
            }
            ranks = if ranks.is_empty() { own.clone() } else { ranks.start..own.end };
            // Slices between two others have features between theirs: no rank is left out.
            self.b.resize(first_line + ranks.len() * STRIP / PANEL, ZEROS);
            for feature in first..last {
                let lane = feature - features.start;
                let row = &slice.b[(feature - slice.first_feature) * slice.rank..][..slice.rank];
                for (rank, number) in own.clone().zip(row) {
                    let line = first_line + (rank - ranks.start) * (STRIP / PANEL) + lane / PANEL;
                    self.b[line].0[lane % PANEL] = *number;
                }
            }
        }
        self.strips.push(Strip { ranks, first_line });
    }
}

/// The features of a strip, as slices count them.
fn features_of(strip: usize, out_features: usize, is_gated: bool) -> Range<usize> {
    let first =
        if is_gated { strip / 2 * STRIP + strip % 2 * (out_features / 2) } else { strip * STRIP };
    first..(first + STRIP).min(out_features)
}

fn check_slices(slices: &[Slice<'_>], in_features: usize, out_features: usize) -> Result<()> {
    let mut next_feature = 0;
    for slice in slices {
        let Slice { first_feature, rank, a, b } = *slice;
        if rank == 0 || a.len() != rank * in_features || !b.len().is_multiple_of(rank) {
            return Err(Error(format!(
                "an adapter of rank r must have r * {in_features} and features * r numbers, and a \
                 rank above 0; got rank {rank}, {} and {} numbers",
                a.len(),
                b.len()
            )));
        }
        let end = first_feature.saturating_add(b.len() / rank);
        if first_feature < next_feature || end > out_features {
            return Err(Error(format!(
                "slices of an adapter must be ascending and within {out_features} features; got \
                 {first_feature} to {end} after {next_feature}"
            )));
        }
        next_feature = end;
    }
    Ok(())
}

/// The rows that have one adapter.
#[derive(Clone, Copy, Debug)]
pub struct Group<'a> {
    /// Weights of the adapter.
    pub low_rank: &'a LowRank,
    /// Row numbers, ascending.
    pub rows: &'a [i32],
}

/// The adapters of a product.
#[derive(Clone, Copy, Debug, Default)]
pub struct Adapters<'a> {
    /// Groups of rows; no row is in two of them.
    pub groups: &'a [Group<'a>],
    /// Row number, in the groups, of the first row of the product.
    pub first_row: usize,
}

impl Group<'_> {
    /// Indices in `rows` of the rows from `first_row` on.
    #[inline(always)]
    fn within(&self, first_row: usize, num_rows: usize) -> Range<usize> {
        let place = |end: usize| {
            self.rows.partition_point(|&row| usize::try_from(row).is_ok_and(|row| row < end))
        };
        place(first_row)..place(first_row + num_rows)
    }

    fn check(&self, in_features: usize, out_features: usize) -> Result<()> {
        let LowRank { in_features: own_in, out_features: own_out, .. } = *self.low_rank;
        if (own_in, own_out) != (in_features, out_features) {
            return Err(Error(format!(
                "an adapter of {own_in} to {own_out} features must not change a layer of \
                 {in_features} to {out_features}"
            )));
        }
        let is_ascending = self.rows.is_sorted_by(|row, next| row < next);
        if self.rows.first().is_some_and(|row| *row < 0) || !is_ascending {
            return Err(Error("the rows of an adapter must be ascending, from 0 on".into()));
        }
        Ok(())
    }
}

/// Rows of a product that have one adapter, and where their hidden numbers are.
struct Adapted<'a> {
    group: Group<'a>,
    /// `[rows][width]`.
    hidden: *mut Line,
}

/// Adapter outputs that a product adds to its sums.
pub(crate) struct Additions<'a> {
    adapted: Vec<Adapted<'a>>,
    /// Row number, in the groups, of the first row of the product.
    first_row: usize,
    memory: Vec<Line>,
}

// SAFETY: each row of the hidden numbers is written by one item, before any is read.
unsafe impl Sync for Additions<'_> {}

impl Drop for Additions<'_> {
    fn drop(&mut self) {
        if !self.memory.is_empty() {
            HIDDEN.set(std::mem::take(&mut self.memory));
        }
    }
}

impl<'a> Additions<'a> {
    /// Multiplies rows with the `a` of their adapters.
    ///
    /// # Errors
    /// Adapters of other features, rows in another order.
    ///
    /// # Safety
    /// `input` has `num_rows` rows of `in_features` numbers, which are not written during the call.
    pub(crate) unsafe fn make(
        adapters: Adapters<'a>,
        (in_features, out_features): (usize, usize),
        num_rows: usize,
        (input, dtype): (Matrix, DType),
        execution: &Execution<'_>,
    ) -> Result<Self> {
        let first_row = adapters.first_row;
        let mut groups = Vec::new();
        for group in adapters.groups {
            group.check(in_features, out_features)?;
            let rows = &group.rows[group.within(first_row, num_rows)];
            if !rows.is_empty() {
                groups.push(Group { rows, ..*group });
            }
        }
        let mut made = Self { adapted: Vec::new(), first_row, memory: Vec::new() };
        if groups.is_empty() {
            return Ok(made);
        }
        let num_lines = |group: &Group<'_>| group.rows.len() * group.low_rank.width;
        made.memory = HIDDEN.take();
        let [mut next] = pieces(&mut made.memory, [groups.iter().map(num_lines).sum()]);
        for group in groups {
            made.adapted.push(Adapted { group, hidden: next });
            next = next.wrapping_add(num_lines(&group));
        }
        // SAFETY: the caller's promise.
        unsafe { made.shrink((input, dtype), execution) };
        Ok(made)
    }

    unsafe fn shrink(&self, (input, dtype): (Matrix, DType), execution: &Execution<'_>) {
        let mut items: Vec<(&Adapted<'_>, Range<usize>)> = Vec::new();
        for adapted in &self.adapted {
            let num_rows = adapted.group.rows.len();
            let starts = (0..num_rows).step_by(ITEM_ROWS);
            items.extend(starts.map(|start| (adapted, start..(start + ITEM_ROWS).min(num_rows))));
        }
        let shared = Shared { items, first_row: self.first_row, input, dtype };
        execution.for_each(shared.items.len(), &|item| {
            // SAFETY: the caller's promise; each item is done once.
            unsafe { execution.instructions.run(Shrink { shared: &shared, item }) };
        });
    }

    /// Whether no row has an adapter.
    pub(crate) fn is_empty(&self) -> bool {
        self.adapted.is_empty()
    }

    /// Adds to the sums `[num_rows][64]` of a panel, whose rows the product counts from
    /// `first_row`.
    ///
    /// # Safety
    /// The CPU has the instructions of `I`; panel and sums exist, of at most `MOST_ROWS` rows.
    #[inline(always)]
    pub(crate) unsafe fn add<I: Instructions>(
        &self,
        panel: usize,
        first_row: usize,
        num_rows: usize,
        sums: *mut f32,
    ) {
        let first_row = self.first_row + first_row;
        for adapted in &self.adapted {
            let places = adapted.group.within(first_row, num_rows);
            if places.is_empty() {
                continue;
            }
            for half in 0..2 {
                let strip = &adapted.group.low_rank.strips[2 * panel + half];
                if !strip.ranks.is_empty() {
                    let sums = sums.wrapping_add(half * STRIP);
                    // SAFETY: the caller's promise; the rows lie within the sums.
                    unsafe { adapted.expand::<I>(strip, places.clone(), first_row, sums) };
                }
            }
        }
    }
}

/// Adapter outputs for the rows of an item.
#[repr(align(64))]
struct Added([MaybeUninit<f32>; MOST_ROWS * STRIP]);

impl Adapted<'_> {
    /// Adds a strip to the sums of some of the rows, `[..][64]` from `first_row` on.
    #[inline(always)]
    unsafe fn expand<I: Instructions>(
        &self,
        strip: &Strip,
        places: Range<usize>,
        first_row: usize,
        sums: *mut f32,
    ) {
        let Group { low_rank, rows } = self.group;
        let mut added = Added([MaybeUninit::uninit(); MOST_ROWS * STRIP]);
        let added = added.0.as_mut_ptr().cast::<f32>();
        let unit_stride = low_rank.width * PANEL;
        let units = self.hidden.wrapping_add(places.start * low_rank.width).cast::<u32>();
        let values = low_rank.b.as_ptr().wrapping_add(strip.first_line).cast::<u32>();
        let segment = Segment { values, weight: 0, len: strip.ranks.len(), ahead: values };
        let tile = kernel::Rows {
            units: units.wrapping_add(strip.ranks.start),
            unit_stride,
            result: added,
            result_stride: STRIP,
            adds: false,
        };
        // SAFETY: the hidden numbers of these places were made, with all ranks.
        unsafe { kernel::values::<I, f32, u32>(tile, places.len(), &[segment], STRIP) };
        for (index, &row) in rows[places].iter().enumerate() {
            let row = usize::try_from(row).unwrap_or(0) - first_row;
            let from = added.wrapping_add(index * STRIP);
            let to = sums.wrapping_add(row * PANEL_FEATURES);
            for first in (0..STRIP).step_by(PANEL) {
                // SAFETY: the row lies within the sums, and half a panel is left of it.
                unsafe {
                    let to = to.add(first);
                    I::store(I::add(I::load(to), I::load(from.add(first))), to);
                }
            }
        }
    }
}

/// Inputs that all items of a shrink read.
struct Shared<'a> {
    items: Vec<(&'a Adapted<'a>, Range<usize>)>,
    first_row: usize,
    input: Matrix,
    dtype: DType,
}

// SAFETY: the pointers are shared for reading, and each item writes separate hidden numbers.
unsafe impl Sync for Shared<'_> {}

/// Some rows with one adapter.
struct Shrink<'a> {
    shared: &'a Shared<'a>,
    item: usize,
}

impl Kernel for Shrink<'_> {
    #[inline(always)]
    unsafe fn run<I: Instructions>(self) {
        let mut memory = GATHERED.take();
        let (adapted, places) = &self.shared.items[self.item];
        let [rows] = pieces(&mut memory, [places.len() * adapted.group.low_rank.in_features]);
        // SAFETY: the caller's promise; the buffer can hold the rows.
        unsafe {
            match self.shared.dtype {
                DType::Float32 => self.gather::<I, f32>(rows),
                DType::BFloat16 => self.gather::<I, BFloat16>(rows),
                DType::Float16 => self.gather::<I, Float16>(rows),
            }
            self.multiply::<I>(rows);
        }
        GATHERED.set(memory);
    }
}

impl Shrink<'_> {
    /// Writes the rows as float32, side by side.
    #[inline(always)]
    unsafe fn gather<I: Vectors, E: Element>(&self, to: *mut f32) {
        let Shared { first_row, input, .. } = *self.shared;
        let (adapted, places) = &self.shared.items[self.item];
        let depth = adapted.group.low_rank.in_features;
        let whole = depth - depth % PANEL;
        for (index, &row) in adapted.group.rows[places.clone()].iter().enumerate() {
            let row = usize::try_from(row).unwrap_or(0) - first_row;
            let from = input.pointer.cast::<E>().wrapping_add(row * input.stride);
            let to = to.wrapping_add(index * depth);
            // SAFETY: the row has `depth` numbers, and the buffer can hold them.
            unsafe {
                for at in (0..whole).step_by(PANEL) {
                    I::store(E::load::<I>(from.add(at)), to.add(at));
                }
                for at in whole..depth {
                    to.add(at).write(from.add(at).read().to_f32());
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn multiply<I: Instructions>(&self, rows: *const f32) {
        let (adapted, places) = &self.shared.items[self.item];
        let LowRank { in_features: depth, width, a, .. } = adapted.group.low_rank;
        let columns = width * PANEL;
        let result = adapted.hidden.wrapping_add(places.start * width).cast::<f32>();
        for start in (0..*depth).step_by(BLOCK_UNITS) {
            let len = BLOCK_UNITS.min(depth - start);
            let values = a.as_ptr().wrapping_add(start * width).cast::<u32>();
            let ahead = values.wrapping_add(len * columns);
            let segment = Segment { values, weight: start, len, ahead };
            let tile = kernel::Rows {
                units: rows.cast(),
                unit_stride: *depth,
                result,
                result_stride: columns,
                adds: start > 0,
            };
            // SAFETY: rows and `a` have `depth` units, and `result` can hold the sums.
            unsafe { kernel::values::<I, f32, u32>(tile, places.len(), &[segment], columns) };
        }
    }
}
