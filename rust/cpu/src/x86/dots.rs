//! Dot products of bytes with AVX2 and AVX-512.

#[allow(clippy::wildcard_imports, reason = "every second word of this file is an intrinsic")]
use std::arch::x86_64::*;

use crate::bytes::Dots;
use crate::x86::{Avx2, Avx512};

// SAFETY of all blocks below: the promise of `Dots`.
/// Places of the bytes that hold bits `4 * quad` to `4 * quad + 3` of each word, and one of these
/// bits in each byte of a word.
#[inline(always)]
unsafe fn fifth_bits(quad: usize) -> (__m128i, i32) {
    unsafe {
        #[expect(clippy::cast_possible_truncation, reason = "up to 3")]
        let byte = _mm_set1_epi8((quad / 2) as i8);
        let first = _mm_set_epi8(12, 12, 12, 12, 8, 8, 8, 8, 4, 4, 4, 4, 0, 0, 0, 0);
        let bits = 0x0804_0201_u32 << (quad % 2 * 4);
        (_mm_add_epi8(first, byte), bits.cast_signed())
    }
}

impl Dots for Avx2 {
    type Sums = (__m256i, __m256i);
    /// Sums of pairs of 16 bits.
    type Few = (__m256i, __m256i);
    type Quads = (__m256i, __m256i);
    /// The weights, and their magnitudes.
    type Signed = [(__m256i, __m256i); 2];
    type Row = __m256i;
    const DOT_ROWS: usize = 4;

    #[inline(always)]
    unsafe fn start(number: i32) -> Self::Sums {
        let half = unsafe { _mm256_set1_epi32(number) };
        (half, half)
    }

    #[inline(always)]
    unsafe fn no_few() -> Self::Few {
        unsafe { Self::start(0) }
    }

    #[inline(always)]
    unsafe fn load_quads(from: *const u8) -> Self::Quads {
        unsafe { (_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(32).cast())) }
    }

    #[inline(always)]
    unsafe fn load_bits(from: *const u8, from_bit: i32, mask: u8) -> Self::Quads {
        unsafe {
            let down = _mm_cvtsi32_si128(from_bit);
            let mask = _mm256_set1_epi8(mask.cast_signed());
            let bits = |weights| _mm256_and_si256(_mm256_srl_epi16(weights, down), mask);
            let (first, second) = Self::load_quads(from);
            (bits(first), bits(second))
        }
    }

    #[inline(always)]
    unsafe fn join(low: Self::Quads, high: Self::Quads) -> Self::Quads {
        unsafe {
            let up = (_mm256_slli_epi16::<4>(high.0), _mm256_slli_epi16::<4>(high.1));
            halves!(_mm256_or_si256, low, up)
        }
    }

    #[inline(always)]
    unsafe fn add_fifth_bits(low: Self::Quads, words: *const u8, quad: usize) -> Self::Quads {
        unsafe {
            let (places, bits) = fifth_bits(quad);
            let places = _mm256_broadcastsi128_si256(places);
            let bits = _mm256_set1_epi32(bits);
            let high = |words| {
                let masked = _mm256_and_si256(_mm256_shuffle_epi8(words, places), bits);
                _mm256_and_si256(_mm256_cmpeq_epi8(masked, bits), _mm256_set1_epi8(16))
            };
            let (first, second) = Self::load_quads(words);
            halves!(_mm256_or_si256, low, (high(first), high(second)))
        }
    }

    #[inline(always)]
    unsafe fn store_quads(quads: Self::Quads, to: *mut u8) {
        unsafe {
            _mm256_storeu_si256(to.cast(), quads.0);
            _mm256_storeu_si256(to.add(32).cast(), quads.1);
        }
    }

    #[inline(always)]
    unsafe fn look_up(table: &[i8; 16], places: Self::Quads) -> Self::Quads {
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            (_mm256_shuffle_epi8(table, places.0), _mm256_shuffle_epi8(table, places.1))
        }
    }

    #[inline(always)]
    unsafe fn signed(weights: Self::Quads) -> Self::Signed {
        unsafe { [weights, halves!(_mm256_abs_epi8, weights)] }
    }

    #[inline(always)]
    unsafe fn broadcast(row: *const i8) -> __m256i {
        unsafe { _mm256_set1_epi32(row.cast::<i32>().read_unaligned()) }
    }

    #[inline(always)]
    unsafe fn dot_signed(sums: Self::Sums, row: __m256i, weights: Self::Signed) -> Self::Sums {
        unsafe {
            // The sign moves to the row's byte: two products of at most 128 * 127 fit 16 bits.
            let ones = _mm256_set1_epi16(1);
            let half = |weights, magnitudes, sum| {
                let pairs = _mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8(row, weights));
                _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones))
            };
            let [weights, magnitudes] = weights;
            (half(weights.0, magnitudes.0, sums.0), half(weights.1, magnitudes.1, sums.1))
        }
    }

    #[inline(always)]
    unsafe fn dot_small(
        (sums, few): (Self::Sums, Self::Few),
        row: __m256i,
        weights: Self::Quads,
    ) -> (Self::Sums, Self::Few) {
        unsafe {
            let few = (
                _mm256_add_epi16(few.0, _mm256_maddubs_epi16(weights.0, row)),
                _mm256_add_epi16(few.1, _mm256_maddubs_epi16(weights.1, row)),
            );
            (sums, few)
        }
    }

    #[inline(always)]
    unsafe fn flush((sums, few): (Self::Sums, Self::Few)) -> Self::Sums {
        unsafe {
            let ones = _mm256_set1_epi16(1);
            let few = (_mm256_madd_epi16(few.0, ones), _mm256_madd_epi16(few.1, ones));
            halves!(_mm256_add_epi32, sums, few)
        }
    }

    #[inline(always)]
    unsafe fn to_floats(sums: Self::Sums) -> Self::V {
        unsafe { halves!(_mm256_cvtepi32_ps, sums) }
    }
}

impl<const HAS_DOT: bool> Dots for Avx512<HAS_DOT> {
    type Sums = __m512i;
    /// Sums of pairs of 16 bits, without dot products.
    type Few = __m512i;
    type Quads = __m512i;
    /// The weights with 128 added; without dot products their magnitudes, and which are negative.
    type Signed = (__m512i, __mmask64);
    type Row = __m512i;
    const DOT_ROWS: usize = 6;
    const DOT_VECTORS: usize = 2;
    const WHOLE_VECTORS: usize = if HAS_DOT { 4 } else { 2 };
    // Of more, the compiler would load the bytes of all rows first, and lack registers for them.
    const WHOLE_LOADS: usize = if HAS_DOT { 1 } else { 8 };
    const CLOSED_ROWS: usize = 24;
    const SIGNED_FROM: i32 = if HAS_DOT { 128 } else { 0 };

    #[inline(always)]
    unsafe fn start(number: i32) -> __m512i {
        unsafe { _mm512_set1_epi32(number) }
    }

    #[inline(always)]
    unsafe fn no_few() -> __m512i {
        unsafe { _mm512_setzero_si512() }
    }

    #[inline(always)]
    unsafe fn load_quads(from: *const u8) -> __m512i {
        unsafe { _mm512_loadu_si512(from.cast()) }
    }

    #[inline(always)]
    unsafe fn load_bits(from: *const u8, from_bit: i32, mask: u8) -> __m512i {
        unsafe {
            let weights = _mm512_srl_epi16(Self::load_quads(from), _mm_cvtsi32_si128(from_bit));
            _mm512_and_si512(weights, _mm512_set1_epi8(mask.cast_signed()))
        }
    }

    #[inline(always)]
    unsafe fn join(low: __m512i, high: __m512i) -> __m512i {
        unsafe { _mm512_or_si512(low, _mm512_slli_epi16::<4>(high)) }
    }

    #[inline(always)]
    unsafe fn add_fifth_bits(low: __m512i, words: *const u8, quad: usize) -> __m512i {
        unsafe {
            let (places, bits) = fifth_bits(quad);
            let words = Self::load_quads(words);
            let words = _mm512_shuffle_epi8(words, _mm512_broadcast_i32x4(places));
            let is_set = _mm512_test_epi8_mask(words, _mm512_set1_epi32(bits));
            _mm512_mask_add_epi8(low, is_set, low, _mm512_set1_epi8(16))
        }
    }

    #[inline(always)]
    unsafe fn store_quads(quads: __m512i, to: *mut u8) {
        unsafe { _mm512_storeu_si512(to.cast(), quads) }
    }

    #[inline(always)]
    unsafe fn look_up(table: &[i8; 16], places: __m512i) -> __m512i {
        unsafe {
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            _mm512_shuffle_epi8(table, places)
        }
    }

    #[inline(always)]
    unsafe fn signed(weights: __m512i) -> Self::Signed {
        unsafe {
            if HAS_DOT {
                return (_mm512_xor_si512(weights, _mm512_set1_epi8(-128)), 0);
            }
            (_mm512_abs_epi8(weights), _mm512_movepi8_mask(weights))
        }
    }

    #[inline(always)]
    unsafe fn broadcast(row: *const i8) -> __m512i {
        unsafe { _mm512_set1_epi32(row.cast::<i32>().read_unaligned()) }
    }

    #[inline(always)]
    unsafe fn dot_signed(
        sums: __m512i,
        row: __m512i,
        (weights, negative): Self::Signed,
    ) -> __m512i {
        unsafe {
            if HAS_DOT {
                return _mm512_dpbusd_epi32(sums, weights, row);
            }
            let row = _mm512_mask_sub_epi8(row, negative, _mm512_setzero_si512(), row);
            let pairs = _mm512_maddubs_epi16(weights, row);
            _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
        }
    }

    #[inline(always)]
    unsafe fn dot_small(
        (sums, few): (__m512i, __m512i),
        row: __m512i,
        weights: __m512i,
    ) -> (__m512i, __m512i) {
        unsafe {
            if HAS_DOT {
                return (_mm512_dpbusd_epi32(sums, weights, row), few);
            }
            (sums, _mm512_add_epi16(few, _mm512_maddubs_epi16(weights, row)))
        }
    }

    #[inline(always)]
    unsafe fn flush((sums, few): (__m512i, __m512i)) -> __m512i {
        unsafe {
            if HAS_DOT {
                return sums;
            }
            _mm512_add_epi32(sums, _mm512_madd_epi16(few, _mm512_set1_epi16(1)))
        }
    }

    #[inline(always)]
    unsafe fn to_floats(sums: __m512i) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(sums) }
    }
}
