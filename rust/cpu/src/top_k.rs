//! The largest of each row of logits, found in one pass over memory.
//!
//! # Costs
//!
//! Reading the logits, until about 64 are requested: a stretch of a row is looked at number by
//! number only where its largest is among the best so far, which gets rare along a row.
#![expect(unsafe_code, reason = "logits are the address of a tensor")]
#![expect(clippy::inline_always, reason = "must become part of a function with the instructions")]

use crate::error::{Error, Result};
use crate::logits::Logits;
use crate::math::across;
use crate::number::PANEL;
use crate::team::Execution;
use crate::vectors::{Kernel, Vectors};

/// Numbers that are compared together.
const STRETCH: usize = 8 * PANEL;

/// The largest logits of each row, largest first, of equals the smaller id first.
///
/// A row that holds NaN has NaN for its first value; its ids and its other values are undefined.
///
/// # Arguments
/// `ids` and `values` are `[rows, num]`.  In `masks`, `[rows, ceil(vocab_size / 32)]`, bit `t % 32`
/// of entry `t / 32` allows token `t`; missing values are minus infinity.
///
/// # Errors
/// Sizes that do not fit each other, an odd address, an instruction set that the CPU lacks.
///
/// # Safety
/// The logits of these rows exist, and are not written during the call.
pub unsafe fn top_k(
    logits: Logits<'_>,
    num: usize,
    masks: Option<&[i32]>,
    (ids, values): (&mut [i64], &mut [f32]),
    execution: &Execution<'_>,
) -> Result<()> {
    execution.check()?;
    let vocab_size = logits.vocab_size;
    if num == 0 || num > vocab_size {
        return Err(Error(format!("num must be 1 to vocab_size, {vocab_size}; got {num}")));
    }
    if !ids.len().is_multiple_of(num) || ids.len() != values.len() {
        let (ids, values) = (ids.len(), values.len());
        return Err(Error(format!(
            "ids and values must have {num} places a row; got {ids} and {values}"
        )));
    }
    let num_rows = ids.len() / num;
    logits.check(num_rows)?;
    let needed = num_rows * vocab_size.div_ceil(32);
    if let Some(masks) = masks.filter(|masks| masks.len() != needed) {
        let given = masks.len();
        return Err(Error(format!("masks must have {needed} entries; got {given}")));
    }
    let (ids, values) = (ids.as_mut_ptr(), values.as_mut_ptr());
    let rows = Rows { logits, masks, ids, values, num };
    execution.for_each(num_rows, &|row| {
        // SAFETY: the row exists, and is taken once.
        unsafe { execution.instructions.run(rows.get(row)) };
    });
    Ok(())
}

/// Pointers that threads share: each writes distinct rows.
struct Rows<'a> {
    logits: Logits<'a>,
    masks: Option<&'a [i32]>,
    ids: *mut i64,
    values: *mut f32,
    num: usize,
}

// SAFETY: see above.
unsafe impl Sync for Rows<'_> {}

impl Rows<'_> {
    unsafe fn get(&self, row: usize) -> Row<'_> {
        let (first, num) = (row * self.num, self.num);
        let num_words = self.logits.vocab_size.div_ceil(32);
        // SAFETY: the caller has this row, and no other thread its places.
        unsafe {
            Row {
                numbers: self.logits.row(row),
                mask: self.masks.map(|masks| &masks[row * num_words..][..num_words]),
                best: Best {
                    ids: std::slice::from_raw_parts_mut(self.ids.add(first), num),
                    values: std::slice::from_raw_parts_mut(self.values.add(first), num),
                    len: 0,
                },
            }
        }
    }
}

/// The best numbers of a row so far, in order; `len` of them.
struct Best<'a> {
    ids: &'a mut [i64],
    values: &'a mut [f32],
    len: usize,
}

impl Best<'_> {
    /// Whether a number, the newest so far, is among the best.
    #[inline(always)]
    fn wants(&self, value: f32) -> bool {
        self.len < self.values.len() || value > self.values[self.len - 1]
    }

    /// Inserts a number that [`wants`](Self::wants) accepts, after its equals.
    fn insert(&mut self, id: usize, value: f32) {
        let place = self.values[..self.len].partition_point(|&better| better >= value);
        self.len = self.values.len().min(self.len + 1);
        self.values[place..self.len].rotate_right(1);
        self.ids[place..self.len].rotate_right(1);
        (self.values[place], self.ids[place]) = (value, i64::try_from(id).unwrap_or(i64::MAX));
    }
}

struct Row<'a> {
    numbers: &'a [f32],
    mask: Option<&'a [i32]>,
    best: Best<'a>,
}

impl Kernel for Row<'_> {
    #[inline(always)]
    unsafe fn run<I: Vectors>(self) {
        let Self { numbers, mask, mut best } = self;
        let mut has_nan = false;
        for (index, stretch) in numbers.chunks(STRETCH).enumerate() {
            let words = mask.map(|mask| &mask[index * STRETCH / 32..]);
            let words = words.map(|words| &words[..words.len().min(STRETCH / 32)]);
            if words.is_some_and(|words| words.iter().all(|word| *word == 0)) {
                continue;
            }
            let peak = if let Ok(whole) = stretch.try_into() {
                // SAFETY: the caller has the instructions.
                unsafe { peak_of::<I>(whole) }
            } else {
                f32::NAN
            };
            if peak.is_nan() || best.wants(peak) {
                for (offset, &value) in stretch.iter().enumerate() {
                    if words.is_some_and(|words| words[offset / 32] >> (offset % 32) & 1 == 0) {
                        continue;
                    }
                    has_nan |= value.is_nan();
                    if best.wants(value) {
                        best.insert(index * STRETCH + offset, value);
                    }
                }
            }
        }
        best.values[best.len..].fill(f32::NEG_INFINITY);
        best.ids[best.len..].fill(0);
        if has_nan {
            best.values[0] = f32::NAN;
        }
    }
}

/// The largest of some numbers, at least `f32::MIN`; NaN if one of them is NaN or infinite.
#[inline(always)]
unsafe fn peak_of<I: Vectors>(numbers: &[f32; STRETCH]) -> f32 {
    // SAFETY: the caller has the instructions; every vector lies in the array.
    unsafe {
        let (mut peaks, mut zeros) = (I::splat(f32::MIN), I::splat(0.0));
        for first in (0..STRETCH).step_by(PANEL) {
            // NaN stays, minus infinity does not.
            let bounded = I::max(I::splat(f32::MIN), I::load(numbers.as_ptr().add(first)));
            peaks = I::max(bounded, peaks);
            // NaN and infinity leave a NaN.
            zeros = I::multiply_add(bounded, I::splat(0.0), zeros);
        }
        let peak = across::<I>(peaks, f32::max);
        if across::<I>(zeros, |a, b| a + b) == 0.0 { peak } else { f32::NAN }
    }
}
