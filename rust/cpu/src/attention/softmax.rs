//! Softmax: weights from scores.
#![expect(unsafe_code, reason = "vectors")]
#![expect(clippy::inline_always, reason = "must become part of a function with the instructions")]

use std::f32::consts::LOG2_E;
use std::ops::Range;

use crate::attention::shape::Options;
use crate::element::Element;
use crate::math::{across, exp2, tanh_of_exponent};
use crate::number::PANEL;
use crate::vectors::Vectors;

/// Scale and cap of scores, whose exponentials become powers of two.
#[derive(Clone, Copy)]
pub(crate) struct Cap {
    /// Factor of the products of query and key.
    pub(crate) factor: f32,
    /// Largest score, with a cap.
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

/// Position bias of a score by the distance of its key.
#[derive(Clone, Copy)]
pub(crate) struct Bias<'a> {
    pub(crate) kind: BiasKind<'a>,
    /// The position of the first score's key minus that of the query.
    pub(crate) first: i32,
}

/// How a bias depends on the distance.
#[derive(Clone, Copy)]
pub(crate) enum BiasKind<'a> {
    /// Slope, multiplied by the distance, which is below 0 before the query.
    Slope(f32),
    /// Biases by the distance before the query, the last for all beyond.
    Table(&'a [f32]),
}

/// Computes the weights of one query's scores; returns the largest score and the weights' sum.
///
/// Scores of panels in `used` are read; those of keys outside of `seen` have no weight.
///
/// # Safety
/// The CPU has the instructions; `weights` can hold the units of all scores.
#[inline(always)]
pub(crate) unsafe fn take_weights<I: Vectors, E: Element>(
    scores: &mut [f32],
    weights: *mut u32,
    used: &Range<usize>,
    seen: &Range<usize>,
    (cap, bias): (Cap, Option<Bias<'_>>),
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
        match bias {
            None => {}
            Some(Bias { kind: BiasKind::Slope(slope), first }) => {
                add_slope::<I>(scores, &keys, slope, first);
            }
            Some(Bias { kind: BiasKind::Table(table), first }) => {
                add_listed(scores, &keys, table, first);
            }
        }
        scores[keys.start..seen.start.clamp(keys.start, keys.end)].fill(f32::NEG_INFINITY);
        scores[seen.end.clamp(keys.start, keys.end)..keys.end].fill(f32::NEG_INFINITY);
        // Above minus infinity, so that a query that sees no key here has weights of zero.
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

/// Adds the bias that a table lists for the distance of each key.
fn add_listed(scores: &mut [f32], keys: &Range<usize>, table: &[f32], first: i32) {
    let last = table.len() - 1;
    for (key, score) in (0i32..).zip(scores.iter_mut()).take(keys.end).skip(keys.start) {
        let distance = usize::try_from(-(first + key)).unwrap_or(0); // a later key is not seen
        *score += table[distance.min(last)] * LOG2_E;
    }
}

/// Adds the slope times the distance of each key.
#[inline(always)]
unsafe fn add_slope<I: Vectors>(scores: &mut [f32], keys: &Range<usize>, slope: f32, start: i32) {
    const LANES: [f32; PANEL] =
        [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0];
    // SAFETY: `keys` are whole vectors of `scores`.
    unsafe {
        let (slope, log2_e) = (I::splat(slope), I::splat(LOG2_E));
        for first in keys.clone().step_by(PANEL) {
            #[expect(
                clippy::cast_precision_loss,
                clippy::cast_possible_truncation,
                clippy::cast_possible_wrap,
                reason = "a distance of tokens, and an index into a chunk"
            )]
            let distance = (start + first as i32) as f32;
            let distances = I::add(I::splat(distance), I::load(LANES.as_ptr()));
            let score = scores.as_mut_ptr().add(first);
            // The slope is last: an infinite product of the others would make NaN of distance 0.
            let added = I::multiply_add(slope, I::mul(distances, log2_e), I::load(score));
            I::store(added, score);
        }
    }
}
