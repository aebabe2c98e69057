//! The formats, and how their blocks are opened.

use crate::error::{Error, Result};
use crate::linear::PANEL_FEATURES;
use crate::number::{Float16, PANEL, Stored};
use crate::vectors::Vectors;

/// Inputs of a row that share a scale.
pub(crate) const GROUP: usize = 32;
/// Groups that are opened at once: 16 KiB of bytes.
pub(crate) const OPENED: usize = 8;
/// Bytes that hold four inputs of each feature of a panel.
pub(crate) const QUADS: usize = 4 * PANEL_FEATURES;
/// Bytes of a float16 of each feature.
const HALVES: usize = 2 * PANEL_FEATURES;

/// How weights lie in a panel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Signed bytes, one scale a feature.
    Int8,
    /// Signed bytes and a scale for 32 inputs.
    Q8_0,
    /// 4 bits and a scale for 32 inputs.
    Q4_0,
    /// 4 bits, a scale and a minimum for 32 inputs.
    Q4_1,
    /// 5 bits and a scale for 32 inputs.
    Q5_0,
    /// 5 bits, a scale and a minimum for 32 inputs.
    Q5_1,
}

impl Format {
    /// Whether each group has a scale.
    pub const fn has_groups(self) -> bool {
        !matches!(self, Self::Int8)
    }

    /// Bytes of a row as the kernel takes it, and how many scales it has.
    pub(crate) const fn row_shape(self, in_features: usize) -> (usize, usize) {
        match self {
            Self::Int8 => (in_features.next_multiple_of(GROUP), 1),
            _ => (in_features, in_features / GROUP),
        }
    }

    /// Refuses inputs that are no whole groups.
    pub(crate) fn check(self, in_features: usize) -> Result<()> {
        if !self.has_groups() || in_features.is_multiple_of(GROUP) {
            return Ok(());
        }
        Err(Error(format!(
            "in_features must be a multiple of {GROUP} for {self:?}; got {in_features}"
        )))
    }

    /// Bytes of a group of 32 inputs of a panel.
    const fn group_bytes(self) -> usize {
        PANEL_FEATURES * self.block_bytes()
    }

    /// The number of a feature's weight, by the definition of the format.
    pub(crate) fn number(self, panel: &[u8], feature: usize, input: usize, scale: f32) -> f32 {
        let group = &panel[input / GROUP * self.group_bytes()..];
        let quad = |quad: usize| group[quad * QUADS + 4 * feature + input % 4];
        let half = |number: usize| {
            let at = self.block().0.len() * QUADS + number * HALVES + 2 * feature;
            Float16::from_bits(u32::from(u16::from_le_bytes([group[at], group[at + 1]]))).to_f32()
        };
        let place = input % GROUP;
        let nibble = || quad(place / 4 % 4) >> (place / 16 * 4) & 15;
        let fifth = || {
            let byte = group[4 * QUADS + 4 * feature + place / 8];
            nibble() | (byte >> (place % 8) & 1) << 4
        };
        match self {
            Self::Int8 => f32::from(quad(place / 4).cast_signed()) * scale,
            Self::Q8_0 => f32::from(quad(place / 4).cast_signed()) * half(0),
            Self::Q4_0 => (f32::from(nibble()) - 8.0) * half(0),
            Self::Q4_1 => f32::from(nibble()) * half(0) + half(1),
            Self::Q5_0 => (f32::from(fifth()) - 16.0) * half(0),
            Self::Q5_1 => f32::from(fifth()) * half(0) + half(1),
        }
    }

    /// Where words and float16 lie in a block of 32 inputs of a file, in the order of the panel.
    pub(crate) const fn block(self) -> (&'static [usize], &'static [usize]) {
        match self {
            Self::Int8 => (&[0, 4, 8, 12, 16, 20, 24, 28], &[]),
            Self::Q8_0 => (&[2, 6, 10, 14, 18, 22, 26, 30], &[0]),
            Self::Q4_0 => (&[2, 6, 10, 14], &[0]),
            Self::Q4_1 => (&[4, 8, 12, 16], &[0, 2]),
            Self::Q5_0 => (&[6, 10, 14, 18, 2], &[0]),
            Self::Q5_1 => (&[8, 12, 16, 20, 4], &[0, 2]),
        }
    }

    /// Bytes of a block of 32 inputs of a file.
    pub(crate) const fn block_bytes(self) -> usize {
        let (words, halves) = self.block();
        4 * words.len() + 2 * halves.len()
    }

    /// Bytes of a panel.
    pub const fn panel_bytes(self, in_features: usize) -> usize {
        match self {
            Self::Int8 => in_features.div_ceil(4) * QUADS,
            _ => in_features / GROUP * self.group_bytes(),
        }
    }
}

/// Groups of a panel as a kernel takes them.
#[repr(C, align(64))]
pub(crate) struct Opened {
    /// `[groups][8][64][4]`.
    pub(crate) quads: [u8; OPENED * 8 * QUADS],
    /// `[groups][64]`.
    pub(crate) scales: [f32; OPENED * PANEL_FEATURES],
    /// `[groups][64]`; of no meaning where a format has none.
    pub(crate) minima: [f32; OPENED * PANEL_FEATURES],
}

impl Opened {
    /// Opens `num` groups of a panel, the first of which begins at `from`.
    ///
    /// # Safety
    /// The CPU has the instructions; the groups exist.
    #[inline(always)]
    pub(crate) unsafe fn fill<I: Vectors>(&mut self, format: Format, from: *const u8, num: usize) {
        for group in 0..num {
            let quads = self.quads.as_mut_ptr().wrapping_add(group * 8 * QUADS);
            let scales = self.scales.as_mut_ptr().wrapping_add(group * PANEL_FEATURES);
            let minima = self.minima.as_mut_ptr().wrapping_add(group * PANEL_FEATURES);
            let from = from.wrapping_add(group * format.group_bytes());
            // SAFETY: the caller's promise; there is room for the groups.
            unsafe {
                match format {
                    Format::Int8 | Format::Q8_0 => {
                        quads.copy_from_nonoverlapping(from, 8 * QUADS);
                        widen::<I>(from.add(8 * QUADS), scales);
                    }
                    Format::Q4_0 => {
                        open_nibbles(from, quads);
                        widen::<I>(from.add(4 * QUADS), scales);
                        below::<I>(scales, -8.0, minima);
                    }
                    Format::Q4_1 => {
                        open_nibbles(from, quads);
                        widen::<I>(from.add(4 * QUADS), scales);
                        widen::<I>(from.add(4 * QUADS + HALVES), minima);
                    }
                    Format::Q5_0 => {
                        open_nibbles(from, quads);
                        add_fifth_bits(from.add(4 * QUADS), quads);
                        widen::<I>(from.add(5 * QUADS), scales);
                        below::<I>(scales, -16.0, minima);
                    }
                    Format::Q5_1 => {
                        open_nibbles(from, quads);
                        add_fifth_bits(from.add(4 * QUADS), quads);
                        widen::<I>(from.add(5 * QUADS), scales);
                        widen::<I>(from.add(5 * QUADS + HALVES), minima);
                    }
                }
            }
        }
    }
}

/// Float16 of 64 features, as float32.
#[inline(always)]
unsafe fn widen<I: Vectors>(from: *const u8, to: *mut f32) {
    #[expect(clippy::cast_ptr_alignment, reason = "a multiple of 128 bytes from the panel's start")]
    let from = from.cast::<Float16>();
    for first in (0..PANEL_FEATURES).step_by(PANEL) {
        // SAFETY: the caller's promise.
        unsafe { I::store(I::load_float16(from.add(first)), to.add(first)) };
    }
}

/// Minima that stand for a constant which the whole numbers are too large by.
#[inline(always)]
unsafe fn below<I: Vectors>(scales: *const f32, times: f32, minima: *mut f32) {
    for first in (0..PANEL_FEATURES).step_by(PANEL) {
        // SAFETY: the caller's promise.
        unsafe {
            let scales = I::load(scales.add(first));
            I::store(I::mul(scales, I::splat(times)), minima.add(first));
        }
    }
}

/// The low halves of four words are the first 16 inputs, the high halves the others.
#[inline(always)]
unsafe fn open_nibbles(from: *const u8, to: *mut u8) {
    for at in 0..4 * QUADS {
        // SAFETY: the caller's promise.
        unsafe {
            let byte = from.add(at).read();
            to.add(at).write(byte & 15);
            to.add(4 * QUADS + at).write(byte >> 4);
        }
    }
}

/// Bit n of a feature's word is the fifth bit of its input n.
#[inline(always)]
unsafe fn add_fifth_bits(from: *const u8, to: *mut u8) {
    for quad in 0..8 {
        for feature in 0..PANEL_FEATURES {
            // SAFETY: the caller's promise.
            unsafe {
                let bits = from.add(4 * feature).cast::<u32>().read_unaligned() >> (4 * quad);
                // Bits 0 to 3 of the number become bit 4 of bytes 0 to 3.
                let spread = (bits & 15).wrapping_mul(0x0020_4081) & 0x0101_0101;
                let at = to.add(quad * QUADS + 4 * feature).cast::<u32>();
                at.write_unaligned(at.read_unaligned() | (spread << 4));
            }
        }
    }
}
