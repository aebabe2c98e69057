//! Stored numbers, and the sizes everything is cut into.
//!
//! A *unit* is 32 bits of stored numbers: one float32, a pair of bfloat16 or one of float16.
//! Kernels walk units, whatever is in them.
#![expect(unsafe_code, reason = "loads and stores of a kernel, by kind of number")]
#![expect(clippy::inline_always, reason = "must become part of a function with the instructions")]

use crate::error::{Error, Result};
use crate::isa::Vectors;

/// Tokens of a panel, and lanes of a vector.
pub(crate) const PANEL: usize = 16;
/// Panels of a chunk, the keys that are taken before the softmax is brought up to date.
pub(crate) const CHUNK_PANELS: usize = 8;
/// Keys of a chunk.
pub(crate) const CHUNK: usize = CHUNK_PANELS * PANEL;

/// How numbers are stored.  They are computed in float32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DType {
    /// 32 bits.
    Float32,
    /// The upper 16 bits of a float32.
    BFloat16,
    /// IEEE 754 binary16.
    Float16,
}

impl DType {
    /// Bytes of an element.
    pub const fn size(self) -> usize {
        match self {
            Self::Float32 => 4,
            Self::BFloat16 | Self::Float16 => 2,
        }
    }

    /// Elements in 32 bits.
    pub(crate) const fn per_unit(self) -> usize {
        4 / self.size()
    }

    /// Refuses what cannot be the address of such numbers.
    pub(crate) fn check_address(self, name: &str, address: *const u8) -> Result<()> {
        let size = self.size();
        if !address.is_null() && address.addr().is_multiple_of(size) {
            return Ok(());
        }
        Err(Error(format!(
            "{name} must be the address of {self:?}, a multiple of {size}; got {address:?}"
        )))
    }
}

/// Refuses what cannot be the address of units.
pub(crate) fn check_units(name: &str, address: *const u8) -> Result<()> {
    if !address.is_null() && address.addr().is_multiple_of(4) {
        return Ok(());
    }
    Err(Error(format!("{name} must be an address, a multiple of 4; got {address:?}")))
}

/// What a panel holds for one lane of a vector.
pub(crate) trait Lane: Copy {
    /// Sixteen of them, as tiles take them.
    ///
    /// # Safety
    /// The CPU has the instructions of `I`, and 16 can be read.
    unsafe fn load<I: Vectors>(from: *const Self) -> I::V;
}

/// A unit, whose bits are not looked at.
impl Lane for u32 {
    #[inline(always)]
    unsafe fn load<I: Vectors>(from: *const Self) -> I::V {
        // SAFETY: the caller's promise.
        unsafe { I::load(from.cast()) }
    }
}

/// A whole number, which meets float32.
impl Lane for i8 {
    #[inline(always)]
    unsafe fn load<I: Vectors>(from: *const Self) -> I::V {
        // SAFETY: the caller's promise.
        unsafe { I::load_int8(from) }
    }
}

/// A stored number.
pub(crate) trait Element: Copy {
    /// Numbers in 32 bits.
    const PER_UNIT: usize;
    /// Zero.
    const ZERO: Self;

    /// The nearest stored number, ties to even; NaN stays NaN.
    fn from_f32(number: f32) -> Self;

    /// The number itself.
    fn to_f32(self) -> f32;

    /// Loads 16 numbers.
    ///
    /// # Safety
    /// The CPU has the instructions of `I`, and 16 numbers can be read.
    unsafe fn load<I: Vectors>(from: *const Self) -> I::V;

    /// Adds the products of a unit with each lane's unit.
    ///
    /// # Safety
    /// The CPU has the instructions of `I`, and `unit` can be read.
    unsafe fn accumulate<I: Vectors>(sum: I::V, unit: *const u32, units: I::V) -> I::V;

    /// Stores 16 numbers.
    ///
    /// # Safety
    /// The CPU has the instructions of `I`, and `to` has room for `16 / PER_UNIT` units.
    unsafe fn store<I: Vectors>(numbers: I::V, to: *mut u32);
}

impl Element for f32 {
    const PER_UNIT: usize = 1;
    const ZERO: Self = 0.0;

    #[inline(always)]
    fn from_f32(number: f32) -> Self {
        number
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    unsafe fn load<I: Vectors>(from: *const Self) -> I::V {
        // SAFETY: the caller's promise.
        unsafe { I::load(from) }
    }

    #[inline(always)]
    unsafe fn accumulate<I: Vectors>(sum: I::V, unit: *const u32, units: I::V) -> I::V {
        // SAFETY: the caller's promise.
        unsafe { I::multiply_add(I::splat(*unit.cast::<f32>()), units, sum) }
    }

    #[inline(always)]
    unsafe fn store<I: Vectors>(numbers: I::V, to: *mut u32) {
        // SAFETY: the caller's promise.
        unsafe { I::store(numbers, to.cast()) }
    }
}

/// A bfloat16: the upper half of a float32.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct BFloat16(u16);

impl Element for BFloat16 {
    const PER_UNIT: usize = 2;
    const ZERO: Self = Self(0);

    #[inline(always)]
    fn from_f32(number: f32) -> Self {
        let bits = number.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
        let kept = if number.is_nan() { bits | 0x0040_0000 } else { rounded };
        Self((kept >> 16) as u16)
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }

    #[inline(always)]
    unsafe fn load<I: Vectors>(from: *const Self) -> I::V {
        // SAFETY: the caller's promise.
        unsafe { I::load_bfloat16(from) }
    }

    #[inline(always)]
    unsafe fn accumulate<I: Vectors>(sum: I::V, unit: *const u32, units: I::V) -> I::V {
        // SAFETY: the caller's promise.
        unsafe { I::dot_pairs(sum, unit, units) }
    }

    #[inline(always)]
    unsafe fn store<I: Vectors>(numbers: I::V, to: *mut u32) {
        // SAFETY: the caller's promise: 16 elements take eight units.
        unsafe { I::store_pairs(numbers, to) }
    }
}

/// An IEEE 754 binary16.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Float16(u16);

/// A float16 in the place of a float32 has an exponent that is too small by this, the
/// difference of the biases.
const EXPONENT_SHIFT: u32 = (127 - 15) << 23;

impl Float16 {
    /// Of the lower 16 bits.
    #[inline(always)]
    pub(crate) fn from_bits(bits: u32) -> Self {
        Self((bits & 0xffff) as u16)
    }
}

impl Element for Float16 {
    const PER_UNIT: usize = 2;
    const ZERO: Self = Self(0);

    #[inline(always)]
    fn from_f32(number: f32) -> Self {
        /// Halfway from the largest number to the next, which has an even fraction.
        const INFINITE: u32 = 65_520.0_f32.to_bits();
        const SMALLEST_NORMAL: u32 = 6.103_515_6e-5_f32.to_bits();
        let bits = number.to_bits();
        let magnitude = bits & 0x7fff_ffff;
        // The last bit of a float32 next to 1/2 is worth what that of a tiny float16 is.
        let tiny = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits());
        let rounded = magnitude.wrapping_add(0xfff + ((magnitude >> 13) & 1));
        let half = if number.is_nan() {
            0x7e00
        } else if magnitude >= INFINITE {
            0x7c00
        } else if magnitude < SMALLEST_NORMAL {
            tiny
        } else {
            rounded.wrapping_sub(EXPONENT_SHIFT) >> 13
        };
        Self::from_bits(half | (bits >> 16) & 0x8000)
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        let bits = u32::from(self.0);
        let magnitude = (bits & 0x7fff) << 13;
        // No float32 below its smallest normal number, which torch can have the CPU flush.
        let tiny = f32::from_bits(magnitude + EXPONENT_SHIFT + (1 << 23)) - 6.103_515_6e-5;
        let number = match magnitude >> 23 {
            0 => tiny.to_bits(),
            31 => magnitude + 2 * EXPONENT_SHIFT,
            _ => magnitude + EXPONENT_SHIFT,
        };
        f32::from_bits(number | (bits & 0x8000) << 16)
    }

    #[inline(always)]
    unsafe fn load<I: Vectors>(from: *const Self) -> I::V {
        // SAFETY: the caller's promise.
        unsafe { I::load_float16(from) }
    }

    #[inline(always)]
    unsafe fn accumulate<I: Vectors>(sum: I::V, unit: *const u32, units: I::V) -> I::V {
        // SAFETY: the caller's promise.
        unsafe { I::dot_pairs_f16(sum, unit, units) }
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
    use crate::isa::{InstructionSet, Kernel};

    /// What the bits say, by the definition of the format.
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

    /// Every float16, and what lies between it and the next, through the vectors of a set.
    struct EveryNumber;

    impl Kernel for EveryNumber {
        #[inline(always)]
        unsafe fn run<I: Vectors>(self) {
            const ONES: [u32; 2] = [0x0000_3c00, 0x3c00_0000]; // 1 and 0; 0 and 1
            for bits in 0..=u16::MAX {
                let wanted = meaning(bits);
                assert!(same(f64::from(Float16(bits).to_f32()), wanted), "{bits:#x}");
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
                let (low, high) = (Float16(bits).to_f32(), meaning(bits + 1).min(65_536.0));
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
                // SAFETY: 16 numbers, and room for eight units.
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

    #[test]
    fn every_float16_is_read_and_the_nearest_one_stored() {
        for set in InstructionSet::ALL.into_iter().filter(|set| set.is_available()) {
            // SAFETY: the CPU has the instructions.
            unsafe { set.run(EveryNumber) };
        }
    }
}
