//! Functions of sixteen numbers.
#![expect(unsafe_code, reason = "vectors")]
#![expect(clippy::inline_always, reason = "must become part of a function with the instructions")]

use std::f32::consts::LOG2_E;

use crate::number::PANEL;
use crate::vectors::Vectors;

/// Combines all lanes by `f`, pairs first.
#[inline(always)]
pub(crate) unsafe fn across<I: Vectors>(numbers: I::V, f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0; PANEL];
    // SAFETY: the array holds 16 numbers.
    unsafe { I::store(numbers, lanes.as_mut_ptr()) };
    let mut width = PANEL / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] = f(lanes[lane], lanes[lane + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// `tanh(x)` of numbers `2 x log2(e)`.
#[inline(always)]
pub(crate) unsafe fn tanh_of_exponent<I: Vectors>(numbers: I::V) -> I::V {
    // SAFETY: the caller has the instructions.
    unsafe {
        // Beyond this bound tanh is 1 in float32.
        let bounded = I::max(I::splat(-26.0), I::min(I::splat(26.0), numbers));
        let power = exp2::<I>(bounded);
        let ones = I::splat(1.0);
        I::div(I::add(power, I::splat(-1.0)), I::add(power, ones))
    }
}

/// Two to the power of numbers up to 127; zero from -126.5 down.
#[inline(always)]
pub(crate) unsafe fn exp2<I: Vectors>(numbers: I::V) -> I::V {
    // SAFETY: the caller has the instructions.
    unsafe {
        let bounded = I::max(I::splat(-127.0), numbers);
        let whole = I::round(bounded);
        let rest = I::multiply_add(whole, I::splat(-1.0), bounded);
        // The series of exp(x ln 2), which is exact to float32 between -1/2 and 1/2.
        let mut power = I::splat(1.540_353e-4);
        for factor in [1.333_355_8e-3, 9.618_129e-3, 5.550_411e-2, 2.402_265e-1, 6.931_472e-1, 1.0]
        {
            power = I::multiply_add(power, rest, I::splat(factor));
        }
        I::mul(power, I::power_of_two(whole))
    }
}

/// `x / (1 + exp(-x))` (Hendrycks and Gimpel, "Gaussian Error Linear Units", section 2).
#[inline(always)]
pub(crate) unsafe fn silu<I: Vectors>(numbers: I::V) -> I::V {
    // SAFETY: the caller has the instructions.
    unsafe {
        // Beyond this bound the power overflows; the result is a denormal or zero.
        let exponent = I::min(I::splat(126.0), I::mul(numbers, I::splat(-LOG2_E)));
        I::div(numbers, I::add(I::splat(1.0), exp2::<I>(exponent)))
    }
}

/// `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))` (the same paper, section 2).
#[inline(always)]
pub(crate) unsafe fn gelu_tanh<I: Vectors>(numbers: I::V) -> I::V {
    // SAFETY: the caller has the instructions.
    unsafe {
        let cube = I::mul(I::mul(numbers, numbers), numbers);
        let inner = I::multiply_add(cube, I::splat(0.044_715), numbers);
        let exponent = I::mul(inner, I::splat(2.0 * LOG2_E * 0.797_884_6));
        let factor = I::add(I::splat(1.0), tanh_of_exponent::<I>(exponent));
        I::mul(I::mul(numbers, I::splat(0.5)), factor)
    }
}
