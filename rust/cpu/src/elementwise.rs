//! Operations on single tokens: norms, rotations, and conversion to float32.
//!
//! Numbers are read as they are stored, computed in float32 and rounded once, when they are
//! written back.
#![expect(unsafe_code, reason = "tokens are addresses of tensors")]
#![expect(clippy::inline_always, reason = "must become part of a function with the instructions")]

use crate::element::Element;
use crate::error::{Error, Result};
use crate::math::across;
#[cfg(target_arch = "x86_64")]
use crate::number::Stored;
use crate::number::{BFloat16, DType, Float16, PANEL};
use crate::team::Execution;
use crate::vectors::{Kernel, Vectors};

/// A norm by the root of the mean square (Zhang and Sennrich, "Root Mean Square Layer
/// Normalization", equation 4).
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a> {
    /// `[features]`, what each normalised number is multiplied with.
    pub weight: &'a [f32],
    /// Added to the mean square.
    pub epsilon: f32,
}

/// Normalises `num_rows` rows of `norm.weight.len()` numbers, which lie side by side.
///
/// # Errors
/// A norm of no numbers, an odd address, an instruction set that the CPU lacks.
///
/// # Safety
/// Input and output have these rows and are the same or do not overlap; no other code writes the
/// input, or touches the output, while the call lasts.
pub unsafe fn rms_norm(
    norm: Norm<'_>,
    dtype: DType,
    num_rows: usize,
    (input, output): (*const u8, *mut u8),
    execution: &Execution<'_>,
) -> Result<()> {
    execution.check()?;
    let len = norm.weight.len();
    if len == 0 {
        return Err(Error("a norm must have at least 1 weight; got none".into()));
    }
    for (name, address) in [("input", input), ("output", output.cast_const())] {
        if num_rows > 0 {
            dtype.check_address(name, address)?;
        }
    }
    let work = Rowwise::Norm { norm, from: input, to: output, adds: false };
    // SAFETY: the caller's promise.
    unsafe { for_rows(work, dtype, num_rows, len, execution) };
    Ok(())
}

/// Rows of numbers, and what to do with them.
#[derive(Clone, Copy)]
pub(crate) enum Rowwise<'a> {
    /// `to[row] = norm(from[row])`, or `+=` where it `adds`.
    Norm { norm: Norm<'a>, from: *const u8, to: *mut u8, adds: bool },
    /// Rotates the heads of queries and keys in place.
    Rotate(Rotation<'a>),
    /// `to[row] = from[row]`, rows of `len` numbers, in float32 and side by side.
    Widen { from: *const u8, stride: usize, len: usize, to: *mut f32 },
    /// Rows of `len` float32 as sums of `PARTS` of bfloat16, `to_stride` apart: what is exact of each
    /// number, of what is left, and the rest.
    #[cfg(target_arch = "x86_64")]
    Divide { from: *const f32, stride: usize, len: usize, to: *mut BFloat16, to_stride: usize },
}

/// Heads to be rotated (Su et al., "Rotary Position Embedding", section 3.4.2, in the form that
/// pairs the halves of a head).
#[derive(Clone, Copy)]
pub(crate) struct Rotation<'a> {
    /// `[rows, stride]`: query heads, then key heads, then elements that are not rotated.
    pub(crate) heads: *mut u8,
    /// Elements from a row to the next.
    pub(crate) stride: usize,
    /// Query heads.
    pub(crate) num_heads: usize,
    /// Key heads.
    pub(crate) num_kv_heads: usize,
    /// Elements of a head.
    pub(crate) head_size: usize,
    /// `[rows, rotary_size]`.
    pub(crate) cosines: *const u8,
    /// `[rows, rotary_size]`.
    pub(crate) sines: *const u8,
    /// Elements of a head that are rotated, the first ones.
    pub(crate) rotary_size: usize,
    /// Norm of each query head, before it is rotated.
    pub(crate) query_norm: Option<Norm<'a>>,
    /// Norm of each key head, before it is rotated.
    pub(crate) key_norm: Option<Norm<'a>>,
}

/// Numbers of bfloat16 whose sum a float32 is.
#[cfg(target_arch = "x86_64")]
pub(crate) const PARTS: usize = 3;
/// Numbers that are not worth a second thread.
const FEW_NUMBERS: usize = 16_384;
/// Rows of a work item.
const ITEM_ROWS: usize = 4;

/// Applies `work` to `num_rows` rows of about `row_len` numbers each.
///
/// # Safety
/// The rows exist; no other code accesses the written ones during the call.
pub(crate) unsafe fn for_rows(
    work: Rowwise<'_>,
    dtype: DType,
    num_rows: usize,
    row_len: usize,
    execution: &Execution<'_>,
) {
    let shared = Shared(work);
    let run = |item: usize| {
        let numbers = item * ITEM_ROWS..((item + 1) * ITEM_ROWS).min(num_rows);
        // SAFETY: the caller's promise; each row is done once.
        unsafe { execution.instructions.run(Rows { work: shared.get(), dtype, numbers }) };
    };
    let num_items = num_rows.div_ceil(ITEM_ROWS);
    if num_rows * row_len <= FEW_NUMBERS {
        (0..num_items).for_each(run);
    } else {
        execution.for_each(num_items, &run);
    }
}

/// Pointers that threads share: each writes distinct rows.
struct Shared<'a>(Rowwise<'a>);

// SAFETY: see above.
unsafe impl Sync for Shared<'_> {}

impl<'a> Shared<'a> {
    fn get(&self) -> Rowwise<'a> {
        self.0
    }
}

struct Rows<'a> {
    work: Rowwise<'a>,
    dtype: DType,
    numbers: std::ops::Range<usize>,
}

impl Kernel for Rows<'_> {
    #[inline(always)]
    unsafe fn run<I: Vectors>(self) {
        let Self { work, dtype, numbers } = self;
        for row in numbers {
            // SAFETY: the caller's promise.
            unsafe {
                match dtype {
                    DType::Float32 => one_row::<I, f32>(&work, row),
                    DType::BFloat16 => one_row::<I, BFloat16>(&work, row),
                    DType::Float16 => one_row::<I, Float16>(&work, row),
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn one_row<I: Vectors, E: Element>(work: &Rowwise<'_>, row: usize) {
    // SAFETY: the row exists.
    unsafe {
        match *work {
            Rowwise::Norm { norm, from, to, adds } => {
                let offset = row * norm.weight.len();
                let (from, to) = (from.cast::<E>().add(offset), to.cast::<E>().add(offset));
                normalise::<I, E>(norm, from, to, adds);
            }
            Rowwise::Rotate(rotation) => rotate_row::<I, E>(&rotation, row),
            #[cfg(target_arch = "x86_64")]
            Rowwise::Divide { from, stride, len, to, to_stride } => {
                divide::<I>(
                    from.add(row * stride),
                    to.add(PARTS * row * to_stride),
                    to_stride,
                    len,
                );
            }
            Rowwise::Widen { from, stride, len, to } => {
                widen::<I, E>(from.cast::<E>().add(row * stride), to.add(row * len), len);
            }
        }
    }
}

#[inline(always)]
unsafe fn widen<I: Vectors, E: Element>(from: *const E, to: *mut f32, len: usize) {
    let (whole, rest) = split(len);
    // SAFETY: both have `len` numbers.
    unsafe {
        for index in (0..whole).step_by(PANEL) {
            I::store(E::load::<I>(from.add(index)), to.add(index));
        }
        for index in rest {
            to.add(index).write(from.add(index).read().to_f32());
        }
    }
}

/// Writes a row as the sum of three of bfloat16.  The upper 16 bits of a float32 are a bfloat16, and
/// what they leave has no more bits than two.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn divide<I: Vectors>(from: *const f32, to: *mut BFloat16, to_stride: usize, len: usize) {
    let (whole, rest) = split(len);
    // SAFETY: all rows have `len` numbers.
    unsafe {
        let minus = I::splat(-1.0);
        for index in (0..whole).step_by(PANEL) {
            let mut left = I::load(from.add(index));
            for part in 0..PARTS {
                let upper = I::second_of_pairs(left);
                BFloat16::store::<I>(upper, to.add(part * to_stride + index).cast());
                left = I::multiply_add(upper, minus, left);
            }
        }
        for index in rest {
            let mut left = from.add(index).read();
            for part in 0..PARTS {
                let upper = f32::from_bits(left.to_bits() & 0xffff_0000);
                to.add(part * to_stride + index).write(BFloat16::from_f32(upper));
                left -= upper;
            }
        }
    }
}

/// Whole vectors of a row, and the remaining numbers.
fn split(len: usize) -> (usize, std::ops::Range<usize>) {
    let whole = len - len % PANEL;
    (whole, whole..len)
}

/// Normalises a row; `to` may be `from`.
#[inline(always)]
unsafe fn normalise<I: Vectors, E: Element>(
    norm: Norm<'_>,
    from: *const E,
    to: *mut E,
    adds: bool,
) {
    let len = norm.weight.len();
    let (whole, rest) = split(len);
    // SAFETY: rows and weight have `len` numbers.
    unsafe {
        let mut sums = I::splat(0.0);
        for index in (0..whole).step_by(PANEL) {
            let numbers = E::load::<I>(from.add(index));
            sums = I::multiply_add(numbers, numbers, sums);
        }
        let mut square = across::<I>(sums, |a, b| a + b);
        for index in rest.clone() {
            square += from.add(index).read().to_f32().powi(2);
        }
        #[expect(clippy::cast_precision_loss, reason = "a count of features")]
        let factor = 1.0 / (square / len as f32 + norm.epsilon).sqrt();
        let factors = I::splat(factor);
        for index in (0..whole).step_by(PANEL) {
            let numbers = I::mul(E::load::<I>(from.add(index)), factors);
            let weight = I::load(norm.weight.as_ptr().add(index));
            let numbers = if adds {
                I::multiply_add(numbers, weight, E::load::<I>(to.add(index)))
            } else {
                I::mul(numbers, weight)
            };
            E::store::<I>(numbers, to.add(index).cast());
        }
        for index in rest {
            let there = if adds { to.add(index).read().to_f32() } else { 0.0 };
            let number = from.add(index).read().to_f32() * factor * norm.weight[index];
            to.add(index).write(E::from_f32(number + there));
        }
    }
}

#[inline(always)]
unsafe fn rotate_row<I: Vectors, E: Element>(rotation: &Rotation<'_>, row: usize) {
    let Rotation { num_heads, num_kv_heads, head_size, rotary_size, .. } = *rotation;
    // SAFETY: the row has these heads.
    unsafe {
        let cosines = rotation.cosines.cast::<E>().add(row * rotary_size);
        let sines = rotation.sines.cast::<E>().add(row * rotary_size);
        let heads = rotation.heads.cast::<E>().add(row * rotation.stride);
        for index in 0..num_heads + num_kv_heads {
            let head = heads.add(index * head_size);
            let norm = if index < num_heads { rotation.query_norm } else { rotation.key_norm };
            if let Some(norm) = norm {
                normalise::<I, E>(norm, head, head, false);
            }
            rotate::<I, E>(head, cosines, sines, rotary_size / 2);
        }
    }
}

/// Rotates each of the first `half` numbers with the one `half` further on.
#[inline(always)]
unsafe fn rotate<I: Vectors, E: Element>(
    head: *mut E,
    cosines: *const E,
    sines: *const E,
    half: usize,
) {
    let (whole, rest) = split(half);
    // SAFETY: head, cosines and sines have two halves.
    unsafe {
        for index in (0..whole).step_by(PANEL) {
            let at = |from: *const E| {
                (E::load::<I>(from.add(index)), E::load::<I>(from.add(half + index)))
            };
            let (first, second) = at(head);
            let ((cosine, other_cosine), (sine, other_sine)) = (at(cosines), at(sines));
            let minus = I::mul(second, I::splat(-1.0));
            let turned = I::multiply_add(minus, sine, I::mul(first, cosine));
            let other = I::multiply_add(first, other_sine, I::mul(second, other_cosine));
            E::store::<I>(turned, head.add(index).cast());
            E::store::<I>(other, head.add(half + index).cast());
        }
        for index in rest {
            let at = |from: *const E| {
                (from.add(index).read().to_f32(), from.add(half + index).read().to_f32())
            };
            let (first, second) = at(head);
            let ((cosine, other_cosine), (sine, other_sine)) = (at(cosines), at(sines));
            head.add(index).write(E::from_f32(first * cosine - second * sine));
            head.add(half + index).write(E::from_f32(second * other_cosine + first * other_sine));
        }
    }
}
