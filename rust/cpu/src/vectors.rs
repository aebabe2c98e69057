//! Traits of instruction sets and of kernels.
#![expect(unsafe_code, reason = "declares what kernels call; one default has a body")]
#![expect(clippy::inline_always, reason = "must become part of a function with the instructions")]

use crate::bytes::Dots;
use crate::level::Float8;
use crate::number::{BFloat16, Float16, PANEL, Stored};

/// Work that is compiled once for each instruction set.
pub(crate) trait Kernel {
    /// Runs the kernel.
    ///
    /// # Safety
    /// The CPU has the instructions of `I`, and the conditions of the kernel hold.  Implementations
    /// are inlined, so that they become part of a function with the instructions.
    unsafe fn run<I: Instructions>(self);

    /// Runs it as a function, with instructions of every CPU of the target.
    ///
    /// # Safety
    /// As [`Kernel::run`].
    #[inline(never)]
    unsafe fn run_alone<I: Instructions>(self)
    where
        Self: Sized,
    {
        // SAFETY: the caller's promise.
        unsafe { self.run::<I>() }
    }
}

/// All that a kernel uses of an instruction set.
pub(crate) trait Instructions: Dots {
    /// Runs a kernel as a function, which callers share and which is compiled separately: the time
    /// that the compiler needs grows faster than a function's length.
    ///
    /// # Safety
    /// As [`Kernel::run`].
    #[inline(always)]
    unsafe fn call<K: Kernel>(kernel: K)
    where
        Self: Sized,
    {
        // SAFETY: the caller's promise; every CPU of the target has these instructions, unless the
        // set overrides this.
        unsafe { kernel.run_alone::<Self>() }
    }
}

/// Sixteen float32 side by side.
///
/// # Safety
/// Every function may be called only where the CPU has the instructions; pointers need no
/// alignment beyond that of their type, and must be valid for 16 numbers unless noted otherwise.
/// They are inlined into a function that enables the instructions, and only there are they fast.
pub(crate) trait Vectors {
    /// Sixteen float32, or sixteen units whose bits are not interpreted.
    type V: Copy;
    /// Rows of the largest register tile.
    const MAX_ROWS: usize;
    /// Vectors of the largest register tile.
    const MAX_VECTORS: usize;

    unsafe fn splat(number: f32) -> Self::V;
    unsafe fn load(from: *const f32) -> Self::V;
    unsafe fn store(numbers: Self::V, to: *mut f32);
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`.
    unsafe fn multiply_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The smaller; `b` if one is NaN.
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// The larger; `b` if one is NaN.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// The nearest whole number, of numbers between -127 and 127.
    unsafe fn round(a: Self::V) -> Self::V;
    /// Each lane gets the number of lane `lane ^ DISTANCE`; the distance is 1, 2, 4 or 8.
    #[inline(always)]
    unsafe fn exchange<const DISTANCE: usize>(a: Self::V) -> Self::V {
        let (mut numbers, mut exchanged) = ([0.0; PANEL], [0.0; PANEL]);
        // SAFETY: the buffers have 16 numbers.
        unsafe {
            Self::store(a, numbers.as_mut_ptr());
            for lane in 0..PANEL {
                exchanged[lane] = numbers[lane ^ DISTANCE];
            }
            Self::load(exchanged.as_ptr())
        }
    }
    /// Two to the power of whole numbers from -127 to 127; zero for -127.
    unsafe fn power_of_two(whole: Self::V) -> Self::V;
    /// The first of each lane's pair of bfloat16, as float32.
    unsafe fn first_of_pairs(pairs: Self::V) -> Self::V;
    /// The second of each lane's pair of bfloat16, as float32.
    unsafe fn second_of_pairs(pairs: Self::V) -> Self::V;
    /// The firsts and the seconds of the lanes' pairs of float16, as float32.
    unsafe fn widen_pairs_f16(pairs: Self::V) -> (Self::V, Self::V);
    /// Adds the dot product of the pair of bfloat16 at `pair` with each lane's pair.
    #[inline(always)]
    unsafe fn dot_pairs(sum: Self::V, pair: *const u32, pairs: Self::V) -> Self::V {
        // SAFETY: the caller's promise.
        unsafe { multiply_pairs::<Self>(sum, pair, pairs) }
    }
    /// Adds the dot product of the pair of float16 at `pair` with each lane's pair.
    unsafe fn dot_pairs_f16(sum: Self::V, pair: *const u32, pairs: Self::V) -> Self::V;
    /// Sixteen bfloat16.
    #[inline(always)]
    unsafe fn load_bfloat16(from: *const BFloat16) -> Self::V {
        // SAFETY: the caller's promise.
        unsafe { load_each::<Self, BFloat16>(from) }
    }
    /// Sixteen float16.
    #[inline(always)]
    unsafe fn load_float16(from: *const Float16) -> Self::V {
        // SAFETY: the caller's promise.
        unsafe { load_each::<Self, Float16>(from) }
    }
    /// Sixteen whole numbers of 8 bits, as float32.
    #[inline(always)]
    unsafe fn load_int8(from: *const i8) -> Self::V {
        let mut buffer = [0.0; PANEL];
        for (index, number) in buffer.iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            *number = f32::from(unsafe { from.add(index).read() });
        }
        // SAFETY: the buffer has 16 numbers.
        unsafe { Self::load(buffer.as_ptr()) }
    }
    /// Sixteen float8, as float32.
    #[inline(always)]
    unsafe fn load_float8<const FRACTION: u32>(from: *const Float8<FRACTION>) -> Self::V {
        let mut halves = [Float16::ZERO; PANEL];
        for (index, half) in halves.iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            *half = unsafe { from.add(index).read() }.to_float16();
        }
        // SAFETY: there are 16 numbers.
        unsafe { Self::load_float16(halves.as_ptr()) }
    }
    /// Prefetches the cache line at `at`; any address is allowed.
    #[inline(always)]
    unsafe fn prefetch(_at: *const u32) {}
    /// Stores eight pairs of bfloat16, the nearest; numbers below 2^-126, which products of bfloat16
    /// may take as zero, may become zero.
    #[inline(always)]
    unsafe fn store_pairs(numbers: Self::V, to: *mut u32) {
        // SAFETY: the caller's promise.
        unsafe { store_each::<Self, BFloat16>(numbers, to) }
    }
    /// Stores eight pairs of float16.
    #[inline(always)]
    unsafe fn store_pairs_f16(numbers: Self::V, to: *mut u32) {
        // SAFETY: the caller's promise.
        unsafe { store_each::<Self, Float16>(numbers, to) }
    }
}

/// [`Vectors::dot_pairs`] as two products of float32.
///
/// # Safety
/// As [`Vectors`]; the pair can be read.
#[inline(always)]
pub(crate) unsafe fn multiply_pairs<I: Vectors + ?Sized>(
    sum: I::V,
    pair: *const u32,
    pairs: I::V,
) -> I::V {
    // SAFETY: the caller's promise.
    unsafe {
        let pair = I::splat(f32::from_bits(pair.read_unaligned()));
        let first = I::multiply_add(I::first_of_pairs(pair), I::first_of_pairs(pairs), sum);
        I::multiply_add(I::second_of_pairs(pair), I::second_of_pairs(pairs), first)
    }
}

/// Stores sixteen numbers, one after the other.
///
/// # Safety
/// As [`Vectors`]; `to` can hold 16 elements.
#[inline(always)]
pub(crate) unsafe fn store_each<I: Vectors + ?Sized, E: Stored>(numbers: I::V, to: *mut u32) {
    let mut buffer = [0.0; PANEL];
    // SAFETY: the buffer has 16 numbers; the caller's `to` can hold them.
    unsafe {
        I::store(numbers, buffer.as_mut_ptr());
        let to = to.cast::<E>();
        for (index, number) in buffer.into_iter().enumerate() {
            to.add(index).write(E::from_f32(number));
        }
    }
}

/// Sixteen numbers, one after the other.
#[inline(always)]
unsafe fn load_each<I: Vectors + ?Sized, E: Stored>(from: *const E) -> I::V {
    let mut buffer = [0.0; PANEL];
    for (index, number) in buffer.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        *number = unsafe { from.add(index).read() }.to_f32();
    }
    // SAFETY: the buffer has 16 numbers.
    unsafe { I::load(buffer.as_ptr()) }
}
