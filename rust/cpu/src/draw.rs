//! Random tokens of rows of logits, each row with separate parameters.
//!
//! A row is filtered by temperature, then top-k, top-p (of what top-k kept) and min-p; tokens equal
//! to a threshold are all kept.  A token inverts the cumulative distribution of the kept tokens, in
//! the order of their ids.
//!
//! # Invariants
//!
//! 1. Sums are running sums along a row in float64, and no instruction set rounds them otherwise:
//!    a token does not depend on other rows, on threads or on the CPU.
//! 2. Tiny differences of logits change a token only at the edges of its interval.
//!
//! # Costs
//!
//! Some 3 ns a logit for an exponential and a sum; with top-k a comparison a logit, and
//! exponentials of the kept tokens alone.  Tokens that may be kept are sorted; in a flat
//! distribution these are all.  A thread keeps up to 56 bytes a logit of a row.
#![expect(unsafe_code, reason = "logits are the address of a tensor")]
#![expect(clippy::inline_always, reason = "must become part of a function with the instructions")]

use std::cell::Cell;

use crate::error::{Error, Result};
use crate::logits::Logits;
use crate::team::Execution;
use crate::vectors::{Kernel, Vectors};

/// Distances below the largest logit, in temperatures, that top-k and top-p search in turn.
const DEPTHS: [f64; 4] = [4.0, 12.0, 36.0, f64::INFINITY];
/// A mask allows few tokens if fewer than one of this many words has any.
const FEW_OF: usize = 8;
/// Logits that are compared together.
const STRETCH: usize = 64;

/// Parameters of a row.
#[derive(Clone, Copy, Debug)]
pub struct Sampling {
    /// Above 0.
    pub temperature: f64,
    /// Number of most likely tokens to keep, at least 1; the vocabulary's size keeps all.
    pub top_k: usize,
    /// Cumulative probability of the most likely tokens to keep; 1 keeps all.
    pub top_p: f64,
    /// Fraction of the highest probability that a kept token has at least.
    pub min_p: f64,
}

/// Rows to sample.
#[derive(Clone, Copy, Debug)]
pub struct Draws<'a> {
    /// Largest logit that each row may sample.
    pub peaks: &'a [f32],
    /// Parameters of the rows.
    pub parameters: &'a [Sampling],
    /// Random numbers in [0, 1), one for each token, row by row.
    pub uniforms: &'a [f64],
    /// Row `r` has the tokens from `starts[r]` to `starts[r + 1]`.
    pub starts: &'a [usize],
    /// Allowed tokens as in [`top_k`](crate::top_k), for rows without top-k and top-p.
    pub masks: Option<&'a [i32]>,
}

/// Samples tokens from logits.
///
/// The `tokens` of rows whose peak is not finite are undefined.
///
/// # Errors
/// Sizes that do not fit each other, an odd address, an instruction set that the CPU lacks.
///
/// # Safety
/// The logits of these rows exist, and are not written during the call.
pub unsafe fn draw(
    logits: Logits<'_>,
    draws: Draws<'_>,
    tokens: &mut [i32],
    execution: &Execution<'_>,
) -> Result<()> {
    execution.check()?;
    draws.check(logits.vocab_size, tokens.len())?;
    logits.check(draws.peaks.len())?;
    let rows = Rows { logits, draws, tokens: tokens.as_mut_ptr() };
    execution.for_each(draws.peaks.len(), &|row| {
        let mut scratch = SCRATCH.take();
        // SAFETY: the row exists, and is taken once.
        unsafe { execution.instructions.run(rows.get(row, &mut scratch)) };
        SCRATCH.set(scratch);
    });
    Ok(())
}

impl Draws<'_> {
    fn check(&self, vocab_size: usize, num_tokens: usize) -> Result<()> {
        if vocab_size == 0 || i32::try_from(vocab_size).is_err() {
            return Err(Error(format!("vocab_size must be 1 to 2^31 - 1; got {vocab_size}")));
        }
        let num_rows = self.peaks.len();
        let num_words = num_rows * vocab_size.div_ceil(32);
        let lens = [
            ("parameters", self.parameters.len(), num_rows),
            ("starts", self.starts.len(), num_rows + 1),
            ("masks", self.masks.map_or(num_words, <[_]>::len), num_words),
            ("uniforms", self.uniforms.len(), num_tokens),
        ];
        for (name, given, needed) in lens {
            if given != needed {
                return Err(Error(format!("{name} must have {needed} entries; got {given}")));
            }
        }
        if !self.starts.is_sorted() || self.starts[0] != 0 || self.starts[num_rows] != num_tokens {
            return Err(Error("starts must ascend from 0 to the number of tokens".into()));
        }
        if self.parameters.iter().any(|row| row.top_k == 0) {
            return Err(Error("top_k must be at least 1; got 0".into()));
        }
        Ok(())
    }
}

/// Pointers that threads share: each writes the tokens of distinct rows.
struct Rows<'a> {
    logits: Logits<'a>,
    draws: Draws<'a>,
    tokens: *mut i32,
}

// SAFETY: see above.
unsafe impl Sync for Rows<'_> {}

impl Rows<'_> {
    unsafe fn get<'s>(&'s self, row: usize, scratch: &'s mut Scratch) -> Row<'s> {
        let Self { logits, draws, tokens } = self;
        let (first, last) = (draws.starts[row], draws.starts[row + 1]);
        let num_words = logits.vocab_size.div_ceil(32);
        // SAFETY: the caller has this row, and no other thread its tokens.
        let (logits, tokens) = unsafe {
            (logits.row(row), std::slice::from_raw_parts_mut(tokens.add(first), last - first))
        };
        Row {
            logits,
            mask: draws.masks.map(|masks| &masks[row * num_words..][..num_words]),
            peak: f64::from(draws.peaks[row]),
            sampling: draws.parameters[row],
            uniforms: &draws.uniforms[first..last],
            tokens,
            scratch,
        }
    }
}

/// A token that may be kept.
#[derive(Clone, Copy)]
struct Candidate {
    id: usize,
    logit: f32,
    weight: f64,
}

/// A thread's memory between calls.
#[derive(Default)]
struct Scratch {
    /// Weights of all tokens, or of the kept ones; then their running sums.
    weights: Vec<f64>,
    /// What filters kept, in the order of ids.
    kept: Vec<Candidate>,
    /// The same, the most likely first.
    ordered: Vec<Candidate>,
}

thread_local! {
    static SCRATCH: Cell<Scratch> = Cell::default();
}

/// A row and its tokens.
struct Row<'a> {
    logits: &'a [f32],
    mask: Option<&'a [i32]>,
    peak: f64,
    sampling: Sampling,
    uniforms: &'a [f64],
    tokens: &'a mut [i32],
    scratch: &'a mut Scratch,
}

impl Kernel for Row<'_> {
    #[inline(always)]
    unsafe fn run<I: Vectors>(mut self) {
        let Sampling { top_k, top_p, .. } = self.sampling;
        let has_top_k = top_k < self.logits.len();
        let allows_few = self.mask.is_some_and(|mask| {
            mask.iter().filter(|word| **word != 0).count() < mask.len() / FEW_OF
        });
        if allows_few {
            self.keep_allowed();
        } else if has_top_k {
            self.keep_top_k();
            if top_p < 1.0 {
                let total = self.scratch.kept.iter().fold(0.0, |sum, token| sum + token.weight);
                self.keep_nucleus(total);
            }
        } else {
            self.weigh_all();
            if top_p < 1.0 {
                self.keep_top_p();
            }
        }
        let is_filtered = allows_few || has_top_k || top_p < 1.0;
        let Scratch { weights, kept, .. } = &mut *self.scratch;
        if is_filtered {
            weights.clear();
            weights.extend(kept.iter().map(|token| token.weight));
        }
        self.take(is_filtered);
    }
}

impl Row<'_> {
    /// Computes the weights of all tokens, 0 for those that are not allowed.
    #[inline(always)]
    fn weigh_all(&mut self) {
        let (peak, temperature) = (self.peak, self.sampling.temperature);
        let weights = &mut self.scratch.weights;
        weights.resize(self.logits.len(), 0.0);
        let words = self.mask.into_iter().flatten().copied().chain(std::iter::repeat(-1));
        let stretches = weights.chunks_mut(32).zip(self.logits.chunks(32)).zip(words);
        for ((weights, logits), word) in stretches {
            if word == 0 {
                weights.fill(0.0);
                continue;
            }
            for (weight, &logit) in weights.iter_mut().zip(logits) {
                *weight = weight_of(logit, peak, temperature);
            }
            if word != -1 {
                for (bit, weight) in weights.iter_mut().enumerate() {
                    *weight = if word >> bit & 1 == 0 { 0.0 } else { *weight };
                }
            }
        }
    }

    /// Keeps the few allowed tokens.
    #[inline(always)]
    fn keep_allowed(&mut self) {
        let (peak, temperature) = (self.peak, self.sampling.temperature);
        let kept = &mut self.scratch.kept;
        kept.clear();
        for (index, &word) in self.mask.into_iter().flatten().enumerate() {
            let mut left = word;
            while left != 0 {
                let id = 32 * index + left.trailing_zeros() as usize;
                left &= left.wrapping_sub(1);
                if let Some(&logit) = self.logits.get(id) {
                    let weight = weight_of(logit, peak, temperature);
                    kept.push(Candidate { id, logit, weight });
                }
            }
        }
    }

    /// Gathers the tokens whose logit is at most `depth` temperatures below the largest.
    #[inline(always)]
    fn gather(&mut self, depth: f64) {
        #[expect(clippy::cast_possible_truncation, reason = "any number below will do")]
        let least = (self.peak - depth * self.sampling.temperature) as f32;
        let kept = &mut self.scratch.kept;
        kept.clear();
        for (index, stretch) in self.logits.chunks(STRETCH).enumerate() {
            let largest = stretch.iter().fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
            if largest >= least {
                let ids = index * STRETCH..;
                let found = ids.zip(stretch).filter(|(_, logit)| **logit >= least);
                kept.extend(found.map(|(id, &logit)| Candidate { id, logit, weight: 0.0 }));
            }
        }
    }

    #[inline(always)]
    fn keep_top_k(&mut self) {
        let k = self.sampling.top_k;
        for depth in DEPTHS {
            self.gather(depth);
            if self.scratch.kept.len() >= k {
                break;
            }
        }
        let Scratch { kept, ordered, .. } = &mut *self.scratch;
        ordered.clone_from(kept);
        if k < ordered.len() {
            let (_, last, _) = ordered.select_nth_unstable_by(k - 1, more_likely);
            let least = last.logit;
            kept.retain(|token| token.logit >= least);
        }
        let (peak, temperature) = (self.peak, self.sampling.temperature);
        for token in kept {
            token.weight = weight_of(token.logit, peak, temperature);
        }
    }

    /// Keeps the fewest most likely of all tokens that reach top-p of the weight.
    #[inline(always)]
    fn keep_top_p(&mut self) {
        let total = self.scratch.weights.iter().fold(0.0, |sum, weight| sum + weight);
        for depth in DEPTHS {
            self.gather(depth);
            let Scratch { weights, kept, .. } = &mut *self.scratch;
            for token in kept {
                token.weight = weights[token.id];
            }
            if self.keep_nucleus(total) {
                return;
            }
        }
    }

    /// Drops what is less likely than the token that reaches top-p of `total`; keeps all if no
    /// token does.  Returns whether one does.
    fn keep_nucleus(&mut self, total: f64) -> bool {
        let goal = self.sampling.top_p * total;
        let Scratch { kept, ordered, .. } = &mut *self.scratch;
        ordered.clone_from(kept);
        ordered.sort_unstable_by(more_likely);
        let mut mass = 0.0;
        for token in ordered {
            mass += token.weight;
            if mass >= goal {
                let least = token.logit;
                kept.retain(|token| token.logit >= least);
                return true;
            }
        }
        false
    }

    /// Inverts the distribution of the weights, of all tokens or of the kept ones.
    #[inline(always)]
    fn take(&mut self, is_filtered: bool) {
        let Scratch { weights, kept, .. } = &mut *self.scratch;
        let (min_p, mut total) = (self.sampling.min_p, 0.0);
        for weight in weights.iter_mut() {
            if *weight >= min_p {
                total += *weight;
            }
            *weight = total;
        }
        for (token, uniform) in self.tokens.iter_mut().zip(self.uniforms) {
            // Rounding must not move the target past the last kept token.
            let target = (uniform * total).min(total.next_down());
            let place = weights.partition_point(|&sum| sum <= target);
            let place = place.min(weights.len().saturating_sub(1));
            let id = if is_filtered { kept.get(place).map_or(0, |token| token.id) } else { place };
            *token = i32::try_from(id).unwrap_or(i32::MAX);
        }
    }
}

fn more_likely(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.logit.total_cmp(&a.logit)
}

/// Weight of a token; that of the most likely one, at the peak, is 1.
#[inline(always)]
fn weight_of(logit: f32, peak: f64, temperature: f64) -> f64 {
    exp((f64::from(logit) - peak) / temperature)
}

/// `e` to the power of a number up to 700, to the last bit or two; 0 below -708, and of NaN.
///
/// Range reduction by Cody and Waite, then the series: additions and multiplications alone, which
/// round alike with every instruction set.
#[inline(always)]
fn exp(x: f64) -> f64 {
    const LN_2_HIGH: f64 = 6.931_471_803_691_238e-1;
    const LN_2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    /// The sum with it has the nearest whole number in its last bits.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    let bounded = x.clamp(-709.0, 700.0);
    let shifted = bounded * std::f64::consts::LOG2_E + ROUND;
    let whole = shifted - ROUND;
    let rest = (bounded - whole * LN_2_HIGH) - whole * LN_2_LOW;
    let mut sum = INVERSE_FACTORIALS[0];
    for factor in &INVERSE_FACTORIALS[1..] {
        sum = sum * rest + factor;
    }
    let exponent = shifted.to_bits().wrapping_add(1023) << 52;
    let power = sum * f64::from_bits(exponent);
    if x >= -708.0 { power } else { 0.0 }
}

/// The inverse factorials of 13 down to 0.
const INVERSE_FACTORIALS: [f64; 14] = {
    let (mut factors, mut factorial, mut number) = ([1.0; 14], 1.0, 1.0);
    let mut place = 13;
    while place > 0 {
        place -= 1;
        factorial *= number;
        factors[place] = 1.0 / factorial;
        number += 1.0;
    }
    factors
};
