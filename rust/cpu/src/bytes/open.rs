//! Opening of blocks: whole numbers become bytes, scales and minima float32.
#![expect(clippy::needless_range_loop, reason = "constant bounds over several arrays at once")]

use crate::bytes::Dots;
use crate::bytes::format::{Format, GROUP, HALVES, QUADS};
use crate::bytes::layout::{Layout, Place};
use crate::linear::PANEL_FEATURES;
use crate::number::{Float16, PANEL};
use crate::vectors::Vectors;

/// Inputs that are opened at once: 16 KiB of bytes.
pub(crate) const OPENED: usize = 256;
/// Bytes of a group of opened inputs.
const GROUP_QUADS: usize = GROUP / 4 * QUADS;

/// Inputs of a panel in the form that a kernel takes.
#[repr(C, align(64))]
pub(crate) struct Opened {
    /// `[inputs / 4][64][4]`; unused if a kernel takes them from the panel.
    quads: [u8; OPENED / 4 * QUADS],
    /// `[groups][64]`.
    scales: [f32; OPENED / 16 * PANEL_FEATURES],
    /// `[groups][64]`; unused if a format has none.
    minima: [f32; OPENED / 16 * PANEL_FEATURES],
}

/// Addresses of opened inputs for a kernel.
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

impl Groups {
    /// The one group of whole rows, as long as its scales live; a panel of them is only bytes.
    #[inline(always)]
    pub(crate) fn whole(from: *const u8, scales: &[f32; PANEL_FEATURES]) -> Self {
        let scales = scales.as_ptr();
        // There are no minima to read.
        Self { quads: from, stride: GROUP_QUADS, scales, minima: scales }
    }
}

impl Opened {
    /// Opens the numbers of `num` inputs of a panel, whose blocks begin at `from`; a kernel takes
    /// the weights from the panel.
    ///
    /// # Safety
    /// The CPU has the instructions; the blocks exist, at most `OPENED` inputs of them.
    #[inline(always)]
    pub(crate) unsafe fn open_numbers<I: Dots>(
        &mut self,
        format: Format,
        from: *const u8,
        num: usize,
    ) -> Groups {
        let (inputs, words) = (format.block().num_inputs, format.block().num_words());
        let stride = format.panel_bytes(OPENED) * GROUP / OPENED;
        let (scales, minima) = (self.scales.as_mut_ptr(), self.minima.as_mut_ptr());
        // SAFETY: the caller's promise; there is space for the inputs.
        unsafe {
            match format {
                Format::Q4K => open_six_bits::<I>(from.add(32 * QUADS), scales, minima),
                Format::Q5K => open_six_bits::<I>(from.add(40 * QUADS), scales, minima),
                Format::Q6K => open_eight_bits::<I>(from.add(48 * QUADS), scales),
                _ => {
                    for first in (0..num).step_by(inputs) {
                        let to = first / inputs * PANEL_FEATURES;
                        open_halves::<I>(
                            format,
                            from.add(first / GROUP * stride + words * QUADS),
                            scales.wrapping_add(to),
                            minima.wrapping_add(to),
                        );
                    }
                }
            }
        }
        Groups { quads: from, stride, scales, minima }
    }

    /// Opens the numbers, and the weights, whose layout is `L`.
    ///
    /// # Safety
    /// As `open_numbers`.
    #[inline(always)]
    pub(crate) unsafe fn open<I: Dots, L: Layout>(
        &mut self,
        format: Format,
        from: *const u8,
        num: usize,
    ) -> Groups {
        // SAFETY: the caller's promise; there is space for the inputs.
        unsafe {
            let groups = self.open_numbers::<I>(format, from, num);
            let size = L::INPUTS.unwrap_or(num);
            for input in (0..num).step_by(size) {
                for load in 0..size / 4 {
                    let to = self.quads.as_mut_ptr().wrapping_add((input / 4 + load) * QUADS);
                    for feature in (0..PANEL_FEATURES).step_by(PANEL) {
                        let from = from.wrapping_add(4 * feature);
                        let at = Place { from, stride: groups.stride, input, load };
                        let quads = L::quads::<I>(at);
                        I::store_quads(quads, to.wrapping_add(4 * feature));
                    }
                }
            }
            Groups { quads: self.quads.as_ptr(), stride: GROUP_QUADS, ..groups }
        }
    }
}

/// Opens the scale and the minimum of a block.
#[inline(always)]
unsafe fn open_halves<I: Vectors>(
    format: Format,
    halves: *const u8,
    scales: *mut f32,
    minima: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        widen::<I>(halves, scales, 1.0);
        if matches!(format, Format::Q4_1 | Format::Q4_1_64 | Format::Q5_1) {
            widen::<I>(halves.add(HALVES), minima, 1.0);
        }
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

/// Opens scales of 8 bits for 16 inputs, in four words of each feature; their factor follows.
#[inline(always)]
unsafe fn open_eight_bits<I: Vectors>(words: *const u8, scales: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut steps = [0.0_f32; PANEL_FEATURES];
        widen::<I>(words.add(4 * QUADS), steps.as_mut_ptr(), 1.0);
        for group in 0..16 {
            let scales = scales.wrapping_add(group * PANEL_FEATURES);
            for feature in 0..PANEL_FEATURES {
                let four = word_of(words, group / 4, feature);
                let whole = (four << (24 - group % 4 * 8)).cast_signed() >> 24;
                #[expect(clippy::cast_precision_loss, reason = "8 bits")]
                let scale = steps[feature] * whole as f32;
                scales.add(feature).write(scale);
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
