//! One work item: a tile of queries against its keys, chunk by chunk.
//!
//! Scores are kept as powers of two (times log2 e).  A chunk has a separate result: its largest
//! score, the sum of its weights relative to that, and the values summed by weight.  Chunks are
//! then merged in order, which is the online softmax with one rescaling a chunk.
#![expect(unsafe_code, reason = "reads and writes through the caller's pointers, and kernels")]
#![expect(clippy::inline_always, reason = "must become part of a function with the instructions")]

use std::f32::consts::LOG2_E;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::Ordering;

use crate::attention::layout::head_of;
use crate::attention::panels::{
    Cached, Levels, Numbers, panels, panels_ahead, scale, segments, within,
};
use crate::attention::plan::{Item, Plan, TILE};
use crate::attention::shape::{CacheDType, Memory, Options, Rows, Shape, Tokens};
use crate::attention::softmax::{Bias, BiasKind, Cap, take_weights};
use crate::element::Element;
use crate::kernel::{self, tile_vectors};
use crate::level::Float8;
use crate::math::exp2;
use crate::number::{BFloat16, CHUNK, CHUNK_PANELS, DType, Float16, PANEL};
use crate::scratch::pieces;
use crate::vectors::{Instructions, Kernel, Vectors};

/// A checked call.
pub(crate) struct Call<'a> {
    pub(crate) shape: &'a Shape,
    pub(crate) memory: &'a Memory,
    pub(crate) rows: &'a Rows<'a>,
    pub(crate) options: &'a Options<'a>,
    pub(crate) plan: &'a Plan,
    /// Memory for the plan's partial results.
    pub(crate) partials: *mut f32,
    /// Whether AMX multiplies.
    pub(crate) has_amx: bool,
}

/// An item to compute.
///
/// # Safety
/// To run it, the call is checked, its plan made for it, `partials` can hold its results, new
/// tokens are written, and no other thread runs this item.
pub(crate) struct Attend<'a> {
    pub(crate) call: &'a Call<'a>,
    pub(crate) item: &'a Item,
    /// Next item of this thread, unless another takes it first: its keys are prefetched.
    pub(crate) upcoming: Option<&'a Item>,
    pub(crate) scratch: &'a mut Scratch,
}

impl Kernel for Attend<'_> {
    #[inline(always)]
    unsafe fn run<I: Instructions>(self) {
        let Self { call, item, upcoming, scratch } = self;
        let buffers = &scratch.buffers(call);
        let attend = |index: usize, part: Part| {
            // SAFETY: the caller's promise.
            unsafe { Chunk { call, item, upcoming, index, buffers, part }.attend::<I>() };
        };
        // SAFETY: the caller's promise; buffers have the sizes that their fields name.
        unsafe {
            load_queries(call, item, buffers.queries);
            let Some(split) = item.split.map(|index| &call.plan.splits[index]) else {
                if call.options.sinks.is_some() {
                    start_total(call, item, buffers.total);
                }
                for chunk in item.chunks.clone() {
                    // If no result precedes the first chunk, its result is the total so far.
                    let is_total = chunk == item.chunks.start && call.options.sinks.is_none();
                    let part = if is_total { buffers.total } else { buffers.part };
                    attend(chunk, part);
                    if !is_total {
                        merge::<I>(call, item, part, buffers.total);
                    }
                }
                finish::<I>(call, item, buffers.total);
                return;
            };
            let (rows, columns) = (item.queries.len(), call.columns());
            let part_of = |chunk: usize| {
                let offset = split.start + (chunk - split.chunks.start) * rows * (columns + 2);
                Part::at(call.partials.wrapping_add(offset), rows, columns)
            };
            for chunk in item.chunks.clone() {
                attend(chunk, part_of(chunk));
            }
            // The last item to finish sees what all others wrote.
            if split.pending.fetch_sub(1, Ordering::AcqRel) == 1 {
                start_total(call, item, buffers.total);
                for chunk in split.chunks.clone() {
                    merge::<I>(call, item, part_of(chunk), buffers.total);
                }
                finish::<I>(call, item, buffers.total);
            }
        }
    }
}

impl Call<'_> {
    /// Units of a key.
    pub(crate) fn depth(&self) -> usize {
        self.shape.key_size.div_ceil(self.shape.per_unit())
    }

    /// Columns of values, whole vectors.
    pub(crate) fn columns(&self) -> usize {
        self.shape.value_size.next_multiple_of(PANEL)
    }
}

/// A thread's memory between items; it only grows.
#[derive(Default)]
pub(crate) struct Scratch {
    units: Vec<u32>,
    numbers: Vec<f32>,
}

/// Buffers in the scratch memory, aligned to 64 bytes.
pub(super) struct Buffers {
    /// `[TILE][depth]`.
    pub(super) queries: *mut u32,
    /// `[TILE][CHUNK / PER_UNIT]`.
    pub(super) weights: *mut u32,
    /// Two rows of values with one half removed, `[2][columns]`, or two panels, `[2][8][columns]`.
    pub(super) halves: *mut u32,
    /// Panels of other layouts, each keys, then values.
    panels: *mut u32,
    /// `[TILE][CHUNK]`.
    pub(super) scores: *mut f32,
    /// The result of a chunk.
    part: Part,
    /// The result so far.
    total: Part,
}

/// Results of a tile: `[queries][columns]`, `[queries]`, `[queries]`.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub(super) values: *mut f32,
    maxima: *mut f32,
    sums: *mut f32,
}

impl Part {
    /// The results of `rows` queries, at `start`.
    fn at(start: *mut f32, rows: usize, columns: usize) -> Self {
        let maxima = start.wrapping_add(rows * columns);
        Self { values: start, maxima, sums: maxima.wrapping_add(rows) }
    }
}

impl Scratch {
    fn buffers(&mut self, call: &Call<'_>) -> Buffers {
        let (depth, columns) = (call.depth(), call.columns());
        let per_unit = call.shape.per_unit();
        let panels = if call.shape.has_panels() { 0 } else { CHUNK_PANELS };
        let lens = [
            TILE * depth,
            TILE * CHUNK / per_unit,
            if call.has_amx { PANEL * columns } else { 2 * columns },
            panels * PANEL * (depth + columns / per_unit),
        ];
        let [queries, weights, halves, panels] = pieces(&mut self.units, lens);
        let part = TILE * (columns + 2);
        let [scores, part, total] = pieces(&mut self.numbers, [TILE * CHUNK, part, part]);
        let [part, total] = [part, total].map(|start| Part::at(start, TILE, columns));
        Buffers { queries, weights, halves, panels, scores, part, total }
    }
}

/// Copies the tile's queries, each to whole units.
#[inline(always)]
unsafe fn load_queries(call: &Call<'_>, item: &Item, queries: *mut u32) {
    let (group, depth, key_size) = (call.shape.group(), call.depth(), call.shape.key_size);
    let first_token = call.rows.queries(item.row).start;
    let load = match (call.shape.cache_dtype.has_scales(), call.shape.dtype) {
        (false, DType::Float32) => load_query::<f32>,
        (false, DType::BFloat16) => load_query::<BFloat16>,
        (false, DType::Float16) => load_query::<Float16>,
        (true, DType::Float32) => load_query_as_float32::<f32>,
        (true, DType::BFloat16) => load_query_as_float32::<BFloat16>,
        (true, DType::Float16) => load_query_as_float32::<Float16>,
    };
    for (row, query) in item.queries.clone().enumerate() {
        let (token, head) = (first_token + query / group, item.kv_head * group + query % group);
        // SAFETY: token and head exist; the buffer has `depth` units a row.
        unsafe { load(&call.memory.query, (token, head), queries.add(row * depth), key_size) };
    }
}

/// Copies a query, padded to whole units.
///
/// # Safety
/// Token and head exist; `to` can hold the units.
unsafe fn load_query<E: Element>(
    tokens: &Tokens,
    (token, head): (usize, usize),
    to: *mut u32,
    key_size: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let to = to.cast::<E>();
        to.copy_from_nonoverlapping(head_of::<E>(tokens, token, head), key_size);
        for index in key_size..key_size.next_multiple_of(E::PER_UNIT) {
            to.add(index).write(E::ZERO);
        }
    }
}

/// Converts a query to units of float32.
///
/// # Safety
/// Token and head exist; `to` can hold the units.
unsafe fn load_query_as_float32<E: Element>(
    tokens: &Tokens,
    (token, head): (usize, usize),
    to: *mut u32,
    key_size: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let from = head_of::<E>(tokens, token, head);
        for index in 0..key_size {
            to.add(index).write(from.add(index).read().to_f32().to_bits());
        }
    }
}

/// Writes the largest score and the sum before any key: zero weight, or the sink's.
#[inline(always)]
unsafe fn start_total(call: &Call<'_>, item: &Item, total: Part) {
    let group = call.shape.group();
    for (row, query) in item.queries.clone().enumerate() {
        let head = item.kv_head * group + query % group;
        let (maximum, sum) =
            call.options.sinks.map_or((f32::MIN, 0.0), |sinks| (sinks[head] * LOG2_E, 1.0));
        // SAFETY: the buffer can hold the tile.
        unsafe {
            total.maxima.add(row).write(maximum);
            total.sums.add(row).write(sum);
            total.values.add(row * call.columns()).write_bytes(0, call.columns());
        }
    }
}

/// Adds a chunk's result to the total.
#[inline(always)]
unsafe fn merge<I: Vectors>(call: &Call<'_>, item: &Item, part: Part, total: Part) {
    let (columns, num_rows) = (call.columns(), item.queries.len());
    for first in (0..num_rows).step_by(PANEL) {
        let count = PANEL.min(num_rows - first);
        // SAFETY: both have the tile's rows.
        unsafe {
            let (keep, take) = shares::<I>(part.maxima.add(first), total.maxima.add(first), count);
            for (index, (keep, take)) in keep.into_iter().zip(take).take(count).enumerate() {
                let row = first + index;
                let sum = total.sums.add(row);
                sum.write(sum.read() * keep + *part.sums.add(row) * take);
                let (keep, take) = (I::splat(keep), I::splat(take));
                for column in (row * columns..(row + 1) * columns).step_by(PANEL) {
                    let to = total.values.add(column);
                    let added = I::mul(I::load(part.values.add(column)), take);
                    I::store(I::multiply_add(I::load(to), keep, added), to);
                }
            }
        }
    }
}

/// Factors of the old and of the new result of up to 16 rows, relative to the larger of their
/// maxima, which replaces the old one.
#[inline(always)]
unsafe fn shares<I: Vectors>(
    new: *const f32,
    old: *mut f32,
    count: usize,
) -> ([f32; PANEL], [f32; PANEL]) {
    let (mut keep, mut take) = ([0.0; PANEL], [0.0; PANEL]);
    for index in 0..count {
        // SAFETY: the caller has `count` numbers in either.
        unsafe {
            let (old, new) = (old.add(index), *new.add(index));
            let maximum = old.read().max(new);
            (keep[index], take[index]) = (old.read() - maximum, new - maximum);
            old.write(maximum);
        }
    }
    // SAFETY: the caller has the instructions; the arrays have 16 numbers.
    unsafe {
        for powers in [&mut keep, &mut take] {
            I::store(exp2::<I>(I::load(powers.as_ptr())), powers.as_mut_ptr());
        }
    }
    (keep, take)
}

/// Writes the outputs.
#[inline(always)]
unsafe fn finish<I: Vectors>(call: &Call<'_>, item: &Item, total: Part) {
    // SAFETY: the promise of `Attend`.
    unsafe {
        match call.shape.dtype {
            DType::Float32 => write_answers::<I, f32>(call, item, total),
            DType::BFloat16 => write_answers::<I, BFloat16>(call, item, total),
            DType::Float16 => write_answers::<I, Float16>(call, item, total),
        }
    }
}

/// Writes the outputs as numbers of `E`.
#[inline(always)]
unsafe fn write_answers<I: Vectors, E: Element>(call: &Call<'_>, item: &Item, total: Part) {
    let Shape { num_heads, value_size, .. } = *call.shape;
    let group = call.shape.group();
    let first_token = call.rows.queries(item.row).start;
    for (row, query) in item.queries.clone().enumerate() {
        let (token, head) = (first_token + query / group, item.kv_head * group + query % group);
        // SAFETY: token and head exist in the output; the buffer has whole vectors a row.
        unsafe {
            let from = total.values.add(row * call.columns());
            let sum = I::splat(*total.sums.add(row));
            let to = call.memory.output.cast::<E>().add((token * num_heads + head) * value_size);
            for column in (0..value_size).step_by(PANEL) {
                let answer = I::div(I::load(from.add(column)), sum);
                if column + PANEL <= value_size {
                    E::store::<I>(answer, to.add(column).cast());
                    continue;
                }
                I::store(answer, from.add(column));
                for column in column..value_size {
                    to.add(column).write(E::from_f32(*from.add(column)));
                }
            }
        }
    }
}

/// Distance from one position to another; positions are `i32` in the arguments.
fn distance(to: usize, from: usize) -> i32 {
    let int = |position: usize| i32::try_from(position).unwrap_or(i32::MAX);
    int(to) - int(from)
}

/// One chunk of keys of an item.
#[derive(Clone, Copy)]
pub(super) struct Chunk<'a> {
    pub(super) call: &'a Call<'a>,
    pub(super) item: &'a Item,
    upcoming: Option<&'a Item>,
    pub(super) index: usize,
    pub(super) buffers: &'a Buffers,
    /// Memory for the result.
    pub(super) part: Part,
}

impl Chunk<'_> {
    /// Computes the result.
    ///
    /// # Safety
    /// As [`Attend`]; the CPU has the instructions.
    unsafe fn attend<I: Instructions>(self) {
        let shape = self.call.shape;
        // SAFETY: the caller's promise.
        unsafe {
            match (shape.cache_dtype, shape.dtype) {
                (CacheDType::Int8, _) => self.attend_cached::<I, Levels<i8>>(),
                (CacheDType::Float8E4M3, _) => self.attend_cached::<I, Levels<Float8<3>>>(),
                (CacheDType::Float8E5M2, _) => self.attend_cached::<I, Levels<Float8<2>>>(),
                (CacheDType::Auto, DType::Float32) => self.attend_cached::<I, Numbers<f32>>(),
                (CacheDType::Auto, DType::BFloat16) => self.attend_cached::<I, Numbers<BFloat16>>(),
                (CacheDType::Auto, DType::Float16) => self.attend_cached::<I, Numbers<Float16>>(),
            }
        }
    }

    unsafe fn attend_cached<I: Instructions, C: Cached>(self) {
        // SAFETY: the promise of `Attend`.
        unsafe { I::call(AttendChunk::<C> { chunk: self, cached: PhantomData }) };
    }
}

/// A chunk whose keys and values are cached as `C`.
struct AttendChunk<'a, C> {
    chunk: Chunk<'a>,
    cached: PhantomData<C>,
}

impl<C: Cached> Kernel for AttendChunk<'_, C> {
    #[inline(always)]
    unsafe fn run<I: Instructions>(self) {
        let Chunk { call, item, upcoming, index: chunk, buffers, part } = self.chunk;
        let (depth, columns, num_rows) = (call.depth(), call.columns(), item.queries.len());
        let keys = within(&item.keys, chunk);
        let used = keys.start / PANEL..keys.end.div_ceil(PANEL);
        // SAFETY: the promise of `Attend`.
        unsafe {
            let panels = panels::<C>(call, item, chunk, &keys, buffers.panels);
            let cap = Cap::new(call.options);
            #[cfg(target_arch = "x86_64")]
            if call.has_amx {
                let panels = panels.map(<*const C::Lane>::cast);
                return self.chunk.attend_by_amx::<I>((&keys, &used), &panels, cap);
            }
            let mut panel = used.start;
            while panel < used.end {
                let count = tile_vectors::<I>(used.end - panel);
                let rows = kernel::Rows {
                    units: buffers.queries,
                    unit_stride: depth,
                    result: buffers.scores.add(panel * PANEL),
                    result_stride: CHUNK,
                    adds: false,
                };
                kernel::scores::<I, C::Number, C::Lane>(
                    rows,
                    num_rows,
                    &panels[panel..panel + count],
                    depth,
                    cap.factor,
                );
                panel += count;
            }
            let scales = panels.map(|panel| panel.wrapping_add((depth + columns) * PANEL).cast());
            if C::HAS_SCALES {
                scale::<I>(buffers.scores, num_rows, &scales, &used);
            }
            weigh::<I, C::Number>(call, item, chunk, (&used, cap), buffers, part);
            if C::HAS_SCALES {
                let of_values = scales.map(|scales| scales.wrapping_add(PANEL));
                scale::<I>(buffers.weights.cast(), num_rows, &of_values, &used);
            }

            let value_panels = panels.map(|panel| panel.wrapping_add(depth * PANEL));
            let ahead = panels_ahead::<C>(call, item, upcoming, chunk, &panels);
            let (segments, len) = segments::<C::Number, C::Lane>(
                &keys,
                (&value_panels, &ahead),
                columns,
                buffers.halves,
            );
            let rows = kernel::Rows {
                units: buffers.weights,
                unit_stride: CHUNK / C::Number::PER_UNIT,
                result: part.values,
                result_stride: columns,
                adds: false,
            };
            kernel::values::<I, C::Number, C::Lane>(rows, num_rows, &segments[..len], columns);
        }
    }
}

/// Turns scores into weights, each query's with a separate mask.
#[inline(always)]
pub(super) unsafe fn weigh<I: Vectors, E: Element>(
    call: &Call<'_>,
    item: &Item,
    chunk: usize,
    (used, cap): (&Range<usize>, Cap),
    buffers: &Buffers,
    part: Part,
) {
    let group = call.shape.group();
    let seq_len = call.rows.seq_len(item.row);
    let num_cached = seq_len - call.rows.queries(item.row).len();
    for (row, query) in item.queries.clone().enumerate() {
        let position = num_cached + query / group;
        let end = call.options.end_key(position, seq_len);
        let seen = within(&(call.options.first_key(position)..end), chunk);
        let head = item.kv_head * group + query % group;
        let (options, first) = (call.options, distance(chunk * CHUNK, position));
        let kind = match (options.alibi, options.position_bias) {
            (Some(slopes), _) => Some(BiasKind::Slope(slopes[head])),
            (None, Some(biases)) => {
                let num_listed = biases.len() / call.shape.num_heads;
                Some(BiasKind::Table(&biases[head * num_listed..(head + 1) * num_listed]))
            }
            (None, None) => None,
        };
        let bias = kind.map(|kind| Bias { kind, first });
        // SAFETY: the buffers have the tile's rows.
        unsafe {
            let scores = std::slice::from_raw_parts_mut(buffers.scores.add(row * CHUNK), CHUNK);
            let weights = buffers.weights.add(row * CHUNK / E::PER_UNIT);
            let (maximum, sum) = take_weights::<I, E>(scores, weights, used, &seen, (cap, bias));
            part.maxima.add(row).write(maximum);
            part.sums.add(row).write(sum);
        }
    }
}
