//! Storage of weights in files: plain numbers, and blocks of quantised ones (the types of GGUF).
//!
//! # Invariant
//!
//! A block becomes the float32 numbers that the `gguf` package's `quants.dequantize` makes of it,
//! to the last bit: scales are multiplied first, and each product is rounded before a sum.
//!
//! # Costs
//!
//! A few operations a weight; loops are over whole blocks, so that the compiler vectorises them.
#![expect(clippy::inline_always, reason = "must become part of a function with the instructions")]

use crate::number::{BFloat16, Float16, Stored};

/// Weights of a block of the types whose name ends in K, and of `IQ4_XS`.
const SUPER: usize = 256;

/// Values of the 4 bits of a weight of `IQ4_NL` and `IQ4_XS`, before the scale: steps that widen
/// away from zero (`kvalues_iq4nl` of ggml).
pub(crate) const WIDENING: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Storage of the weights of a row, one row after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// 32 bits a weight.
    Float32,
    /// IEEE 754 binary16.
    Float16,
    /// The upper 16 bits of a float32.
    BFloat16,
    /// Signed bytes; the scale of each output feature is stored elsewhere.
    I8Rows,
    /// 4 bits and a scale for 32 weights.
    Q4_0,
    /// 4 bits, a scale and a minimum for 32 weights.
    Q4_1,
    /// As `Q4_0`, for 64 weights.
    Q4_0_64,
    /// As `Q4_1`, for 64 weights.
    Q4_1_64,
    /// 5 bits and a scale for 32 weights.
    Q5_0,
    /// 5 bits, a scale and a minimum for 32 weights.
    Q5_1,
    /// 8 bits and a scale for 32 weights.
    Q8_0,
    /// 2 bits, scales and minima of 4 bits for 16 weights.
    Q2K,
    /// 3 bits, scales of 6 bits for 16 weights.
    Q3K,
    /// 4 bits, scales and minima of 6 bits for 32 weights.
    Q4K,
    /// 5 bits, scales and minima of 6 bits for 32 weights.
    Q5K,
    /// 6 bits, scales of 8 bits for 16 weights.
    Q6K,
    /// 4 bits of a table and a scale for 32 weights.
    Iq4Nl,
    /// 4 bits of a table, scales of 6 bits for 32 weights.
    Iq4Xs,
}

impl Storage {
    /// Number of weights of a block, and its bytes.
    pub const fn block(self) -> (usize, usize) {
        match self {
            Self::Float32 => (1, 4),
            Self::Float16 | Self::BFloat16 => (1, 2),
            Self::I8Rows => (1, 1),
            Self::Q4_0 | Self::Iq4Nl => (32, 18),
            Self::Q4_1 => (32, 20),
            Self::Q4_0_64 => (64, 34),
            Self::Q4_1_64 => (64, 36),
            Self::Q5_0 => (32, 22),
            Self::Q5_1 => (32, 24),
            Self::Q8_0 => (32, 34),
            Self::Q2K => (SUPER, 84),
            Self::Q3K => (SUPER, 110),
            Self::Q4K => (SUPER, 144),
            Self::Q5K => (SUPER, 176),
            Self::Q6K => (SUPER, 210),
            Self::Iq4Xs => (SUPER, 136),
        }
    }

    /// Bytes of a row of `num_weights` weights, which are whole blocks.
    pub const fn row_bytes(self, num_weights: usize) -> usize {
        let (weights, bytes) = self.block();
        num_weights / weights * bytes
    }

    /// Converts weights of a row to float32.
    ///
    /// `from` begins with a block, and holds the blocks of `to`.
    #[inline(always)]
    pub(crate) fn read(self, from: &[u8], to: &mut [f32]) {
        match self {
            Self::Float32 => for_blocks(from, to, |block: &[u8; 4], to: &mut [f32; 1]| {
                to[0] = f32::from_le_bytes(*block);
            }),
            Self::Float16 => for_blocks(from, to, |block: &[u8; 2], to: &mut [f32; 1]| {
                to[0] = half(*block);
            }),
            Self::BFloat16 => for_blocks(from, to, |block: &[u8; 2], to: &mut [f32; 1]| {
                to[0] = BFloat16::from_bits(u16::from_le_bytes(*block)).to_f32();
            }),
            Self::I8Rows => for_blocks(from, to, |block: &[u8; 1], to: &mut [f32; 1]| {
                to[0] = f32::from(block[0].cast_signed());
            }),
            Self::Q4_0 => for_blocks(from, to, read_q4_0::<18, 32>),
            Self::Q4_1 => for_blocks(from, to, read_q4_1::<20, 32>),
            Self::Q4_0_64 => for_blocks(from, to, read_q4_0::<34, 64>),
            Self::Q4_1_64 => for_blocks(from, to, read_q4_1::<36, 64>),
            Self::Q5_0 => for_blocks(from, to, read_q5_0),
            Self::Q5_1 => for_blocks(from, to, read_q5_1),
            Self::Q8_0 => for_blocks(from, to, read_q8_0),
            Self::Q2K => for_blocks(from, to, read_q2_k),
            Self::Q3K => for_blocks(from, to, read_q3_k),
            Self::Q4K => for_blocks(from, to, read_q4_k),
            Self::Q5K => for_blocks(from, to, read_q5_k),
            Self::Q6K => for_blocks(from, to, read_q6_k),
            Self::Iq4Nl => for_blocks(from, to, read_iq4_nl),
            Self::Iq4Xs => for_blocks(from, to, read_iq4_xs),
        }
    }
}

#[inline(always)]
fn for_blocks<const B: usize, const W: usize>(
    from: &[u8],
    to: &mut [f32],
    read: impl Fn(&[u8; B], &mut [f32; W]),
) {
    for (block, to) in from.as_chunks().0.iter().zip(to.as_chunks_mut().0) {
        read(block, to);
    }
}

#[inline(always)]
fn half(bytes: [u8; 2]) -> f32 {
    Float16::from_bits(u32::from(u16::from_le_bytes(bytes))).to_f32()
}

#[inline(always)]
fn half_at(block: &[u8], at: usize) -> f32 {
    half([block[at], block[at + 1]])
}

#[inline(always)]
fn read_q4_0<const B: usize, const W: usize>(block: &[u8; B], to: &mut [f32; W]) {
    let scale = half_at(block, 0);
    for index in 0..W / 2 {
        let byte = block[2 + index];
        to[index] = scale * small(byte & 15, 8);
        to[index + W / 2] = scale * small(byte >> 4, 8);
    }
}

#[inline(always)]
fn read_q4_1<const B: usize, const W: usize>(block: &[u8; B], to: &mut [f32; W]) {
    let (scale, least) = (half_at(block, 0), half_at(block, 2));
    for index in 0..W / 2 {
        let byte = block[4 + index];
        to[index] = scale * f32::from(byte & 15) + least;
        to[index + W / 2] = scale * f32::from(byte >> 4) + least;
    }
}

#[inline(always)]
fn read_q5_0(block: &[u8; 22], to: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    for index in 0..16 {
        let [low, high] = five_bits(&block[2..6], block[6 + index], index);
        to[index] = scale * small(low, 16);
        to[index + 16] = scale * small(high, 16);
    }
}

#[inline(always)]
fn read_q5_1(block: &[u8; 24], to: &mut [f32; 32]) {
    let (scale, least) = (half_at(block, 0), half_at(block, 2));
    for index in 0..16 {
        let [low, high] = five_bits(&block[4..8], block[8 + index], index);
        to[index] = scale * f32::from(low) + least;
        to[index + 16] = scale * f32::from(high) + least;
    }
}

/// Two numbers of 5 bits, `index` and 16 after it, whose fifth bits are bits of `fifth`.
#[inline(always)]
fn five_bits(fifth: &[u8], byte: u8, index: usize) -> [u8; 2] {
    let bit = |at: usize| (fifth[at / 8] >> (at % 8) & 1) << 4;
    [byte & 15 | bit(index), byte >> 4 | bit(index + 16)]
}

#[inline(always)]
fn read_q8_0(block: &[u8; 34], to: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    for (to, byte) in to.iter_mut().zip(&block[2..]) {
        *to = f32::from(byte.cast_signed()) * scale;
    }
}

/// A small number without its offset.
#[inline(always)]
fn small(number: u8, offset: i8) -> f32 {
    f32::from(number.cast_signed() - offset)
}

#[inline(always)]
fn read_q2_k(block: &[u8; 84], to: &mut [f32; SUPER]) {
    let (scale, least) = (half_at(block, 80), half_at(block, 82));
    for (group, to) in to.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scales = block[group];
        let (scale, least) = (scale * f32::from(scales & 15), least * f32::from(scales >> 4));
        let bytes = &block[16 + group / 8 * 32 + group % 2 * 16..][..16];
        for (to, byte) in to.iter_mut().zip(bytes) {
            *to = scale * f32::from(byte >> (group / 2 % 4 * 2) & 3) - least;
        }
    }
}

#[inline(always)]
fn read_q3_k(block: &[u8; 110], to: &mut [f32; SUPER]) {
    let scale = half_at(block, 108);
    for (group, to) in to.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let low = block[96 + group % 8] >> (group / 8 * 4) & 15;
        let high = block[104 + group % 4] >> (group / 4 * 2) & 3;
        let scale = scale * small(low | high << 4, 32);
        let masks = &block[group % 2 * 16..][..16];
        let bytes = &block[32 + group / 8 * 32 + group % 2 * 16..][..16];
        for ((to, mask), byte) in to.iter_mut().zip(masks).zip(bytes) {
            // A set bit of the mask means that 4 is not subtracted.
            let offset = 4 * (1 - (mask >> (group / 2) & 1)).cast_signed();
            *to = scale * small(byte >> (group / 2 % 4 * 2) & 3, offset);
        }
    }
}

/// The scale and the minimum of a group of 32 weights, 6 bits each.
#[inline(always)]
fn six_bits(scales: &[u8], group: usize) -> (f32, f32) {
    let (scale, least) = if group < 4 {
        (scales[group] & 0x3f, scales[group + 4] & 0x3f)
    } else {
        let (low, index) = (scales[group + 4], group - 4);
        (low & 15 | scales[index] >> 2 & 0x30, low >> 4 | scales[index + 4] >> 2 & 0x30)
    };
    (f32::from(scale), f32::from(least))
}

#[inline(always)]
fn read_q4_k(block: &[u8; 144], to: &mut [f32; SUPER]) {
    let (scale, least) = (half_at(block, 0), half_at(block, 2));
    for (group, to) in to.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (of_scale, of_least) = six_bits(&block[4..16], group);
        let (scale, least) = (scale * of_scale, least * of_least);
        let bytes = &block[16 + group / 2 * 32..][..32];
        for (to, byte) in to.iter_mut().zip(bytes) {
            *to = scale * f32::from(byte >> (group % 2 * 4) & 15) - least;
        }
    }
}

#[inline(always)]
fn read_q5_k(block: &[u8; 176], to: &mut [f32; SUPER]) {
    let (scale, least) = (half_at(block, 0), half_at(block, 2));
    for (group, to) in to.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (of_scale, of_least) = six_bits(&block[4..16], group);
        let (scale, least) = (scale * of_scale, least * of_least);
        let (fifths, bytes) = (&block[16..48], &block[48 + group / 2 * 32..][..32]);
        for ((to, fifth), byte) in to.iter_mut().zip(fifths).zip(bytes) {
            let number = byte >> (group % 2 * 4) & 15 | (fifth >> group & 1) << 4;
            *to = scale * f32::from(number) - least;
        }
    }
}

#[inline(always)]
fn read_q6_k(block: &[u8; 210], to: &mut [f32; SUPER]) {
    let scale = half_at(block, 208);
    for (group, to) in to.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = scale * f32::from(block[192 + group].cast_signed());
        let (half, place) = (group / 8, group % 8);
        let bytes = &block[half * 64 + place % 4 * 16..][..16];
        let highs = &block[128 + half * 32 + place % 2 * 16..][..16];
        for ((to, byte), high) in to.iter_mut().zip(bytes).zip(highs) {
            let number = byte >> (place / 4 * 4) & 15 | (high >> (place / 2 * 2) & 3) << 4;
            *to = scale * small(number, 32);
        }
    }
}

#[inline(always)]
fn read_iq4_nl(block: &[u8; 18], to: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    for index in 0..16 {
        let byte = block[2 + index];
        to[index] = scale * widened(byte & 15);
        to[index + 16] = scale * widened(byte >> 4);
    }
}

#[inline(always)]
fn read_iq4_xs(block: &[u8; 136], to: &mut [f32; SUPER]) {
    let (scale, highs) = (half_at(block, 0), u16::from_le_bytes([block[2], block[3]]));
    for (group, to) in to.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let low = block[4 + group / 2] >> (group % 2 * 4) & 15;
        let [high, _] = (highs >> (2 * group) & 3).to_le_bytes();
        let scale = scale * small(low | high << 4, 32);
        for (index, byte) in block[8 + group * 16..][..16].iter().enumerate() {
            to[index] = scale * widened(byte & 15);
            to[index + 16] = scale * widened(byte >> 4);
        }
    }
}

/// The number that 4 bits stand for.
#[inline(always)]
fn widened(bits: u8) -> f32 {
    f32::from(WIDENING[usize::from(bits)])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(storage: Storage, block: &[u8]) -> Vec<f32> {
        let mut numbers = vec![0.0; storage.block().0];
        storage.read(block, &mut numbers);
        numbers
    }

    /// 1.5 and -0.25 as float16.
    const SCALE: [u8; 2] = [0x00, 0x3e];
    const LEAST: [u8; 2] = [0x00, 0xb4];

    #[test]
    fn plain_numbers_are_exact() {
        assert_eq!(read(Storage::Float32, &2.75_f32.to_le_bytes()), [2.75]);
        assert_eq!(read(Storage::Float16, &LEAST), [-0.25]);
        assert_eq!(read(Storage::BFloat16, &[0xc0, 0x3f]), [1.5]);
    }

    #[test]
    fn nibbles_are_the_first_and_the_second_half_of_a_block() {
        let block: Vec<u8> = SCALE.into_iter().chain(LEAST).chain([0x21; 16]).collect();
        let numbers = read(Storage::Q4_1, &block);
        assert_eq!(numbers[..16], [1.25; 16]);
        assert_eq!(numbers[16..], [2.75; 16]);
        let block: Vec<u8> = SCALE.into_iter().chain([0x97; 16]).collect();
        let numbers = read(Storage::Q4_0, &block);
        assert_eq!(numbers[..16], [-1.5; 16]);
        assert_eq!(numbers[16..], [1.5; 16]);
    }

    #[test]
    fn a_fifth_bit_adds_sixteen() {
        let fifths = 1_u32 << 3 | 1 << 17;
        let block = SCALE.into_iter().chain(fifths.to_le_bytes()).chain([0; 16]);
        let numbers = read(Storage::Q5_0, &block.collect::<Vec<_>>());
        for (index, number) in numbers.into_iter().enumerate() {
            let expected = if index == 3 || index == 17 { 0.0 } else { -24.0 };
            assert!((number - expected).abs() == 0.0, "number {index} is {number}");
        }
    }

    #[test]
    fn a_row_of_blocks_is_read_block_by_block() {
        let block = |byte: u8| SCALE.into_iter().chain([byte; 32]);
        let row: Vec<u8> = block(1).chain(block(0xff)).collect();
        let mut numbers = [0.0; 64];
        Storage::Q8_0.read(&row, &mut numbers);
        assert_eq!(Storage::Q8_0.row_bytes(64), row.len());
        assert_eq!(numbers[..32], [1.5; 32]);
        assert_eq!(numbers[32..], [-1.5; 32]);
    }

    #[test]
    fn six_bit_scales_are_put_together_of_two_bytes() {
        let mut scales = [0_u8; 12];
        (scales[1], scales[5]) = (0xff, 0x40 | 9); // group 1; the upper bits are those of group 5
        scales[9] = 0xa5;
        assert_eq!(six_bits(&scales, 1), (63.0, 9.0));
        assert_eq!(six_bits(&scales, 5), (53.0, 26.0));
    }
}
