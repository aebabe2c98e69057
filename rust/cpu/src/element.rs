//! Stored numbers, in the form that vectors take.
#![expect(unsafe_code, reason = "loads and stores of a kernel, by kind of number")]
#![expect(clippy::inline_always, reason = "must become part of a function with the instructions")]

use std::marker::PhantomData;

use crate::level::Float8;
use crate::number::{BFloat16, Float16, Stored};
use crate::vectors::Vectors;

/// Unit of a panel for one lane of a vector.
pub(crate) trait Lane: Copy {
    /// Loads sixteen of them, in the form that tiles take.
    ///
    /// # Safety
    /// The CPU has the instructions of `I`, and 16 can be read.
    unsafe fn load<I: Vectors>(from: *const Self) -> I::V;
}

/// A unit, whose bits are passed on unchanged.
impl Lane for u32 {
    #[inline(always)]
    unsafe fn load<I: Vectors>(from: *const Self) -> I::V {
        // SAFETY: the caller's promise.
        unsafe { I::load(from.cast()) }
    }
}

/// A whole number, which is multiplied as float32.
impl Lane for i8 {
    #[inline(always)]
    unsafe fn load<I: Vectors>(from: *const Self) -> I::V {
        // SAFETY: the caller's promise.
        unsafe { I::load_int8(from) }
    }
}

/// A float8, which is multiplied as float32.
impl<const FRACTION: u32> Lane for Float8<FRACTION> {
    #[inline(always)]
    unsafe fn load<I: Vectors>(from: *const Self) -> I::V {
        // SAFETY: the caller's promise.
        unsafe { I::load_float8(from) }
    }
}

/// Numbers of a row, as tiles multiply them.
pub(crate) trait Factor {
    /// Units of a row for one of a panel.
    const UNITS: usize = 1;

    /// Adds the products of a row's units with each lane's unit.
    ///
    /// # Safety
    /// The CPU has the instructions of `I`, and the units at `units` can be read.
    unsafe fn accumulate<I: Vectors>(sum: I::V, units: *const u32, lanes: I::V) -> I::V;
}

/// A stored number of 16 bits, of which pairs are units.
pub(crate) trait Half: Stored {
    /// The firsts and the seconds of the lanes' pairs, as float32.
    ///
    /// # Safety
    /// The CPU has the instructions of `I`.
    unsafe fn widen<I: Vectors>(pairs: I::V) -> (I::V, I::V);
}

impl Half for BFloat16 {
    #[inline(always)]
    unsafe fn widen<I: Vectors>(pairs: I::V) -> (I::V, I::V) {
        // SAFETY: the caller's promise.
        unsafe { (I::first_of_pairs(pairs), I::second_of_pairs(pairs)) }
    }
}

impl Half for Float16 {
    #[inline(always)]
    unsafe fn widen<I: Vectors>(pairs: I::V) -> (I::V, I::V) {
        // SAFETY: the caller's promise.
        unsafe { I::widen_pairs_f16(pairs) }
    }
}

/// Two float32, which are multiplied with a pair of halves in the order of the pair.
pub(crate) struct Float32Pair<H>(PhantomData<H>);

impl<H: Half> Factor for Float32Pair<H> {
    const UNITS: usize = 2;

    #[inline(always)]
    unsafe fn accumulate<I: Vectors>(sum: I::V, units: *const u32, lanes: I::V) -> I::V {
        let units = units.cast::<f32>();
        // SAFETY: the caller's promise.
        unsafe {
            let (first, second) = H::widen::<I>(lanes);
            let sum = I::multiply_add(I::splat(*units), first, sum);
            I::multiply_add(I::splat(*units.add(1)), second, sum)
        }
    }
}

/// A stored number, and its vector operations.
pub(crate) trait Element: Stored + Factor {
    /// Numbers in 32 bits.
    const PER_UNIT: usize;

    /// Loads 16 numbers.
    ///
    /// # Safety
    /// The CPU has the instructions of `I`, and 16 numbers can be read.
    unsafe fn load<I: Vectors>(from: *const Self) -> I::V;

    /// Stores 16 numbers.
    ///
    /// # Safety
    /// The CPU has the instructions of `I`, and `to` can hold `16 / PER_UNIT` units.
    unsafe fn store<I: Vectors>(numbers: I::V, to: *mut u32);
}

impl Factor for f32 {
    #[inline(always)]
    unsafe fn accumulate<I: Vectors>(sum: I::V, units: *const u32, lanes: I::V) -> I::V {
        // SAFETY: the caller's promise.
        unsafe { I::multiply_add(I::splat(*units.cast::<f32>()), lanes, sum) }
    }
}

impl Element for f32 {
    const PER_UNIT: usize = 1;

    #[inline(always)]
    unsafe fn load<I: Vectors>(from: *const Self) -> I::V {
        // SAFETY: the caller's promise.
        unsafe { I::load(from) }
    }

    #[inline(always)]
    unsafe fn store<I: Vectors>(numbers: I::V, to: *mut u32) {
        // SAFETY: the caller's promise.
        unsafe { I::store(numbers, to.cast()) }
    }
}

impl Factor for BFloat16 {
    #[inline(always)]
    unsafe fn accumulate<I: Vectors>(sum: I::V, units: *const u32, lanes: I::V) -> I::V {
        // SAFETY: the caller's promise.
        unsafe { I::dot_pairs(sum, units, lanes) }
    }
}

impl Element for BFloat16 {
    const PER_UNIT: usize = 2;

    #[inline(always)]
    unsafe fn load<I: Vectors>(from: *const Self) -> I::V {
        // SAFETY: the caller's promise.
        unsafe { I::load_bfloat16(from) }
    }

    #[inline(always)]
    unsafe fn store<I: Vectors>(numbers: I::V, to: *mut u32) {
        // SAFETY: the caller's promise: 16 elements take eight units.
        unsafe { I::store_pairs(numbers, to) }
    }
}

impl Factor for Float16 {
    #[inline(always)]
    unsafe fn accumulate<I: Vectors>(sum: I::V, units: *const u32, lanes: I::V) -> I::V {
        // SAFETY: the caller's promise.
        unsafe { I::dot_pairs_f16(sum, units, lanes) }
    }
}

impl Element for Float16 {
    const PER_UNIT: usize = 2;

    #[inline(always)]
    unsafe fn load<I: Vectors>(from: *const Self) -> I::V {
        // SAFETY: the caller's promise.
        unsafe { I::load_float16(from) }
    }

    #[inline(always)]
    unsafe fn store<I: Vectors>(numbers: I::V, to: *mut u32) {
        // SAFETY: the caller's promise: 16 elements take eight units.
        unsafe { I::store_pairs_f16(numbers, to) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::InstructionSet;
    use crate::number::PANEL;
    use crate::vectors::Kernel;

    /// Value of the bits, by the definition of the format.
    fn meaning(bits: u16) -> f64 {
        let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 0x3ff) / 1024.0);
        let magnitude = match exponent {
            0 => fraction * 2_f64.powi(-14),
            31 if fraction > 0.0 => f64::NAN,
            31 => f64::INFINITY,
            _ => (1.0 + fraction) * 2_f64.powi(exponent - 15),
        };
        if bits >> 15 == 1 { -magnitude } else { magnitude }
    }

    fn same(a: f64, b: f64) -> bool {
        a.is_nan() && b.is_nan() || a.to_bits() == b.to_bits()
    }

    /// Every float16, and numbers between it and the next, through the vectors of a set.
    struct EveryNumber;

    impl Kernel for EveryNumber {
        #[inline(always)]
        unsafe fn run<I: Vectors>(self) {
            const ONES: [u32; 2] = [0x0000_3c00, 0x3c00_0000]; // 1 and 0; 0 and 1
            for bits in 0..=u16::MAX {
                let wanted = meaning(bits);
                assert!(
                    same(f64::from(Float16::from_bits(bits.into()).to_f32()), wanted),
                    "{bits:#x}"
                );
                for (pair, shift) in ONES.iter().zip([0, 16]) {
                    let units = [f32::from_bits(u32::from(bits) << shift); PANEL];
                    let mut got = [0.0; PANEL];
                    // SAFETY: the arrays have 16 numbers; the runner has the instructions.
                    unsafe {
                        let sum =
                            Float16::accumulate::<I>(I::splat(0.0), pair, I::load(units.as_ptr()));
                        I::store(sum, got.as_mut_ptr());
                    }
                    for got in got {
                        let got = f64::from(got);
                        // A sum of zeros loses their sign.
                        assert!(same(got + 0.0, wanted + 0.0), "{bits:#x} is read as {got}");
                    }
                }
            }
            for bits in 0..0x7c00_u16 {
                let (low, high) =
                    (Float16::from_bits(bits.into()).to_f32(), meaning(bits + 1).min(65_536.0));
                #[expect(
                    clippy::cast_possible_truncation,
                    reason = "exact: a bit more than float16"
                )]
                let middle = f64::midpoint(f64::from(low), high) as f32;
                let even = bits + bits % 2;
                let given = [low, middle.next_down(), middle, middle.next_up()];
                let wanted = [bits, bits, even, bits + 1];
                let mut numbers = [f32::NAN; PANEL];
                for index in 0..4 {
                    (numbers[index], numbers[4 + index]) = (given[index], -given[index]);
                }
                (numbers[8], numbers[9], numbers[10]) = (f32::INFINITY, f32::MAX, 1e-40);
                let mut stored = [0_u16; PANEL];
                // SAFETY: 16 numbers, and memory for eight units.
                unsafe {
                    Float16::store::<I>(I::load(numbers.as_ptr()), stored.as_mut_ptr().cast());
                };
                for index in 0..4 {
                    let number = given[index];
                    assert_eq!(stored[index], wanted[index], "{number} is stored");
                    assert_eq!(stored[4 + index], wanted[index] | 0x8000, "-{number} is stored");
                }
                assert_eq!(stored[8..11], [0x7c00, 0x7c00, 0], "infinity, the largest, a tiny one");
                assert!(stored[11..].iter().all(|&bits| meaning(bits).is_nan()), "NaN is stored");
            }
        }
    }

    /// Every finite bfloat16 but zero, and numbers between it and the next, stored by a set.
    struct EveryBFloat16;

    impl Kernel for EveryBFloat16 {
        #[inline(always)]
        unsafe fn run<I: Vectors>(self) {
            let fraction = |bits: u16| f64::from(f32::from_bits(u32::from(bits) << 16));
            for bits in 1..0x7f80_u16 {
                let first = u32::from(bits) << 16;
                let given = [first, first | 0x7fff, first | 0x8000, first | 0x8001, first | 0xffff];
                let wanted = [bits, bits, bits + bits % 2, bits + 1, bits + 1];
                let mut numbers = [f32::NAN; PANEL];
                for index in 0..5 {
                    let number = f32::from_bits(given[index]);
                    (numbers[index], numbers[5 + index]) = (number, -number);
                }
                numbers[10] = f32::INFINITY;
                let mut stored = [0_u16; PANEL];
                // SAFETY: 16 numbers, and memory for eight units.
                unsafe {
                    BFloat16::store::<I>(I::load(numbers.as_ptr()), stored.as_mut_ptr().cast());
                };
                // Those below the least normal one may be zero.
                let is_zero = given[0] < f32::MIN_POSITIVE.to_bits() && fraction(stored[0]) == 0.0;
                for index in 0..5 {
                    let wanted = if is_zero { 0 } else { wanted[index] };
                    assert_eq!(stored[index], wanted, "{:#x} is stored", given[index]);
                    assert_eq!(stored[5 + index], wanted | 0x8000, "-{:#x}", given[index]);
                }
                assert_eq!(stored[10], 0x7f80, "infinity is stored");
                assert!(stored[11..].iter().all(|&bits| fraction(bits).is_nan()), "NaN is stored");
            }
        }
    }

    fn with_each_set(run: impl Fn(InstructionSet)) {
        InstructionSet::ALL.into_iter().filter(|set| set.is_available()).for_each(run);
    }

    #[test]
    fn every_float16_is_read_and_the_nearest_one_stored() {
        // SAFETY: the CPU has the instructions.
        with_each_set(|set| unsafe { set.run(EveryNumber) });
    }

    #[test]
    fn the_nearest_bfloat16_is_stored() {
        // SAFETY: the CPU has the instructions.
        with_each_set(|set| unsafe { set.run(EveryBFloat16) });
    }
}
