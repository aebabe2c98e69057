//! AVX2 and AVX-512.
//!
//! Each intrinsic is sound under the promise of [`Vectors`]: the CPU has the instruction, the pointer
//! is valid.
#![expect(unsafe_code, reason = "intrinsics")]
#![expect(clippy::inline_always, reason = "must become part of a function with the instructions")]

#[allow(clippy::wildcard_imports, reason = "every second word of this file is an intrinsic")]
use std::arch::x86_64::*;

use crate::level::Float8;
use crate::number::{BFloat16, Float16};
use crate::vectors::{Instructions, Kernel, Vectors, multiply_pairs, store_each};

/// Applies an intrinsic to both halves.
macro_rules! halves {
    ($function:expr, $($vector:expr),+) => {
        ($function($($vector.0),+), $function($($vector.1),+))
    };
}

pub(crate) mod amx;
mod dots;

/// A kernel as a function with the instructions of a set.
///
/// Methods of each kernel, not functions: the compiler divides a crate among cores by module, and
/// these belong to the module of the kernel.
trait X86Kernel: Kernel + Sized {
    /// Runs it with AVX2, FMA and F16C.
    ///
    /// # Safety
    /// As the kernel's; the CPU has all three.
    #[inline(never)]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn run_avx2(self) {
        // SAFETY: the caller's promise.
        unsafe { self.run::<Avx2>() }
    }

    /// Runs it with AVX-512.
    ///
    /// # Safety
    /// As the kernel's; the CPU has the instructions.
    #[inline(never)]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn run_avx512(self) {
        // SAFETY: the caller's promise.
        unsafe { self.run::<Avx512<false>>() }
    }

    /// Runs it with AVX-512 and its dot products of bfloat16 and of bytes.
    ///
    /// # Safety
    /// As the kernel's; the CPU has the instructions.
    #[inline(never)]
    #[target_feature(
        enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni"
    )]
    unsafe fn run_avx512_bf16(self) {
        // SAFETY: the caller's promise.
        unsafe { self.run::<Avx512<true>>() }
    }
}

impl<K: Kernel> X86Kernel for K {}

// SAFETY of these blocks: the promise of `call`.
impl Instructions for Avx2 {
    #[inline(always)]
    unsafe fn call<K: Kernel>(kernel: K) {
        unsafe { kernel.run_avx2() }
    }
}

impl<const HAS_DOT: bool> Instructions for Avx512<HAS_DOT> {
    #[inline(always)]
    unsafe fn call<K: Kernel>(kernel: K) {
        unsafe { if HAS_DOT { kernel.run_avx512_bf16() } else { kernel.run_avx512() } }
    }
}

/// One register for sixteen numbers; whether it has dot products of bfloat16.
pub(crate) struct Avx512<const HAS_DOT: bool>;

/// The first of a pair lies in the lower half of its word.
const SECOND: u32 = 0xffff_0000;
const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;

/// A pair of float16, in the first two lanes.
#[inline(always)]
unsafe fn pair_f16(pair: *const u32) -> __m128 {
    unsafe { _mm_cvtph_ps(_mm_cvtsi32_si128(pair.cast::<i32>().read_unaligned())) }
}

/// Sixteen float16 of the same numbers.
#[inline(always)]
unsafe fn float16_of<const FRACTION: u32>(from: *const Float8<FRACTION>) -> __m256i {
    unsafe {
        let words = _mm256_cvtepi8_epi16(_mm_loadu_si128(from.cast()));
        let shift = _mm_cvtsi32_si128(Float8::<FRACTION>::SHIFT.cast_signed());
        let mask =
            _mm256_set1_epi16((0x8000_u16 | 0x7f << Float8::<FRACTION>::SHIFT).cast_signed());
        _mm256_and_si256(_mm256_sll_epi16(words, shift), mask)
    }
}

// SAFETY of all blocks below: the promise of `Vectors`.
impl<const HAS_DOT: bool> Vectors for Avx512<HAS_DOT> {
    type V = __m512;
    const MAX_ROWS: usize = 6;
    const MAX_VECTORS: usize = 4;

    #[inline(always)]
    unsafe fn splat(number: f32) -> __m512 {
        unsafe { _mm512_set1_ps(number) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn store(numbers: __m512, to: *mut f32) {
        unsafe { _mm512_storeu_ps(to, numbers) }
    }

    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn multiply_add(a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn min(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_min_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn exchange<const DISTANCE: usize>(a: __m512) -> __m512 {
        unsafe {
            match DISTANCE {
                1 => _mm512_permute_ps::<0b10_11_00_01>(a),
                2 => _mm512_permute_ps::<0b01_00_11_10>(a),
                4 => _mm512_shuffle_f32x4::<0b10_11_00_01>(a, a),
                _ => _mm512_shuffle_f32x4::<0b01_00_11_10>(a, a),
            }
        }
    }

    #[inline(always)]
    unsafe fn round(a: __m512) -> __m512 {
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT }>(a) }
    }

    #[inline(always)]
    unsafe fn power_of_two(whole: __m512) -> __m512 {
        unsafe {
            let biased = _mm512_add_epi32(_mm512_cvtps_epi32(whole), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
        }
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u32) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }

    #[inline(always)]
    unsafe fn load_bfloat16(from: *const BFloat16) -> __m512 {
        unsafe {
            let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
        }
    }

    #[inline(always)]
    unsafe fn load_int8(from: *const i8) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn load_float8<const FRACTION: u32>(from: *const Float8<FRACTION>) -> __m512 {
        unsafe { _mm512_cvtph_ps(float16_of(from)) }
    }

    #[inline(always)]
    unsafe fn first_of_pairs(pairs: __m512) -> __m512 {
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_castps_si512(pairs))) }
    }

    #[inline(always)]
    unsafe fn second_of_pairs(pairs: __m512) -> __m512 {
        unsafe {
            let second = _mm512_set1_epi32(SECOND.cast_signed());
            _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(pairs), second))
        }
    }

    #[inline(always)]
    unsafe fn dot_pairs(sum: __m512, pair: *const u32, pairs: __m512) -> __m512 {
        unsafe {
            if HAS_DOT {
                let pair = _mm512_set1_epi32(pair.cast::<i32>().read_unaligned());
                return _mm512_dpbf16_ps(
                    sum,
                    std::mem::transmute::<__m512i, __m512bh>(pair),
                    std::mem::transmute::<__m512, __m512bh>(pairs),
                );
            }
            multiply_pairs::<Self>(sum, pair, pairs)
        }
    }

    #[inline(always)]
    unsafe fn store_pairs(numbers: __m512, to: *mut u32) {
        unsafe {
            if HAS_DOT {
                let pairs = _mm512_cvtneps_pbh(numbers);
                let pairs = std::mem::transmute::<__m256bh, __m256i>(pairs);
                return _mm256_storeu_si256(to.cast(), pairs);
            }
            store_each::<Self, BFloat16>(numbers, to);
        }
    }

    #[inline(always)]
    unsafe fn load_float16(from: *const Float16) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }

    #[inline(always)]
    unsafe fn widen_pairs_f16(pairs: __m512) -> (__m512, __m512) {
        unsafe {
            // The first of all pairs, then the second.
            let order = _mm512_set_epi16(
                31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1, 30, 28, 26, 24, 22, 20,
                18, 16, 14, 12, 10, 8, 6, 4, 2, 0,
            );
            let pairs = _mm512_permutexvar_epi16(order, _mm512_castps_si512(pairs));
            let first = _mm512_cvtph_ps(_mm512_castsi512_si256(pairs));
            (first, _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(pairs)))
        }
    }

    #[inline(always)]
    unsafe fn dot_pairs_f16(sum: __m512, pair: *const u32, pairs: __m512) -> __m512 {
        unsafe {
            let pair = pair_f16(pair);
            let (first, second) = Self::widen_pairs_f16(pairs);
            let low = _mm512_fmadd_ps(_mm512_broadcastss_ps(pair), first, sum);
            _mm512_fmadd_ps(_mm512_broadcastss_ps(_mm_movehdup_ps(pair)), second, low)
        }
    }

    #[inline(always)]
    unsafe fn store_pairs_f16(numbers: __m512, to: *mut u32) {
        unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<NEAREST>(numbers)) }
    }
}

/// Two registers for sixteen numbers.
pub(crate) struct Avx2;

// SAFETY of all blocks below: the promise of `Vectors`.
impl Vectors for Avx2 {
    type V = (__m256, __m256);
    const MAX_ROWS: usize = 6;
    const MAX_VECTORS: usize = 1;

    #[inline(always)]
    unsafe fn splat(number: f32) -> Self::V {
        let half = unsafe { _mm256_set1_ps(number) };
        (half, half)
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::V {
        unsafe { (_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
    }

    #[inline(always)]
    unsafe fn store(numbers: Self::V, to: *mut f32) {
        unsafe {
            _mm256_storeu_ps(to, numbers.0);
            _mm256_storeu_ps(to.add(8), numbers.1);
        }
    }

    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        unsafe { halves!(_mm256_add_ps, a, b) }
    }

    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        unsafe { halves!(_mm256_mul_ps, a, b) }
    }

    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        unsafe { halves!(_mm256_div_ps, a, b) }
    }

    #[inline(always)]
    unsafe fn multiply_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        unsafe { halves!(_mm256_fmadd_ps, a, b, c) }
    }

    #[inline(always)]
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V {
        unsafe { halves!(_mm256_min_ps, a, b) }
    }

    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        unsafe { halves!(_mm256_max_ps, a, b) }
    }

    #[inline(always)]
    unsafe fn exchange<const DISTANCE: usize>(a: Self::V) -> Self::V {
        unsafe {
            match DISTANCE {
                1 => halves!(_mm256_permute_ps::<0b10_11_00_01>, a),
                2 => halves!(_mm256_permute_ps::<0b01_00_11_10>, a),
                4 => (_mm256_permute2f128_ps::<1>(a.0, a.0), _mm256_permute2f128_ps::<1>(a.1, a.1)),
                _ => (a.1, a.0),
            }
        }
    }

    #[inline(always)]
    unsafe fn round(a: Self::V) -> Self::V {
        unsafe { halves!(_mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>, a) }
    }

    #[inline(always)]
    unsafe fn power_of_two(whole: Self::V) -> Self::V {
        unsafe {
            let bias = _mm256_set1_epi32(127);
            let low = _mm256_add_epi32(_mm256_cvtps_epi32(whole.0), bias);
            let high = _mm256_add_epi32(_mm256_cvtps_epi32(whole.1), bias);
            (
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(high)),
            )
        }
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u32) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }

    #[inline(always)]
    unsafe fn load_bfloat16(from: *const BFloat16) -> Self::V {
        unsafe {
            let half = |at: *const BFloat16| {
                let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))
            };
            (half(from), half(from.add(8)))
        }
    }

    #[inline(always)]
    unsafe fn load_int8(from: *const i8) -> Self::V {
        unsafe {
            let half = |at: *const i8| {
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(at.cast())))
            };
            (half(from), half(from.add(8)))
        }
    }

    #[inline(always)]
    unsafe fn load_float8<const FRACTION: u32>(from: *const Float8<FRACTION>) -> Self::V {
        unsafe {
            let numbers = float16_of(from);
            let second = _mm256_extracti128_si256::<1>(numbers);
            (_mm256_cvtph_ps(_mm256_castsi256_si128(numbers)), _mm256_cvtph_ps(second))
        }
    }

    #[inline(always)]
    unsafe fn first_of_pairs(pairs: Self::V) -> Self::V {
        unsafe {
            let first = |pairs: __m256| {
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_castps_si256(pairs)))
            };
            (first(pairs.0), first(pairs.1))
        }
    }

    #[inline(always)]
    unsafe fn second_of_pairs(pairs: Self::V) -> Self::V {
        unsafe {
            let second = _mm256_castsi256_ps(_mm256_set1_epi32(SECOND.cast_signed()));
            (_mm256_and_ps(pairs.0, second), _mm256_and_ps(pairs.1, second))
        }
    }

    #[inline(always)]
    unsafe fn load_float16(from: *const Float16) -> Self::V {
        unsafe {
            let half = |at: *const Float16| _mm256_cvtph_ps(_mm_loadu_si128(at.cast()));
            (half(from), half(from.add(8)))
        }
    }

    #[inline(always)]
    unsafe fn widen_pairs_f16(pairs: Self::V) -> (Self::V, Self::V) {
        unsafe {
            let (first, second) = (widen_half_f16(pairs.0), widen_half_f16(pairs.1));
            ((first.0, second.0), (first.1, second.1))
        }
    }

    #[inline(always)]
    unsafe fn dot_pairs_f16(sum: Self::V, pair: *const u32, pairs: Self::V) -> Self::V {
        unsafe {
            let pair = pair_f16(pair);
            let first = _mm256_broadcastss_ps(pair);
            let second = _mm256_broadcastss_ps(_mm_movehdup_ps(pair));
            let (firsts, seconds) = Self::widen_pairs_f16(pairs);
            let low = Self::multiply_add((first, first), firsts, sum);
            Self::multiply_add((second, second), seconds, low)
        }
    }

    #[inline(always)]
    unsafe fn store_pairs_f16(numbers: Self::V, to: *mut u32) {
        unsafe {
            _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<NEAREST>(numbers.0));
            _mm_storeu_si128(to.add(4).cast(), _mm256_cvtps_ph::<NEAREST>(numbers.1));
        }
    }
}

#[inline(always)]
unsafe fn widen_half_f16(pairs: __m256) -> (__m256, __m256) {
    unsafe {
        // In each half of the register the first of all pairs, then the second; then in the whole.
        let order = _mm256_broadcastsi128_si256(_mm_set_epi8(
            15, 14, 11, 10, 7, 6, 3, 2, 13, 12, 9, 8, 5, 4, 1, 0,
        ));
        let pairs = _mm256_shuffle_epi8(_mm256_castps_si256(pairs), order);
        let pairs = _mm256_permute4x64_epi64::<0b11_01_10_00>(pairs);
        let first = _mm256_cvtph_ps(_mm256_castsi256_si128(pairs));
        (first, _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(pairs)))
    }
}
