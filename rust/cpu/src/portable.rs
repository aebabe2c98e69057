//! Vectors as arrays: any CPU, as fast as the compiler makes it.
#![expect(unsafe_code, reason = "implements a trait whose other implementations need it")]
#![expect(clippy::inline_always, reason = "a call for each vector would cost more than its work")]

use crate::bytes::Dots;
use crate::number::{Float16, PANEL, Stored};
use crate::vectors::{Instructions, Vectors};

/// Sixteen numbers in an array.
pub(crate) struct Portable;

type V = [f32; PANEL];

#[inline(always)]
fn each(a: V, b: V, f: impl Fn(f32, f32) -> f32) -> V {
    let mut result = a;
    for lane in 0..PANEL {
        result[lane] = f(a[lane], b[lane]);
    }
    result
}

impl Instructions for Portable {}

impl Vectors for Portable {
    type V = V;
    const MAX_ROWS: usize = 2;
    const MAX_VECTORS: usize = 1;

    #[inline(always)]
    unsafe fn splat(number: f32) -> V {
        [number; PANEL]
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> V {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<V>().read() }
    }

    #[inline(always)]
    unsafe fn store(numbers: V, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<V>().write(numbers) }
    }

    #[inline(always)]
    unsafe fn add(a: V, b: V) -> V {
        each(a, b, |a, b| a + b)
    }

    #[inline(always)]
    unsafe fn mul(a: V, b: V) -> V {
        each(a, b, |a, b| a * b)
    }

    #[inline(always)]
    unsafe fn div(a: V, b: V) -> V {
        each(a, b, |a, b| a / b)
    }

    #[inline(always)]
    unsafe fn multiply_add(a: V, b: V, c: V) -> V {
        each(each(a, b, |a, b| a * b), c, |a, b| a + b)
    }

    #[inline(always)]
    unsafe fn min(a: V, b: V) -> V {
        each(a, b, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    unsafe fn max(a: V, b: V) -> V {
        each(a, b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    unsafe fn round(a: V) -> V {
        // Numbers of this size have no bits below one.
        const MAGIC: f32 = 12_582_912.0;
        each(a, [MAGIC; PANEL], |a, magic| (a + magic) - magic)
    }

    #[inline(always)]
    unsafe fn power_of_two(whole: V) -> V {
        // The same size again, in whose lowest bits the whole number lies; 127 is the bias.
        const MAGIC: f32 = 12_582_912.0 + 127.0;
        each(whole, [MAGIC; PANEL], |a, magic| f32::from_bits((a + magic).to_bits() << 23))
    }

    #[inline(always)]
    unsafe fn first_of_pairs(pairs: V) -> V {
        pairs.map(|pair| f32::from_bits(pair.to_bits() << 16))
    }

    #[inline(always)]
    unsafe fn second_of_pairs(pairs: V) -> V {
        pairs.map(|pair| f32::from_bits(pair.to_bits() & 0xffff_0000))
    }

    #[inline(always)]
    unsafe fn widen_pairs_f16(pairs: V) -> (V, V) {
        let half = |bits: u32| Float16::from_bits(bits).to_f32();
        (pairs.map(|pair| half(pair.to_bits())), pairs.map(|pair| half(pair.to_bits() >> 16)))
    }

    #[inline(always)]
    unsafe fn dot_pairs_f16(sum: V, pair: *const u32, pairs: V) -> V {
        // SAFETY: the caller's promise.
        let pair = unsafe { pair.read() };
        let halves = |bits: u32| {
            (Float16::from_bits(bits).to_f32(), Float16::from_bits(bits >> 16).to_f32())
        };
        let (low, high) = halves(pair);
        let mut result = sum;
        for lane in 0..PANEL {
            let (first, second) = halves(pairs[lane].to_bits());
            result[lane] += first * low;
            result[lane] += second * high;
        }
        result
    }
}

/// Four bytes of each lane.
type Quads = [[u8; 4]; PANEL];

#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "constant bounds over several arrays at once")]
fn dots(
    mut sums: [i32; PANEL],
    row: [i8; 4],
    weights: impl Fn(usize, usize) -> i32,
) -> [i32; PANEL] {
    for lane in 0..PANEL {
        for byte in 0..4 {
            let product = i32::from(row[byte]).wrapping_mul(weights(lane, byte));
            sums[lane] = sums[lane].wrapping_add(product);
        }
    }
    sums
}

impl Dots for Portable {
    type Sums = [i32; PANEL];
    type Few = ();
    type Quads = Quads;
    type Signed = Quads;
    type Row = [i8; 4];
    const DOT_ROWS: usize = 2;

    #[inline(always)]
    unsafe fn start(number: i32) -> Self::Sums {
        [number; PANEL]
    }

    #[inline(always)]
    unsafe fn no_few() {}

    #[inline(always)]
    unsafe fn load_quads(from: *const u8) -> Quads {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<Quads>().read() }
    }

    #[inline(always)]
    unsafe fn load_bits(from: *const u8, from_bit: i32, mask: u8) -> Quads {
        // SAFETY: the caller's promise.
        unsafe { Self::load_quads(from) }.map(|four| four.map(|byte| byte >> from_bit & mask))
    }

    #[inline(always)]
    unsafe fn join(low: Quads, high: Quads) -> Quads {
        std::array::from_fn(|lane| {
            std::array::from_fn(|byte| low[lane][byte] | high[lane][byte] << 4)
        })
    }

    #[inline(always)]
    unsafe fn add_fifth_bits(low: Quads, words: *const u8, quad: usize) -> Quads {
        // SAFETY: the caller's promise.
        let words = unsafe { Self::load_quads(words) };
        let fifth = |lane: usize, byte| words[lane][quad / 2] >> (quad % 2 * 4 + byte) & 1;
        let high = std::array::from_fn(|lane| std::array::from_fn(|byte| fifth(lane, byte)));
        // SAFETY: every CPU has what these need.
        unsafe { Self::join(low, high) }
    }

    #[inline(always)]
    unsafe fn store_quads(quads: Quads, to: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<Quads>().write(quads) }
    }

    #[inline(always)]
    unsafe fn look_up(table: &[i8; 16], places: Quads) -> Quads {
        places.map(|four| four.map(|place| table[usize::from(place)].cast_unsigned()))
    }

    #[inline(always)]
    unsafe fn signed(weights: Quads) -> Quads {
        weights
    }

    #[inline(always)]
    unsafe fn broadcast(row: *const i8) -> [i8; 4] {
        // SAFETY: the caller's promise.
        unsafe { row.cast::<[i8; 4]>().read() }
    }

    #[inline(always)]
    unsafe fn dot_signed(sums: Self::Sums, row: [i8; 4], weights: Quads) -> Self::Sums {
        dots(sums, row, |lane, byte| i32::from(weights[lane][byte].cast_signed()))
    }

    #[inline(always)]
    unsafe fn dot_small(
        (sums, ()): (Self::Sums, ()),
        row: [i8; 4],
        weights: Quads,
    ) -> (Self::Sums, ()) {
        (dots(sums, row, |lane, byte| i32::from(weights[lane][byte])), ())
    }

    #[inline(always)]
    unsafe fn flush((sums, ()): (Self::Sums, ())) -> Self::Sums {
        sums
    }

    #[inline(always)]
    unsafe fn to_floats(sums: Self::Sums) -> V {
        #[expect(clippy::cast_precision_loss, reason = "rounded as vectors round it")]
        sums.map(|sum| sum as f32)
    }
}
