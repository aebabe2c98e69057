//! Panels of a chunk of keys and values, in the form that kernels take.
#![expect(unsafe_code, reason = "reads through the caller's pointers")]
#![expect(clippy::inline_always, reason = "must become part of a function with the instructions")]

use std::marker::PhantomData;
use std::ops::Range;

use crate::attention::layout::{gather_token, panel_starts};
use crate::attention::plan::Item;
use crate::attention::shape::count;
use crate::attention::tile::Call;
use crate::element::{Element, Lane};
use crate::kernel::Segment;
use crate::level::Level;
use crate::number::{BFloat16, CHUNK, CHUNK_PANELS, PANEL};
use crate::vectors::Vectors;

/// How a pool stores keys and values.
pub(crate) trait Cached {
    /// Type of queries and weights.
    type Number: Element;
    /// Type of the units of its panels.
    type Lane: Lane;
    /// Whether its panels have scales, and queries another dtype.
    const HAS_SCALES: bool;
}

/// A pool in the dtype of queries.
pub(crate) struct Numbers<E>(PhantomData<E>);

impl<E: Element> Cached for Numbers<E> {
    type Number = E;
    type Lane = u32;
    const HAS_SCALES: bool = false;
}

/// A pool of bytes.
pub(crate) struct Levels<L>(PhantomData<L>);

impl<L: Level> Cached for Levels<L> {
    type Number = f32;
    type Lane = L;
    const HAS_SCALES: bool = true;
}

/// The subrange of `range` that lies in a chunk, counted from the chunk's first key.
pub(crate) fn within(range: &Range<usize>, chunk: usize) -> Range<usize> {
    let start = chunk * CHUNK;
    let clamp = |key: usize| key.clamp(start, start + CHUNK) - start;
    clamp(range.start)..clamp(range.end)
}

/// The panels of a chunk that hold any of `keys`; gathered if blocks have another layout.
#[inline(always)]
pub(crate) unsafe fn panels<C: Cached>(
    call: &Call<'_>,
    item: &Item,
    chunk: usize,
    keys: &Range<usize>,
    made: *mut u32,
) -> [*const C::Lane; CHUNK_PANELS] {
    let (shape, pool) = (call.shape, call.memory.pool.cast_const());
    let blocks = call.rows.blocks(item.row);
    let mut panels = [std::ptr::null(); CHUNK_PANELS];
    let used = keys.start / PANEL..keys.end.div_ceil(PANEL);
    if shape.has_panels() {
        let first = chunk * CHUNK_PANELS;
        let starts =
            panel_starts(shape, blocks, item.kv_head, first + used.start..first + used.end);
        for (panel, start) in panels[used].iter_mut().zip(starts) {
            // SAFETY: the panel has a visible key, whose block is checked.
            *panel = unsafe { pool.add(start) }.cast();
        }
        return panels;
    }
    let slot_of = |key: usize| {
        let position = chunk * CHUNK + key;
        let block = count(blocks[position / shape.block_size]);
        block * shape.block_size + position % shape.block_size
    };
    for panel in used {
        let (depth, columns) = (call.depth(), call.columns());
        let len = PANEL * (depth + columns / C::Number::PER_UNIT);
        // SAFETY: the buffer can hold the chunk; each key is visible, its block is checked.
        unsafe {
            let start = made.add(panel * len);
            start.write_bytes(0, len);
            let values = start.add(depth * PANEL);
            for key in keys.start.max(panel * PANEL)..keys.end.min((panel + 1) * PANEL) {
                gather_token::<C::Number>(
                    shape,
                    pool.cast(),
                    (slot_of(key), item.kv_head),
                    (start.cast(), values.cast()),
                    (key % PANEL, columns),
                );
            }
            panels[panel] = start.cast_const().cast();
        }
    }
    panels
}

/// The rows of values of visible keys.  In a pair with one visible token, the other may hold NaN,
/// which no weight removes: such a row is copied without it.
#[inline(always)]
pub(crate) unsafe fn segments<E: Element, L: Lane>(
    keys: &Range<usize>,
    (panels, ahead): (&[*const L; CHUNK_PANELS], &[*const L; CHUNK_PANELS]),
    columns: usize,
    halves: *mut u32,
) -> ([Segment<L>; CHUNK_PANELS + 2], usize) {
    let none = Segment { values: std::ptr::null(), weight: 0, len: 0, ahead: std::ptr::null() };
    let mut segments = [none; CHUNK_PANELS + 2];
    let mut count = 0;
    let per_panel = PANEL / E::PER_UNIT;
    let mut push = |values: *const L, weight: usize, len: usize| {
        segments[count] = Segment { values, weight, len, ahead: ahead[weight / per_panel] };
        count += 1;
    };
    let row_of = |unit: usize| panels[unit / per_panel].wrapping_add(unit % per_panel * columns);
    let half = |unit: usize, mask: u32, to: *mut u32| {
        for column in 0..columns {
            // SAFETY: the row has a visible token and `columns` units, as has the copy.
            unsafe { to.add(column).write(row_of(unit).cast::<u32>().add(column).read() & mask) };
        }
    };
    let whole = keys.start.div_ceil(E::PER_UNIT)..keys.end / E::PER_UNIT;
    if whole.start * E::PER_UNIT > keys.start {
        half(whole.start - 1, 0xffff_0000, halves);
        push(halves.cast_const().cast(), whole.start - 1, 1);
    }
    let mut unit = whole.start;
    while unit < whole.end {
        let end = whole.end.min((unit / per_panel + 1) * per_panel);
        push(row_of(unit), unit, end - unit);
        unit = end;
    }
    if whole.end * E::PER_UNIT < keys.end {
        let last = halves.wrapping_add(columns);
        half(whole.end, 0x0000_ffff, last);
        push(last.cast_const().cast(), whole.end, 1);
    }
    (segments, count)
}

/// Panels to prefetch beside a chunk's: those of the next chunk, or the chunk's panels again if
/// there is none, since a prefetch of an invalid address takes longest.
#[inline(always)]
pub(crate) unsafe fn panels_ahead<C: Cached>(
    call: &Call<'_>,
    item: &Item,
    upcoming: Option<&Item>,
    chunk: usize,
    panels: &[*const C::Lane; CHUNK_PANELS],
) -> [*const C::Lane; CHUNK_PANELS] {
    let next = if chunk + 1 < item.chunks.end {
        Some((item, chunk + 1))
    } else {
        upcoming.map(|item| (item, item.chunks.start))
    };
    let Some((item, chunk)) = next.filter(|_| call.shape.has_panels()) else { return *panels };
    let keys = within(&item.keys, chunk);
    // SAFETY: panels of this shape are not gathered, so the null buffer is not used.
    let mut ahead = unsafe { self::panels::<C>(call, item, chunk, &keys, std::ptr::null_mut()) };
    for (ahead, &panel) in ahead.iter_mut().zip(panels) {
        if ahead.is_null() {
            *ahead = panel;
        }
    }
    ahead
}

/// Multiplies the numbers of each row, `[rows][CHUNK]`, by the scales of their keys.
#[inline(always)]
pub(crate) unsafe fn scale<I: Vectors>(
    numbers: *mut f32,
    num_rows: usize,
    scales: &[*const BFloat16; CHUNK_PANELS],
    used: &Range<usize>,
) {
    for panel in used.clone() {
        // SAFETY: the panel has 16 scales, and the rows have its keys.
        unsafe {
            let factors = I::load_bfloat16(scales[panel]);
            for row in 0..num_rows {
                let number = numbers.add(row * CHUNK + panel * PANEL);
                I::store(I::mul(I::load(number), factors), number);
            }
        }
    }
}
