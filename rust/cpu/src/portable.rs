//! Vectors as arrays: any CPU, as fast as the compiler makes it.
#![expect(unsafe_code, reason = "implements a trait whose other implementations need it")]
#![expect(clippy::inline_always, reason = "a call for each vector would cost more than its work")]

use crate::number::{Float16, PANEL, Stored};
use crate::vectors::Vectors;

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
