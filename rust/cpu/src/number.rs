//! Stored numbers, and the sizes of panels and chunks.
//!
//! A *unit* is 32 bits of stored numbers: one float32, a pair of bfloat16 or one of float16.
//! Kernels process units, whatever type of number is in them.
#![expect(clippy::inline_always, reason = "must become part of a function with the instructions")]

use crate::error::{Error, Result};

/// Tokens of a panel, and lanes of a vector.
pub(crate) const PANEL: usize = 16;
/// Panels of a chunk: the keys after which the online softmax is updated.
pub(crate) const CHUNK_PANELS: usize = 8;
/// Keys of a chunk.
pub(crate) const CHUNK: usize = CHUNK_PANELS * PANEL;

/// Storage type of numbers, which are computed in float32.
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

    /// Refuses an address that numbers of this type cannot have.
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

/// Refuses an address that units cannot have.
pub(crate) fn check_units(name: &str, address: *const u8) -> Result<()> {
    if !address.is_null() && address.addr().is_multiple_of(4) {
        return Ok(());
    }
    Err(Error(format!("{name} must be an address, a multiple of 4; got {address:?}")))
}

/// A stored number.
pub(crate) trait Stored: Copy {
    /// Zero.
    const ZERO: Self;

    /// The nearest stored number, ties to even; NaN stays NaN.
    fn from_f32(number: f32) -> Self;

    /// The number itself.
    fn to_f32(self) -> f32;

    /// A unit of one float32, or of a pair of halves, the first in its lower bits; the numbers are
    /// those of stored ones.
    fn unit(numbers: &[f32]) -> u32;
}

impl Stored for f32 {
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
    fn unit(numbers: &[f32]) -> u32 {
        numbers[0].to_bits()
    }
}

/// A bfloat16: the upper half of a float32.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct BFloat16(u16);

impl BFloat16 {
    /// The number with these bits.
    #[inline(always)]
    pub(crate) fn from_bits(bits: u16) -> Self {
        Self(bits)
    }

    /// The least bfloat16 that is no less than a number of at least 0; NaN stays NaN.
    pub(crate) fn at_least(number: f32) -> Self {
        if number.is_nan() {
            return Self::from_f32(number);
        }
        Self((number.to_bits().saturating_add(0xffff) >> 16) as u16)
    }
}

impl Stored for BFloat16 {
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
    fn unit(numbers: &[f32]) -> u32 {
        numbers[0].to_bits() >> 16 | numbers[1].to_bits() & 0xffff_0000
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
    /// The float16 of the lower 16 bits.
    #[inline(always)]
    pub(crate) fn from_bits(bits: u32) -> Self {
        Self((bits & 0xffff) as u16)
    }

    /// The bits of the number.
    #[inline(always)]
    pub(crate) fn to_bits(self) -> u16 {
        self.0
    }
}

impl Stored for Float16 {
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
    fn unit(numbers: &[f32]) -> u32 {
        let [low, high] =
            [numbers[0], numbers[1]].map(|number| u32::from(Self::from_f32(number).0));
        low | high << 16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bfloat16_that_is_no_less_than_a_number_is_the_least_such_and_no_number_of_none() {
        for bits in [0, 1, 0x3f80_0000, 0x3f80_0001, 0x3f81_0000, 0x7f7f_0000, 0x7f80_0000] {
            let number = f32::from_bits(bits);
            let found = BFloat16::at_least(number).to_f32();
            assert!(found >= number, "{number} and {found}");
            assert!(bits == 0 || f32::from_bits(found.to_bits() - 0x1_0000) < number);
        }
        for bits in [0x7fc0_0000, 0x7fff_e000, 0xffff_ffff, 0x7f80_0001] {
            assert!(BFloat16::at_least(f32::from_bits(bits)).to_f32().is_nan(), "{bits:#x}");
        }
    }
}
