//! Scores to weights.
#![expect(unsafe_code, reason = "vectors")]
#![expect(clippy::inline_always, reason = "must become part of a function with the instructions")]

use std::f32::consts::LOG2_E;
use std::ops::Range;

use crate::attention::shape::Options;
use crate::isa::Vectors;
use crate::math::{across, exp2, tanh_of_exponent};
use crate::number::{Element, PANEL};

/// What scores are multiplied with so that powers of two make weights of them.
#[derive(Clone, Copy)]
pub(crate) struct Cap {
    /// Of the products of query and key.
    pub(crate) factor: f32,
    /// The largest score, with a cap.
    limit: Option<f32>,
}

impl Cap {
    #[inline(always)]
    pub(crate) fn new(options: &Options<'_>) -> Self {
        match options.softcap {
            None => Self { factor: options.scale * LOG2_E, limit: None },
            // tanh(x) = (e - 1) / (e + 1) with e = exp(2 x).
            Some(cap) => {
                Self { factor: options.scale / cap * (2.0 * LOG2_E), limit: Some(cap * LOG2_E) }
            }
        }
    }
}

/// Makes the weights of one query's scores; returns the largest score and the weights' sum.
///
/// Scores of panels in `used` are read; those of keys outside of `seen` have no weight.
///
/// # Safety
/// The CPU has the instructions; `weights` has room for the units of all scores.
#[inline(always)]
pub(crate) unsafe fn take_weights<I: Vectors, E: Element>(
    scores: &mut [f32],
    weights: *mut u32,
    used: &Range<usize>,
    seen: &Range<usize>,
    cap: Cap,
) -> (f32, f32) {
    let keys = used.start * PANEL..used.end * PANEL;
    // SAFETY: `used` are panels of `scores`.
    unsafe {
        if let Some(limit) = cap.limit {
            for first in keys.clone().step_by(PANEL) {
                let score = scores.as_mut_ptr().add(first);
                let share = tanh_of_exponent::<I>(I::load(score));
                I::store(I::mul(share, I::splat(limit)), score);
            }
        }
        scores[keys.start..seen.start.clamp(keys.start, keys.end)].fill(f32::NEG_INFINITY);
        scores[seen.end.clamp(keys.start, keys.end)..keys.end].fill(f32::NEG_INFINITY);
        // Above minus infinity, so that a query that sees nothing here has weights of zero.
        let mut maxima = I::splat(f32::MIN);
        for first in keys.clone().step_by(PANEL) {
            maxima = I::max(maxima, I::load(scores.as_ptr().add(first)));
        }
        let maximum = across::<I>(maxima, f32::max);
        let shift = I::splat(-maximum);
        let mut sums = I::splat(0.0);
        for first in keys.step_by(PANEL) {
            let weight = exp2::<I>(I::add(I::load(scores.as_ptr().add(first)), shift));
            sums = I::add(sums, weight);
            E::store::<I>(weight, weights.add(first / E::PER_UNIT));
        }
        (maximum, across::<I>(sums, |a, b| a + b))
    }
}
