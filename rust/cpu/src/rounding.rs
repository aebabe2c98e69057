//! Numbers rounded to the blocks of GGUF files.
//!
//! # Invariants
//!
//! 1. A block of `Q8_0` is that of the `gguf` package: the nearest multiples, ties away from zero, of
//!    a 127th of the largest.  What a quantiser made, whose largest is 127 scales, stays that block.
//! 2. No block of `Q4_1` has a larger squared error than the `gguf` package's.
//!
//! # Costs
//!
//! Some 10 ns a weight for `Q4_1`, 5 for `Q8_0`, on one thread.
#![expect(unsafe_code, reason = "runs with vector instructions")]
#![expect(clippy::inline_always, reason = "must become part of a function with the instructions")]

use crate::bytes::Format;
use crate::error::{Error, Result};
use crate::math::across;
use crate::number::{Float16, PANEL, Stored};
use crate::team::Execution;
use crate::vectors::{Instructions, Kernel, Vectors};

/// Weights of a block.
pub(crate) const BLOCK: usize = 32;
/// The highest level of a weight of 4 bits.
const TOP: f32 = 15.0;
/// Shares of a block's range over which levels are tried; numbers outside become the nearest.
const SHARES: [f32; 3] = [1.0, 0.95, 0.9];

/// Rounds numbers to the blocks of a format, side by side as in a file.
///
/// # Errors
/// A format other than `Q8_0` and `Q4_1`, numbers that are no whole blocks, an output of another
/// length, an instruction set that the CPU lacks.
pub fn round_to_blocks(
    format: Format,
    numbers: &[f32],
    to: &mut [u8],
    execution: &Execution<'_>,
) -> Result<()> {
    execution.check()?;
    if format.is_whole() || !format.takes_any() {
        return Err(Error(format!("blocks must be Q8_0 or Q4_1; got {format:?}")));
    }
    let num_bytes = numbers.len() / BLOCK * format.block().num_bytes();
    if !numbers.len().is_multiple_of(BLOCK) || to.len() != num_bytes {
        return Err(Error(format!(
            "numbers must be whole blocks of {BLOCK}, and the output {num_bytes} bytes; got {} and \
             {}",
            numbers.len(),
            to.len()
        )));
    }
    // SAFETY: the CPU has the instructions.
    unsafe { execution.instructions.run(Rounding { format, numbers, to }) };
    Ok(())
}

/// Whole blocks of numbers, and memory for their bytes.
pub(crate) struct Rounding<'a> {
    pub(crate) format: Format,
    pub(crate) numbers: &'a [f32],
    pub(crate) to: &'a mut [u8],
}

impl Kernel for Rounding<'_> {
    #[inline(always)]
    unsafe fn run<I: Instructions>(self) {
        let Self { format, numbers, to } = self;
        let numbers = numbers.as_chunks().0;
        match format {
            Format::Q8_0 => {
                for (numbers, to) in numbers.iter().zip(to.as_chunks_mut().0) {
                    *to = q8_0(numbers);
                }
            }
            Format::Q4_1 => {
                for (numbers, to) in numbers.iter().zip(to.as_chunks_mut().0) {
                    // SAFETY: the caller's promise.
                    *to = unsafe { q4_1::<I>(numbers) };
                }
            }
            _ => unreachable!("numbers are rounded to no other blocks"),
        }
    }
}

/// A block of `Q8_0`.
#[inline(always)]
fn q8_0(numbers: &[f32; BLOCK]) -> [u8; 34] {
    let scale = numbers.iter().fold(0.0_f32, |peak, number| peak.max(number.abs())) / 127.0;
    let inverse = inverse(scale);
    let mut block = [0; 34];
    block[..2].copy_from_slice(&half(scale));
    for (to, number) in block[2..].iter_mut().zip(numbers) {
        #[expect(clippy::cast_possible_truncation, reason = "at most 127")]
        let whole = (number * inverse).round() as i8;
        *to = whole.cast_unsigned();
    }
    block
}

/// A block of `Q4_1`: of levels over some shares of the range, and for each of these the step and the
/// minimum that fit its levels best, those with the least squared error.
///
/// # Safety
/// The CPU has the instructions.
#[inline(always)]
unsafe fn q4_1<I: Vectors>(numbers: &[f32; BLOCK]) -> [u8; 20] {
    // SAFETY: the caller's promise; a block has two vectors.
    unsafe {
        let numbers = [0, PANEL].map(|first| I::load(numbers.as_ptr().add(first)));
        let low = across::<I>(I::min(numbers[0], numbers[1]), f32::min);
        let high = across::<I>(I::max(numbers[0], numbers[1]), f32::max);
        let widest = (high - low) / TOP;
        let mut best = Levels::<I>::of(numbers, widest, low);
        for share in SHARES {
            let step = widest * share;
            let tried = Levels::of(numbers, step, low + (widest - step) * (TOP / 2.0));
            let (step, minimum) = tried.fitted(numbers);
            best = best.or(tried).or(Levels::of(numbers, step, minimum));
        }
        best.block()
    }
}

/// Numbers rounded to levels.
struct Levels<I: Vectors> {
    /// Distance of two levels, and the lowest, both rounded to float16.
    step: f32,
    minimum: f32,
    /// Level of each number.
    each: [I::V; 2],
    /// Sum of squared errors.
    error: f32,
}

impl<I: Vectors> Levels<I> {
    /// The nearest levels of a step and a minimum.
    #[inline(always)]
    unsafe fn of(numbers: [I::V; 2], step: f32, minimum: f32) -> Self {
        let step = Float16::from_f32(step).to_f32();
        let minimum = Float16::from_f32(minimum).to_f32();
        let mut each = numbers;
        // SAFETY: the promise of `q4_1`.
        unsafe {
            let mut errors = I::splat(0.0);
            for (level, number) in each.iter_mut().zip(numbers) {
                let above = I::add(number, I::splat(-minimum));
                let place = I::mul(above, I::splat(inverse(step)));
                let bounded = I::min(I::max(place, I::splat(0.0)), I::splat(TOP));
                *level = I::round(bounded);
                let error = I::add(I::mul(*level, I::splat(-step)), above);
                errors = I::add(errors, I::mul(error, error));
            }
            Self { step, minimum, each, error: across::<I>(errors, |a, b| a + b) }
        }
    }

    /// The step and the minimum with the least squared error for these levels.
    #[inline(always)]
    unsafe fn fitted(&self, numbers: [I::V; 2]) -> (f32, f32) {
        const SHARE: f32 = 1.0 / 32.0; // of a block
        let [first, second] = self.each;
        // SAFETY: the promise of `q4_1`.
        unsafe {
            let level = across::<I>(I::add(first, second), |a, b| a + b) * SHARE;
            let number = across::<I>(I::add(numbers[0], numbers[1]), |a, b| a + b) * SHARE;
            let (mut squares, mut products) = (I::splat(0.0), I::splat(0.0));
            for (each, number) in self.each.into_iter().zip(numbers) {
                let deviation = I::add(each, I::splat(-level));
                squares = I::add(squares, I::mul(deviation, deviation));
                products = I::add(products, I::mul(deviation, number));
            }
            let squares = across::<I>(squares, |a, b| a + b);
            let step = across::<I>(products, |a, b| a + b) * inverse(squares);
            (step, number - step * level)
        }
    }

    /// The one with the smaller error.
    #[inline(always)]
    fn or(self, other: Self) -> Self {
        if other.error < self.error { other } else { self }
    }

    #[inline(always)]
    unsafe fn block(&self) -> [u8; 20] {
        let mut levels = [0.0; BLOCK];
        for (first, each) in [0, PANEL].into_iter().zip(self.each) {
            // SAFETY: the promise of `q4_1`; there are two vectors.
            unsafe { I::store(each, levels.as_mut_ptr().add(first)) };
        }
        let mut block = [0; 20];
        block[..2].copy_from_slice(&half(self.step));
        block[2..4].copy_from_slice(&half(self.minimum));
        for (index, to) in block[4..].iter_mut().enumerate() {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 15")]
            let [low, high] = [levels[index], levels[index + BLOCK / 2]].map(|level| level as u8);
            *to = low | high << 4;
        }
        block
    }
}

/// 1 / x of numbers from 0; 0 where that would be infinite.
#[inline(always)]
fn inverse(number: f32) -> f32 {
    if number < f32::MIN_POSITIVE { 0.0 } else { 1.0 / number }
}

/// The bytes of a float16.
#[inline(always)]
fn half(number: f32) -> [u8; 2] {
    let bits = Float16::unit(&[number, 0.0]).to_le_bytes();
    [bits[0], bits[1]]
}
