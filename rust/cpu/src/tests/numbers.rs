//! Stored numbers of every kind, by the definitions of their formats.

use crate::DType;
use crate::attention::CacheDType;

/// Stored numbers of any kind.
#[derive(Clone)]
pub(super) struct Numbers {
    pub(super) dtype: DType,
    pub(super) bytes: Vec<u8>,
}

impl Numbers {
    pub(super) fn poisoned(dtype: DType, len: usize) -> Self {
        let mut numbers = Self { dtype, bytes: vec![0; len * dtype.size()] };
        for index in 0..len {
            numbers.set(index, f32::NAN);
        }
        numbers
    }

    /// Stores a number and returns what is stored.
    pub(super) fn set(&mut self, index: usize, number: f32) -> f32 {
        let at = index * self.dtype.size();
        match self.dtype {
            DType::Float32 => self.bytes[at..at + 4].copy_from_slice(&number.to_le_bytes()),
            DType::BFloat16 => {
                self.bytes[at..at + 2].copy_from_slice(&number.to_le_bytes()[2..]);
            }
            DType::Float16 => {
                self.bytes[at..at + 2].copy_from_slice(&float16(number).to_le_bytes());
            }
        }
        self.get(index)
    }

    pub(super) fn get(&self, index: usize) -> f32 {
        let at = index * self.dtype.size();
        let mut word = [0; 4];
        match self.dtype {
            DType::Float32 => word.copy_from_slice(&self.bytes[at..at + 4]),
            DType::BFloat16 => word[2..].copy_from_slice(&self.bytes[at..at + 2]),
            DType::Float16 => {
                return of_float16(u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]]));
            }
        }
        f32::from_le_bytes(word)
    }
}

/// The nearest float16 of a number below 2^15, by the definition of the format.
fn float16(number: f32) -> u16 {
    if number.is_nan() {
        return 0x7e00;
    }
    let exponent = number.abs().log2().floor().max(-14.0);
    let fraction = f64::from(number.abs()) / f64::from(exponent).exp2() * 1024.0;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "11 and 5 bits")]
    let (fraction, exponent) = (fraction.round_ties_even() as u16, (exponent + 14.0) as u16);
    // A fraction of a normal number has its bit 10, which is one of the exponent.
    (exponent * 1024 + fraction) | (u16::from(number.is_sign_negative()) << 15)
}

/// The least number of 8 significant bits that is no less than a positive number.
pub(super) fn bfloat16_at_least(number: f32) -> f32 {
    let unit = (number.log2().floor() - 7.0).exp2();
    (number / unit).ceil() * unit
}

fn of_float16(bits: u16) -> f32 {
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f32::from(bits & 0x3ff) / 1024.0);
    let magnitude = match exponent {
        0 => fraction * 2_f32.powi(-14),
        31 => f32::NAN,
        _ => (1.0 + fraction) * 2_f32.powi(exponent - 15),
    };
    if bits >> 15 == 1 { -magnitude } else { magnitude }
}

/// Bytes and numbers of a pool of bytes, by the definition of their format, in ascending order;
/// none of a pool of numbers.
///
/// E4M3 counts as a 256th here, as in the pool.
pub(super) fn levels(cache_dtype: CacheDType) -> Vec<(u8, f32)> {
    let float8 = |byte: u8, fraction: u32, bias: i32| {
        let (exponent, parts) =
            ((byte & 0x7f) >> fraction, f32::from(byte & ((1 << fraction) - 1)));
        let one = f32::from(1_u8 << fraction);
        let magnitude = match exponent {
            0 => parts / one * 2.0_f32.powi(1 - bias),
            _ => (1.0 + parts / one) * 2.0_f32.powi(i32::from(exponent) - bias),
        };
        if byte < 128 { magnitude } else { -magnitude }
    };
    let number = |byte: u8| match cache_dtype {
        CacheDType::Auto => None,
        CacheDType::Int8 => Some(f32::from(byte.cast_signed())),
        CacheDType::Float8E4M3 => (byte & 0x7f != 0x7f).then(|| float8(byte, 3, 7) / 256.0),
        CacheDType::Float8E5M2 => (byte & 0x7f < 0x7c).then(|| float8(byte, 2, 15)),
    };
    let bytes = (0..=255).filter(|byte| *byte != 128); // no -128, and one 0
    let mut levels: Vec<_> = bytes.filter_map(|byte| Some((byte, number(byte)?))).collect();
    levels.sort_by(|(_, level), (_, other)| level.total_cmp(other));
    levels
}

/// The level nearest to a number; of two as near the even one.
pub(super) fn nearest(levels: &[(u8, f32)], number: f32) -> (u8, f32) {
    let above = levels.partition_point(|(_, level)| *level < number);
    let (lower, upper) = (levels[above.max(1) - 1], levels[above.min(levels.len() - 1)]);
    let distance = |(_, level): (u8, f32)| (f64::from(level) - f64::from(number)).abs();
    let is_lower = distance(lower) < distance(upper)
        || (distance(lower) <= distance(upper) && lower.0.is_multiple_of(2));
    if is_lower { lower } else { upper }
}
