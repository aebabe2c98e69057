//! Log-probability and rank of one token a row.
//!
//! # Costs
//!
//! Two reads of the logits, of which the second is from the cache.
#![expect(unsafe_code, reason = "logits are the address of a tensor")]
#![expect(clippy::inline_always, reason = "must become part of a function with the instructions")]

use std::f32::consts::LOG2_E;

use crate::error::{Error, Result};
use crate::logits::Logits;
use crate::math::{across, exp2};
use crate::number::PANEL;
use crate::team::Execution;
use crate::vectors::{Kernel, Vectors};

/// Numbers whose sum is made in float32.
const STRETCH: usize = 8 * PANEL;

/// The number of larger logits than one token's, and the logarithm of the sum of all exponentials,
/// in each row.  A log-probability is a logit minus this logarithm.
///
/// # Errors
/// Sizes that do not fit each other, a token beyond the vocabulary, an odd address, an instruction
/// set that the CPU lacks.
///
/// # Safety
/// The logits of these rows exist, and are not written during the call.
pub unsafe fn logprobs(
    logits: Logits<'_>,
    targets: &[usize],
    (sums, ranks): (&mut [f32], &mut [i32]),
    execution: &Execution<'_>,
) -> Result<()> {
    execution.check()?;
    let num_rows = targets.len();
    let lens = [sums.len(), ranks.len()];
    if lens != [num_rows; 2] {
        return Err(Error(format!(
            "sums and ranks must have {num_rows} entries, as targets; got {lens:?}"
        )));
    }
    let vocab_size = logits.vocab_size;
    if let Some(bad) = targets.iter().find(|&&target| target >= vocab_size) {
        return Err(Error(format!("targets must be below vocab_size, {vocab_size}; got {bad}")));
    }
    logits.check(num_rows)?;
    let rows = Rows { logits, targets, sums: sums.as_mut_ptr(), ranks: ranks.as_mut_ptr() };
    execution.for_each(num_rows, &|row| {
        // SAFETY: the row exists, and is taken once.
        unsafe { execution.instructions.run(rows.get(row)) };
    });
    Ok(())
}

/// Pointers that threads share: each writes distinct rows.
struct Rows<'a> {
    logits: Logits<'a>,
    targets: &'a [usize],
    sums: *mut f32,
    ranks: *mut i32,
}

// SAFETY: see above.
unsafe impl Sync for Rows<'_> {}

impl Rows<'_> {
    unsafe fn get(&self, row: usize) -> Row<'_> {
        // SAFETY: the caller has this row, and no other thread its places.
        unsafe {
            Row {
                logits: self.logits.row(row),
                target: self.targets[row],
                sum: &mut *self.sums.add(row),
                rank: &mut *self.ranks.add(row),
            }
        }
    }
}

struct Row<'a> {
    logits: &'a [f32],
    target: usize,
    sum: &'a mut f32,
    rank: &'a mut i32,
}

impl Kernel for Row<'_> {
    #[inline(always)]
    unsafe fn run<I: Vectors>(self) {
        let value = self.logits[self.target];
        let num_larger = self.logits.iter().fold(0, |num, &logit| num + i32::from(logit > value));
        let larger = |a: f32, &b: &f32| if b > a { b } else { a };
        let peak = self.logits.iter().fold(f32::NEG_INFINITY, larger);
        let mut total = 0.0;
        for stretch in self.logits.chunks(STRETCH) {
            let mut padded = [f32::NEG_INFINITY; STRETCH];
            padded[..stretch.len()].copy_from_slice(stretch);
            // SAFETY: the caller has the instructions.
            total += f64::from(unsafe { sum_of_exponentials::<I>(&padded, peak) });
        }
        *self.rank = num_larger;
        #[expect(clippy::cast_possible_truncation, reason = "the type of log-probabilities")]
        {
            *self.sum = (f64::from(peak) + total.ln()) as f32;
        }
    }
}

/// Sum of `exp(number - peak)`.
#[inline(always)]
unsafe fn sum_of_exponentials<I: Vectors>(numbers: &[f32; STRETCH], peak: f32) -> f32 {
    // SAFETY: the caller has the instructions; every vector lies in the array.
    unsafe {
        let mut sums = I::splat(0.0);
        for first in (0..STRETCH).step_by(PANEL) {
            let below = I::add(I::load(numbers.as_ptr().add(first)), I::splat(-peak));
            sums = I::add(sums, exp2::<I>(I::mul(below, I::splat(LOG2_E))));
        }
        across::<I>(sums, |a, b| a + b)
    }
}
