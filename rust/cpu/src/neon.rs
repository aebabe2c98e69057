//! NEON, which every `AArch64` CPU has.
//!
//! Each intrinsic is sound under the promise of [`Vectors`]: the pointer is valid.
#![expect(unsafe_code, reason = "intrinsics")]
#![expect(clippy::inline_always, reason = "must become part of a function with the instructions")]

#[allow(clippy::wildcard_imports, reason = "every second word of this file is an intrinsic")]
use std::arch::aarch64::*;
use std::arch::asm;

use crate::bytes::Dots;
use crate::number::{BFloat16, Float16};
use crate::vectors::{Instructions, Vectors};

/// Four registers for sixteen numbers: a tile of six rows takes 24 of the 32.
pub(crate) struct Neon;

/// Applies an intrinsic to all four registers.
macro_rules! quarters {
    ($function:expr, $($vector:expr),+) => {
        float32x4x4_t(
            $function($($vector.0),+),
            $function($($vector.1),+),
            $function($($vector.2),+),
            $function($($vector.3),+),
        )
    };
}

/// Four float16 as float32.  The intrinsic needs a newer compiler than the workspace does.
#[inline(always)]
unsafe fn widen_f16(halves: uint16x4_t) -> float32x4_t {
    let numbers: float32x4_t;
    // SAFETY: an instruction of every AArch64 CPU, on registers alone.
    unsafe {
        asm!(
            "fcvtl {numbers:v}.4s, {halves:v}.4h",
            numbers = lateout(vreg) numbers,
            halves = in(vreg) halves,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    numbers
}

/// The firsts of four pairs of float16.
#[inline(always)]
unsafe fn first_f16(pairs: float32x4_t) -> float32x4_t {
    unsafe { widen_f16(vmovn_u32(vreinterpretq_u32_f32(pairs))) }
}

/// The seconds of four pairs of float16.
#[inline(always)]
unsafe fn second_f16(pairs: float32x4_t) -> float32x4_t {
    unsafe { widen_f16(vshrn_n_u32::<16>(vreinterpretq_u32_f32(pairs))) }
}

/// Four float32 as the nearest float16, ties to even.
#[inline(always)]
unsafe fn narrow_f16(numbers: float32x4_t) -> uint16x4_t {
    let halves: uint16x4_t;
    // SAFETY: an instruction of every AArch64 CPU, on registers alone.
    unsafe {
        asm!(
            "fcvtn {halves:v}.4h, {numbers:v}.4s",
            halves = lateout(vreg) halves,
            numbers = in(vreg) numbers,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    halves
}

// SAFETY of all blocks below: the promise of `Vectors`.
impl Instructions for Neon {}

impl Vectors for Neon {
    type V = float32x4x4_t;
    const MAX_ROWS: usize = 6;
    const MAX_VECTORS: usize = 1;

    #[inline(always)]
    unsafe fn splat(number: f32) -> Self::V {
        let quarter = unsafe { vdupq_n_f32(number) };
        float32x4x4_t(quarter, quarter, quarter, quarter)
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::V {
        unsafe { vld1q_f32_x4(from) }
    }

    #[inline(always)]
    unsafe fn store(numbers: Self::V, to: *mut f32) {
        unsafe { vst1q_f32_x4(to, numbers) }
    }

    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        unsafe { quarters!(vaddq_f32, a, b) }
    }

    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        unsafe { quarters!(vmulq_f32, a, b) }
    }

    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        unsafe { quarters!(vdivq_f32, a, b) }
    }

    #[inline(always)]
    unsafe fn multiply_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        unsafe { quarters!(vfmaq_f32, c, a, b) }
    }

    #[inline(always)]
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V {
        // The instruction for the minimum returns NaN if `a` is NaN.
        let min = |a, b| unsafe { vbslq_f32(vcltq_f32(a, b), a, b) };
        quarters!(min, a, b)
    }

    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        let max = |a, b| unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) };
        quarters!(max, a, b)
    }

    #[inline(always)]
    unsafe fn round(a: Self::V) -> Self::V {
        unsafe { quarters!(vrndnq_f32, a) }
    }

    #[inline(always)]
    unsafe fn power_of_two(whole: Self::V) -> Self::V {
        let power = |whole| unsafe {
            let biased = vaddq_s32(vcvtq_s32_f32(whole), vdupq_n_s32(127));
            vreinterpretq_f32_s32(vshlq_n_s32::<23>(biased))
        };
        quarters!(power, whole)
    }

    #[inline(always)]
    unsafe fn load_bfloat16(from: *const BFloat16) -> Self::V {
        let widen = |halves| unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(halves)) };
        let halves = unsafe { vld1_u16_x4(from.cast()) };
        quarters!(widen, halves)
    }

    #[inline(always)]
    unsafe fn load_float16(from: *const Float16) -> Self::V {
        unsafe {
            let halves = vld1_u16_x4(from.cast());
            quarters!(widen_f16, halves)
        }
    }

    #[inline(always)]
    unsafe fn load_int8(from: *const i8) -> Self::V {
        unsafe {
            let bytes = vld1q_s8(from);
            let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
            float32x4x4_t(
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
                vcvtq_f32_s32(vmovl_high_s16(low)),
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
                vcvtq_f32_s32(vmovl_high_s16(high)),
            )
        }
    }

    #[inline(always)]
    unsafe fn first_of_pairs(pairs: Self::V) -> Self::V {
        let first = |pairs| unsafe {
            vreinterpretq_f32_u32(vshlq_n_u32::<16>(vreinterpretq_u32_f32(pairs)))
        };
        quarters!(first, pairs)
    }

    #[inline(always)]
    unsafe fn second_of_pairs(pairs: Self::V) -> Self::V {
        let second = |pairs| unsafe {
            let upper = vdupq_n_u32(0xffff_0000);
            vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(pairs), upper))
        };
        quarters!(second, pairs)
    }

    #[inline(always)]
    unsafe fn widen_pairs_f16(pairs: Self::V) -> (Self::V, Self::V) {
        unsafe { (quarters!(first_f16, pairs), quarters!(second_f16, pairs)) }
    }

    #[inline(always)]
    unsafe fn dot_pairs_f16(sum: Self::V, pair: *const u32, pairs: Self::V) -> Self::V {
        unsafe {
            let pair = widen_f16(vreinterpret_u16_u32(vdup_n_u32(pair.read_unaligned())));
            let dot = |sum, pairs| {
                let (first, second) = (first_f16(pairs), second_f16(pairs));
                vfmaq_laneq_f32::<1>(vfmaq_laneq_f32::<0>(sum, first, pair), second, pair)
            };
            quarters!(dot, sum, pairs)
        }
    }

    #[inline(always)]
    unsafe fn store_pairs_f16(numbers: Self::V, to: *mut u32) {
        unsafe {
            let halves = uint16x4x4_t(
                narrow_f16(numbers.0),
                narrow_f16(numbers.1),
                narrow_f16(numbers.2),
                narrow_f16(numbers.3),
            );
            vst1_u16_x4(to.cast(), halves);
        }
    }
}

/// Four whole numbers in each of four registers.
type Sums = int32x4x4_t;

// SAFETY of all blocks below: the promise of `Vectors`.
impl Dots for Neon {
    type Sums = Sums;
    type Few = ();
    type Quads = int8x16x4_t;
    type Signed = int8x16x4_t;
    type Row = int8x16_t;
    const DOT_ROWS: usize = 4;

    #[inline(always)]
    unsafe fn start(number: i32) -> Sums {
        let quarter = unsafe { vdupq_n_s32(number) };
        int32x4x4_t(quarter, quarter, quarter, quarter)
    }

    #[inline(always)]
    unsafe fn no_few() {}

    #[inline(always)]
    unsafe fn load_quads(from: *const u8) -> int8x16x4_t {
        unsafe { vld1q_s8_x4(from.cast()) }
    }

    #[inline(always)]
    unsafe fn load_bits(from: *const u8, from_bit: i32, mask: u8) -> int8x16x4_t {
        unsafe {
            #[expect(clippy::cast_possible_truncation, reason = "up to 7")]
            let (down, mask) = (vdupq_n_s8(-from_bit as i8), vdupq_n_s8(mask.cast_signed()));
            // Shifted as unsigned bytes.
            let bits = |weights| {
                let weights = vshlq_u8(vreinterpretq_u8_s8(weights), down);
                vandq_s8(vreinterpretq_s8_u8(weights), mask)
            };
            let int8x16x4_t(a, b, c, d) = Self::load_quads(from);
            int8x16x4_t(bits(a), bits(b), bits(c), bits(d))
        }
    }

    #[inline(always)]
    unsafe fn join(low: int8x16x4_t, high: int8x16x4_t) -> int8x16x4_t {
        let join = |low, high| unsafe { vorrq_s8(low, vshlq_n_s8::<4>(high)) };
        int8x16x4_t(
            join(low.0, high.0),
            join(low.1, high.1),
            join(low.2, high.2),
            join(low.3, high.3),
        )
    }

    #[inline(always)]
    unsafe fn add_fifth_bits(low: int8x16x4_t, words: *const u8, quad: usize) -> int8x16x4_t {
        unsafe {
            #[expect(clippy::cast_possible_truncation, reason = "up to 15")]
            let places: [u8; 16] = std::array::from_fn(|byte| (byte / 4 * 4 + quad / 2) as u8);
            let bits: [u8; 16] = std::array::from_fn(|byte| 1 << (quad % 2 * 4 + byte % 4));
            let (places, bits) = (vld1q_u8(places.as_ptr()), vld1q_s8(bits.as_ptr().cast()));
            let add = |low, words| {
                let is_set = vtstq_s8(vqtbl1q_s8(words, places), bits);
                vorrq_s8(low, vandq_s8(vreinterpretq_s8_u8(is_set), vdupq_n_s8(16)))
            };
            let int8x16x4_t(a, b, c, d) = Self::load_quads(words);
            int8x16x4_t(add(low.0, a), add(low.1, b), add(low.2, c), add(low.3, d))
        }
    }

    #[inline(always)]
    unsafe fn store_quads(quads: int8x16x4_t, to: *mut u8) {
        unsafe { vst1q_s8_x4(to.cast(), quads) }
    }

    #[inline(always)]
    unsafe fn look_up(table: &[i8; 16], places: int8x16x4_t) -> int8x16x4_t {
        unsafe {
            let table = vld1q_s8(table.as_ptr());
            let look_up = |places| vqtbl1q_s8(table, vreinterpretq_u8_s8(places));
            let int8x16x4_t(a, b, c, d) = places;
            int8x16x4_t(look_up(a), look_up(b), look_up(c), look_up(d))
        }
    }

    #[inline(always)]
    unsafe fn signed(weights: int8x16x4_t) -> int8x16x4_t {
        weights
    }

    #[inline(always)]
    unsafe fn broadcast(row: *const i8) -> int8x16_t {
        unsafe { vreinterpretq_s8_s32(vdupq_n_s32(row.cast::<i32>().read_unaligned())) }
    }

    #[inline(always)]
    unsafe fn dot_signed(sums: Sums, row: int8x16_t, weights: int8x16x4_t) -> Sums {
        // Two products of at most 128 * 127 fit 16 bits.
        let dot = |sum, weights| unsafe {
            let low = vmull_s8(vget_low_s8(weights), vget_low_s8(row));
            vpadalq_s16(sum, vpaddq_s16(low, vmull_high_s8(weights, row)))
        };
        int32x4x4_t(
            dot(sums.0, weights.0),
            dot(sums.1, weights.1),
            dot(sums.2, weights.2),
            dot(sums.3, weights.3),
        )
    }

    #[inline(always)]
    unsafe fn dot_small(
        (sums, ()): (Sums, ()),
        row: int8x16_t,
        weights: int8x16x4_t,
    ) -> (Sums, ()) {
        (unsafe { Self::dot_signed(sums, row, weights) }, ())
    }

    #[inline(always)]
    unsafe fn flush((sums, ()): (Sums, ())) -> Sums {
        sums
    }

    #[inline(always)]
    unsafe fn to_floats(sums: Sums) -> Self::V {
        unsafe { quarters!(vcvtq_f32_s32, sums) }
    }
}
