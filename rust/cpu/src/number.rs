//! Stored numbers, and the sizes everything is cut into.
//!
//! A *unit* is 32 bits of stored numbers: one float32 or a pair of bfloat16.  Kernels walk
//! units, whatever is in them.
#![expect(unsafe_code, reason = "loads and stores of a kernel, by kind of number")]
#![expect(clippy::inline_always, reason = "must become part of a function with the instructions")]

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
}

impl DType {
    /// Bytes of an element.
    pub const fn size(self) -> usize {
        match self {
            Self::Float32 => 4,
            Self::BFloat16 => 2,
        }
    }

    /// Elements in 32 bits.
    pub(crate) const fn per_unit(self) -> usize {
        4 / self.size()
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
