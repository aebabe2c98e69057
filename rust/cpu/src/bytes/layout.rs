//! Layouts of the whole numbers of weights, and how four of each feature become bytes.

use crate::bytes::Dots;
use crate::bytes::format::{GROUP, QUADS};
use crate::storage::WIDENING;

/// Four inputs of 16 features of a panel.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    /// The first word of the first block, that of the first feature.
    pub(crate) from: *const u8,
    /// Bytes of the panel for 32 inputs.
    pub(crate) stride: usize,
    /// The first input of a group, less than 256.
    pub(crate) input: usize,
    /// Index of the four inputs in the group.
    pub(crate) load: usize,
}

impl Place {
    /// The block of 32 inputs that holds the four.
    #[inline(always)]
    fn block(self) -> *const u8 {
        self.from.wrapping_add(self.input / GROUP * self.stride)
    }

    /// Index of the four in the 32 inputs of the block.
    #[inline(always)]
    fn quad(self) -> usize {
        self.input % GROUP / 4 + self.load
    }
}

/// Layout of whole numbers in blocks, or in opened blocks.
pub(crate) trait Layout {
    /// Their layout in opened blocks.
    type Opened: Layout;
    /// Inputs that share a scale; None for all.
    const INPUTS: Option<usize> = <Self::Opened as Layout>::INPUTS;
    /// Loads of a group, at most those of 32 inputs.
    const LOADS: usize = match Self::INPUTS {
        Some(inputs) if inputs < GROUP => inputs / 4,
        _ => GROUP / 4,
    };
    /// Loads whose products add up to 16 bits at most.
    const FEW_LOADS: usize = <Self::Opened as Layout>::FEW_LOADS;
    /// Whether they lie in the panel itself: the first rows read it from memory.
    const IS_PANEL: bool = true;

    /// Loads the whole numbers at a place.
    ///
    /// # Safety
    /// The CPU has the instructions, and the blocks exist.
    unsafe fn quads<I: Dots>(at: Place) -> I::Quads;
}

/// A byte for each input, in the order of inputs.
pub(crate) struct InOrder<const FEW_LOADS: usize, const INPUTS: usize>;

impl<const FEW_LOADS: usize, const INPUTS: usize> Layout for InOrder<FEW_LOADS, INPUTS> {
    type Opened = Self;
    const INPUTS: Option<usize> = Some(INPUTS);
    const FEW_LOADS: usize = FEW_LOADS;
    const IS_PANEL: bool = false;

    #[inline(always)]
    unsafe fn quads<I: Dots>(at: Place) -> I::Quads {
        // SAFETY: the caller's promise.
        unsafe { I::load_quads(at.block().wrapping_add(at.quad() * QUADS)) }
    }
}

/// Bytes of a panel that holds nothing else.
pub(crate) struct OnlyBytes;

impl Layout for OnlyBytes {
    type Opened = Self;
    const INPUTS: Option<usize> = None;
    const FEW_LOADS: usize = 8;

    #[inline(always)]
    unsafe fn quads<I: Dots>(at: Place) -> I::Quads {
        // SAFETY: the caller's promise.
        unsafe { I::load_quads(at.from.wrapping_add((at.input / 4 + at.load) * QUADS)) }
    }
}

/// Bytes of a panel's blocks.
pub(crate) struct Bytes;

impl Layout for Bytes {
    type Opened = InOrder<8, GROUP>;

    #[inline(always)]
    unsafe fn quads<I: Dots>(at: Place) -> I::Quads {
        // SAFETY: the caller's promise.
        unsafe { Self::Opened::quads::<I>(at) }
    }
}

/// 4 bits: low halves of four words are the first 16 inputs, high ones the others.
pub(crate) struct Nibbles;

impl Layout for Nibbles {
    type Opened = InOrder<8, GROUP>;

    #[inline(always)]
    unsafe fn quads<I: Dots>(at: Place) -> I::Quads {
        // SAFETY: the caller's promise.
        unsafe { bits::<I>(at.block(), at.load % 4, at.load / 4 * 4, 15) }
    }
}

/// 4 bits of 64 inputs: low halves of eight words are the first 32.
pub(crate) struct WideNibbles;

impl Layout for WideNibbles {
    type Opened = InOrder<8, 64>;

    #[inline(always)]
    unsafe fn quads<I: Dots>(at: Place) -> I::Quads {
        // SAFETY: the caller's promise.
        unsafe { bits::<I>(at.block(), at.load % 8, at.load / 8 * 4, 15) }
    }
}

/// As `Nibbles`, with a word of fifth bits.
pub(crate) struct Fives;

impl Layout for Fives {
    type Opened = InOrder<4, GROUP>;

    #[inline(always)]
    unsafe fn quads<I: Dots>(at: Place) -> I::Quads {
        // SAFETY: the caller's promise.
        unsafe {
            let low = Nibbles::quads::<I>(at);
            I::add_fifth_bits(low, at.block().wrapping_add(4 * QUADS), at.load)
        }
    }
}

/// As `Nibbles`, of places in a table of signed bytes.
pub(crate) struct Widening;

impl Layout for Widening {
    type Opened = InOrder<8, GROUP>;

    #[inline(always)]
    unsafe fn quads<I: Dots>(at: Place) -> I::Quads {
        // SAFETY: the caller's promise.
        unsafe { I::look_up(&WIDENING, Nibbles::quads::<I>(at)) }
    }
}

/// 4 bits of 256 inputs: low halves of eight words are 32 inputs, high ones the next.
pub(crate) struct PairedNibbles;

impl Layout for PairedNibbles {
    type Opened = InOrder<8, GROUP>;

    #[inline(always)]
    unsafe fn quads<I: Dots>(at: Place) -> I::Quads {
        let group = at.input / GROUP;
        // SAFETY: the caller's promise.
        unsafe { bits::<I>(at.from, group / 2 * 8 + at.load, group % 2 * 4, 15) }
    }
}

/// As `PairedNibbles`, with eight words of fifth bits: bit n of a byte is that of 32 inputs n.
pub(crate) struct PairedFives;

impl Layout for PairedFives {
    type Opened = InOrder<4, GROUP>;

    #[inline(always)]
    unsafe fn quads<I: Dots>(at: Place) -> I::Quads {
        // SAFETY: the caller's promise.
        unsafe {
            let low = PairedNibbles::quads::<I>(at);
            I::join(low, bits::<I>(at.from, 32 + at.load, at.input / GROUP, 1))
        }
    }
}

/// 6 bits of 256 inputs, 128 in each half: four low ones in 16 words, whose low halves are the
/// first 64 inputs; two high ones in 8 words, 32 inputs from each pair of bits.
pub(crate) struct Sixes;

impl Layout for Sixes {
    type Opened = InOrder<2, 16>;

    #[inline(always)]
    unsafe fn quads<I: Dots>(at: Place) -> I::Quads {
        let (half, run) = (at.input / (4 * GROUP), at.input / GROUP % 4);
        let quad = at.quad();
        // SAFETY: the caller's promise.
        unsafe {
            let low = bits::<I>(at.from, half * 16 + run % 2 * 8 + quad, run / 2 * 4, 15);
            I::join(low, bits::<I>(at.from, 32 + half * 8 + quad, 2 * run, 3))
        }
    }
}

/// Bits of a word of a block.
#[inline(always)]
unsafe fn bits<I: Dots>(from: *const u8, word: usize, from_bit: usize, mask: u8) -> I::Quads {
    #[expect(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "up to 7")]
    let from_bit = from_bit as i32;
    // SAFETY: the caller's promise.
    unsafe { I::load_bits(from.wrapping_add(word * QUADS), from_bit, mask) }
}
