//! One-byte keys and values of a pool, each multiplied by the scale of its key or value.
#![expect(clippy::inline_always, reason = "must become part of a function with the instructions")]

use crate::element::Lane;
use crate::number::{Float16, Stored};

/// A number of one byte.
pub(crate) trait Level: Lane {
    /// The largest level.
    const LARGEST: f32;

    /// The level nearest to a number that is no larger, ties to even; zero for NaN.
    fn nearest(number: f32) -> Self;
}

/// Whole numbers from -127 to 127.
impl Level for i8 {
    const LARGEST: f32 = 127.0;

    fn nearest(number: f32) -> Self {
        /// Has no bits after the point, so that a sum with it is rounded.
        const WHOLE: f32 = 12_582_912.0;
        #[expect(clippy::cast_possible_truncation, reason = "at most the largest")]
        let level = (number + WHOLE - WHOLE) as i8;
        level
    }
}

/// A float8 of OCP's formats: E4M3 with 3 bits of fraction, E5M2 with 2; without infinity and NaN.
///
/// Its sign is followed by the bits of a float16 without the last ones of the fraction and, in
/// E4M3, without the first of the exponent.  So it is read as a float16, and an E4M3 counts as a
/// 256th of its format's value, which the scale compensates.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Float8<const FRACTION: u32>(u8);

impl<const FRACTION: u32> Float8<FRACTION> {
    /// Bits of a float16's fraction that it lacks.
    pub(crate) const SHIFT: u32 = 10 - FRACTION;

    /// The float16 of the same number.
    #[inline(always)]
    pub(crate) fn to_float16(self) -> Float16 {
        let bits = u32::from(self.0);
        Float16::from_bits((bits & 0x80) << 8 | (bits & 0x7f) << Self::SHIFT)
    }
}

impl<const FRACTION: u32> Level for Float8<FRACTION> {
    const LARGEST: f32 = if FRACTION == 3 { 448.0 / 256.0 } else { 57_344.0 };

    fn nearest(number: f32) -> Self {
        /// Smallest normal number of float16, and of either format.
        const SMALLEST_NORMAL: f32 = 6.103_515_6e-5;
        let number = if number.is_nan() { 0.0 } else { number };
        let power = f32::from_bits(number.to_bits() & 0x7f80_0000).max(SMALLEST_NORMAL);
        // In a float32 of this size the last bit is worth that of the level.
        let large = power * f32::from_bits((127 + 23 - FRACTION) << 23) * 1.5;
        let bits = Float16::from_f32(number + large - large).to_bits();
        #[expect(clippy::cast_possible_truncation, reason = "the sign, then 7 bits")]
        let byte = (bits >> 8 & 0x80 | bits >> Self::SHIFT & 0x7f) as u8;
        Self(byte)
    }
}
