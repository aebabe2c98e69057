//! How blocks are opened: whole numbers become bytes, scales and minima float32.
#![expect(clippy::needless_range_loop, reason = "constant bounds over several arrays at once")]

use crate::bytes::format::{Format, GROUP, HALVES, QUADS};
use crate::linear::PANEL_FEATURES;
use crate::number::{Float16, PANEL};
use crate::vectors::Vectors;

/// Inputs that are opened at once: 16 KiB of bytes.
pub(crate) const OPENED: usize = 256;
/// Bytes of a group of opened inputs.
const GROUP_QUADS: usize = GROUP / 4 * QUADS;

/// Inputs of a panel as a kernel takes them.
#[repr(C, align(64))]
pub(crate) struct Opened {
    /// `[inputs / 4][64][4]`; of no meaning where a kernel takes them from the panel.
    quads: [u8; OPENED / 4 * QUADS],
    /// `[groups][64]`.
    scales: [f32; OPENED / 16 * PANEL_FEATURES],
    /// `[groups][64]`; of no meaning where a format has none.
    minima: [f32; OPENED / 16 * PANEL_FEATURES],
}

/// Where a kernel finds opened inputs.
#[derive(Clone, Copy)]
pub(crate) struct Groups {
    /// The first quads, or the panel's blocks.
    pub(crate) quads: *const u8,
    /// Bytes from the quads of 32 inputs to those of the next, or a block's bytes for 32 inputs.
    pub(crate) stride: usize,
    /// `[groups][64]`.
    pub(crate) scales: *const f32,
    /// `[groups][64]`.
    pub(crate) minima: *const f32,
}

impl Opened {
    /// Opens `num` inputs of a panel, whose blocks begin at `from`; numbers alone if a kernel takes
    /// the weights from the panel.
    ///
    /// # Safety
    /// The CPU has the instructions; the blocks exist, at most `OPENED` inputs of them.
    #[inline(always)]
    pub(crate) unsafe fn fill<I: Vectors>(
        &mut self,
        format: Format,
        from: *const u8,
        num: usize,
        is_closed: bool,
    ) -> Groups {
        let size = PANEL_FEATURES * format.block().num_bytes();
        let quads = self.quads.as_mut_ptr();
        let (scales, minima) = (self.scales.as_mut_ptr(), self.minima.as_mut_ptr());
        // SAFETY: the caller's promise; there is room for the inputs.
        unsafe {
            match format {
                Format::Q4K if is_closed => {
                    open_six_bits::<I>(from.add(32 * QUADS), scales, minima);
                }
                Format::Q4K => open_q4_k::<I>(from, quads, scales, minima, false),
                Format::Q5K => open_q4_k::<I>(from, quads, scales, minima, true),
                Format::Q6K => open_q6_k::<I>(from, quads, scales, minima),
                _ => {
                    for group in 0..num / GROUP {
                        let from = from.wrapping_add(group * size);
                        let quads = quads.wrapping_add(group * GROUP_QUADS);
                        let numbers = group * PANEL_FEATURES;
                        let (scales, minima) =
                            (scales.wrapping_add(numbers), minima.wrapping_add(numbers));
                        if !is_closed {
                            open_whole(format, from, quads);
                        }
                        open_numbers::<I>(format, from, scales, minima);
                    }
                }
            }
        }
        let (quads, stride) = if is_closed {
            (from, format.panel_bytes(OPENED) / (OPENED / GROUP))
        } else {
            (quads.cast_const(), GROUP_QUADS)
        };
        Groups { quads, stride, scales, minima }
    }
}

/// Opens the whole numbers of a block of 32 inputs.
#[inline(always)]
unsafe fn open_whole(format: Format, from: *const u8, quads: *mut u8) {
    // SAFETY: the caller's promise.
    unsafe {
        open_nibbles(from, 4, quads, quads.wrapping_add(4 * QUADS));
        if matches!(format, Format::Q5_0 | Format::Q5_1) {
            add_fifth_bits(from.add(4 * QUADS), quads);
        }
    }
}

/// Opens the scale and the minimum of a block of 32 inputs.
#[inline(always)]
unsafe fn open_numbers<I: Vectors>(
    format: Format,
    from: *const u8,
    scales: *mut f32,
    minima: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let halves = from.add(format.block().num_words() * QUADS);
        widen::<I>(halves, scales, 1.0);
        match format {
            Format::Q4_0 => widen::<I>(halves, minima, -8.0),
            Format::Q5_0 => widen::<I>(halves, minima, -16.0),
            Format::Q4_1 | Format::Q5_1 => widen::<I>(halves.add(HALVES), minima, 1.0),
            _ => {} // signed
        }
    }
}

/// Opens a block of 256 inputs, each 64 of which are the low and the high halves of 8 words.
#[inline(always)]
unsafe fn open_q4_k<I: Vectors>(
    from: *const u8,
    quads: *mut u8,
    scales: *mut f32,
    minima: *mut f32,
    has_fifth_bits: bool,
) {
    // SAFETY: the caller's promise.
    unsafe {
        for pair in 0..4 {
            let low = quads.wrapping_add(2 * pair * GROUP_QUADS);
            open_nibbles(from.add(pair * 8 * QUADS), 8, low, low.wrapping_add(GROUP_QUADS));
        }
        let mut words = from.add(32 * QUADS);
        if has_fifth_bits {
            for group in 0..8 {
                let to = quads.wrapping_add(group * GROUP_QUADS);
                for at in 0..GROUP_QUADS {
                    let bit = words.add(at).read() >> group & 1;
                    to.add(at).write(to.add(at).read() | bit << 4);
                }
            }
            words = words.add(8 * QUADS);
        }
        open_six_bits::<I>(words, scales, minima);
    }
}

/// Opens scales and minima of 8 groups, in three words of each feature; their factors follow.
#[inline(always)]
unsafe fn open_six_bits<I: Vectors>(words: *const u8, scales: *mut f32, minima: *mut f32) {
    const LOW: u32 = 0x0f0f_0f0f;
    const SIX: u32 = 0x3f3f_3f3f;
    // SAFETY: the caller's promise.
    unsafe {
        let mut packed = [[0_u32; PANEL_FEATURES]; 4];
        for feature in 0..PANEL_FEATURES {
            // `map` of an array would not be inlined, as it does not have the instructions.
            let a = word_of(words, 0, feature);
            let (b, c) = (word_of(words, 1, feature), word_of(words, 2, feature));
            packed[0][feature] = a & SIX;
            packed[1][feature] = c & LOW | a >> 2 & !LOW & SIX;
            packed[2][feature] = b & SIX;
            packed[3][feature] = c >> 4 & LOW | b >> 2 & !LOW & SIX;
        }
        let mut factors = [0.0_f32; PANEL_FEATURES];
        for (number, to) in [scales, minima].into_iter().enumerate() {
            let sign = if number == 0 { 1.0 } else { -1.0 };
            widen::<I>(words.add(3 * QUADS + number * HALVES), factors.as_mut_ptr(), sign);
            for group in 0..8 {
                let words = &packed[2 * number + group / 4];
                let to = to.wrapping_add(group * PANEL_FEATURES);
                for feature in 0..PANEL_FEATURES {
                    let whole = byte_of(words[feature], group % 4);
                    to.add(feature).write(factors[feature] * whole);
                }
            }
        }
    }
}

/// Opens a block of 256 inputs of 6 bits, with scales for 16 inputs.
#[inline(always)]
unsafe fn open_q6_k<I: Vectors>(
    from: *const u8,
    quads: *mut u8,
    scales: *mut f32,
    minima: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        for side in 0..2 {
            let high = from.add((32 + side * 8) * QUADS);
            for run in 0..4 {
                let low = from.add((side * 16 + run % 2 * 8) * QUADS);
                let to = quads.wrapping_add((4 * side + run) * GROUP_QUADS);
                for at in 0..GROUP_QUADS {
                    let low = low.add(at).read() >> (run / 2 * 4) & 15;
                    let high = high.add(at).read() >> (2 * run) & 3;
                    to.add(at).write(low | high << 4);
                }
            }
        }
        let words = from.add(48 * QUADS);
        let mut steps = [0.0_f32; PANEL_FEATURES];
        widen::<I>(words.add(4 * QUADS), steps.as_mut_ptr(), 1.0);
        for group in 0..16 {
            let (scales, minima) = (
                scales.wrapping_add(group * PANEL_FEATURES),
                minima.wrapping_add(group * PANEL_FEATURES),
            );
            for feature in 0..PANEL_FEATURES {
                let four = word_of(words, group / 4, feature);
                let whole = (four << (24 - group % 4 * 8)).cast_signed() >> 24;
                #[expect(clippy::cast_precision_loss, reason = "8 bits")]
                let scale = steps[feature] * whole as f32;
                scales.add(feature).write(scale);
                minima.add(feature).write(-32.0 * scale);
            }
        }
    }
}

/// A word of a feature.
#[inline(always)]
unsafe fn word_of(words: *const u8, word: usize, feature: usize) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { u32::from_le_bytes(words.add(word * QUADS + 4 * feature).cast::<[u8; 4]>().read()) }
}

/// A byte of a word, from 0 to 255.
#[inline(always)]
fn byte_of(word: u32, byte: usize) -> f32 {
    let whole = (word >> (8 * byte) & 255).cast_signed();
    #[expect(clippy::cast_precision_loss, reason = "8 bits")]
    let number = whole as f32;
    number
}

/// Float16 of 64 features times a number, as float32.
#[inline(always)]
unsafe fn widen<I: Vectors>(from: *const u8, to: *mut f32, times: f32) {
    #[expect(clippy::cast_ptr_alignment, reason = "a multiple of 128 bytes from the panel's start")]
    let from = from.cast::<Float16>();
    for first in (0..PANEL_FEATURES).step_by(PANEL) {
        // SAFETY: the caller's promise.
        unsafe {
            let numbers = I::load_float16(from.add(first));
            I::store(I::mul(numbers, I::splat(times)), to.add(first));
        }
    }
}

/// Writes the low halves of some words, and their high halves.
#[inline(always)]
unsafe fn open_nibbles(from: *const u8, num_words: usize, low: *mut u8, high: *mut u8) {
    for at in 0..num_words * QUADS {
        // SAFETY: the caller's promise.
        unsafe {
            let byte = from.add(at).read();
            low.add(at).write(byte & 15);
            high.add(at).write(byte >> 4);
        }
    }
}

/// Adds 16 where a bit is set: bit n of a feature's word is that of its input n.
#[inline(always)]
unsafe fn add_fifth_bits(from: *const u8, to: *mut u8) {
    for quad in 0..8 {
        for feature in 0..PANEL_FEATURES {
            // SAFETY: the caller's promise.
            unsafe {
                let bits = word_of(from, 0, feature) >> (4 * quad);
                // Bits 0 to 3 of the number become bit 4 of bytes 0 to 3.
                let spread = (bits & 15).wrapping_mul(0x0020_4081) & 0x0101_0101;
                let at = to.add(quad * QUADS + 4 * feature).cast::<[u8; 4]>();
                at.write((u32::from_le_bytes(at.read()) | spread << 4).to_le_bytes());
            }
        }
    }
}
