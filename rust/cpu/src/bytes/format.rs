//! The formats: places of the numbers of a block, and their values.

use crate::bytes::turn::TURNED;
use crate::error::{Error, Result};
use crate::linear::PANEL_FEATURES;
use crate::storage::Storage;

/// Inputs of a row that share a scale in most formats.
pub(crate) const GROUP: usize = 32;
/// The most inputs whose products of bytes certainly have a sum of 32 bits.
const MOST_WHOLE: usize = 1 << 16;
/// Bytes that hold four inputs of each feature of a panel.
pub(crate) const QUADS: usize = 4 * PANEL_FEATURES;
/// Bytes of a float16 of each feature.
pub(crate) const HALVES: usize = 2 * PANEL_FEATURES;

/// Storage of weights in a panel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Signed bytes with a scale for each output feature, beside the panels, and one for each row
    /// that they are multiplied with.
    I8Rows,
    /// As `I8Rows`, of inputs that are turned by 64, in weights and in rows.
    I8Turned,
    /// Signed bytes and a scale for 32 inputs.
    Q8_0,
    /// 4 bits and a scale for 32 inputs.
    Q4_0,
    /// 4 bits, a scale and a minimum for 32 inputs.
    Q4_1,
    /// As `Q4_0`, for 64 inputs, which share the scale of a row as well.
    Q4_0_64,
    /// As `Q4_1`, for 64 inputs, which share the scale of a row as well.
    Q4_1_64,
    /// 5 bits and a scale for 32 inputs.
    Q5_0,
    /// 5 bits, a scale and a minimum for 32 inputs.
    Q5_1,
    /// 4 bits, scales and minima of 6 bits for 32 inputs.
    Q4K,
    /// 5 bits, scales and minima of 6 bits for 32 inputs.
    Q5K,
    /// 6 bits, scales of 8 bits for 16 inputs.
    Q6K,
    /// 4 bits of a table and a scale for 32 inputs.
    Iq4Nl,
}

/// A block of a file, of one feature.
pub(crate) struct Block {
    /// Number of weights.
    pub(crate) num_inputs: usize,
    /// Places of its words of four bytes, in the order of the panel: offset of the first, number.
    pub(crate) words: &'static [(usize, usize)],
    /// Offsets of its float16 numbers: the scale, then the minimum.
    pub(crate) halves: &'static [usize],
}

impl Block {
    const fn new(
        num_inputs: usize,
        words: &'static [(usize, usize)],
        halves: &'static [usize],
    ) -> Self {
        Self { num_inputs, words, halves }
    }

    pub(crate) const fn num_words(&self) -> usize {
        let (mut num, mut run) = (0, 0);
        while run < self.words.len() {
            num += self.words[run].1;
            run += 1;
        }
        num
    }

    pub(crate) const fn num_bytes(&self) -> usize {
        4 * self.num_words() + 2 * self.halves.len()
    }

    /// Copies the block of a feature of a panel, in the order of a file.
    pub(crate) fn take(&self, panel: &[u8], feature: usize, to: &mut [u8]) {
        let mut word = 0;
        for &(first, num) in self.words {
            for to in to[first..][..4 * num].chunks_exact_mut(4) {
                to.copy_from_slice(&panel[word * QUADS + 4 * feature..][..4]);
                word += 1;
            }
        }
        for (index, half) in self.halves.iter().enumerate() {
            let from = word * QUADS + index * HALVES + 2 * feature;
            to[*half..][..2].copy_from_slice(&panel[from..][..2]);
        }
    }
}

impl Format {
    /// All formats.
    pub const ALL: [Self; 13] = [
        Self::I8Rows,
        Self::I8Turned,
        Self::Q8_0,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q4_0_64,
        Self::Q4_1_64,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::Iq4Nl,
    ];

    /// Whether a row and an output feature have one scale each.
    pub(crate) const fn is_whole(self) -> bool {
        matches!(self, Self::I8Rows | Self::I8Turned)
    }

    /// Whether weights of any storage become blocks of this format.
    pub(crate) const fn takes_any(self) -> bool {
        matches!(self, Self::I8Turned | Self::Q8_0 | Self::Q4_1)
    }

    /// The storage of the blocks in a file, or of the same bytes.
    pub(crate) const fn storage(self) -> Storage {
        match self {
            Self::I8Rows | Self::I8Turned => Storage::I8Rows,
            Self::Q8_0 => Storage::Q8_0,
            Self::Q4_0 => Storage::Q4_0,
            Self::Q4_1 => Storage::Q4_1,
            Self::Q4_0_64 => Storage::Q4_0_64,
            Self::Q4_1_64 => Storage::Q4_1_64,
            Self::Q5_0 => Storage::Q5_0,
            Self::Q5_1 => Storage::Q5_1,
            Self::Q4K => Storage::Q4K,
            Self::Q5K => Storage::Q5K,
            Self::Q6K => Storage::Q6K,
            Self::Iq4Nl => Storage::Iq4Nl,
        }
    }

    /// Inputs of a row that share a scale, of `in_features`.
    pub(crate) const fn group(self, in_features: usize) -> usize {
        match self {
            Self::I8Rows | Self::I8Turned => in_features,
            Self::Q4_0_64 | Self::Q4_1_64 => 64,
            _ => GROUP,
        }
    }

    /// Refuses inputs that are no whole blocks, or too many for exact sums.
    pub(crate) fn check(self, in_features: usize) -> Result<()> {
        let inputs = self.block().num_inputs;
        if in_features == 0 || !in_features.is_multiple_of(inputs) {
            return Err(Error(format!(
                "in_features must be a multiple of {inputs} for {self:?}; got {in_features}"
            )));
        }
        if self.is_whole() && in_features > MOST_WHOLE {
            return Err(Error(format!(
                "in_features must be {MOST_WHOLE} at most for {self:?}; got {in_features}"
            )));
        }
        Ok(())
    }

    /// Describes a block of a file; words of whole numbers come first.
    pub(crate) const fn block(self) -> Block {
        match self {
            Self::I8Rows => Block::new(32, &[(0, 8)], &[]),
            Self::I8Turned => Block::new(TURNED, &[(0, TURNED / 4)], &[]),
            Self::Q8_0 => Block::new(32, &[(2, 8)], &[0]),
            Self::Q4_0 | Self::Iq4Nl => Block::new(32, &[(2, 4)], &[0]),
            Self::Q4_1 => Block::new(32, &[(4, 4)], &[0, 2]),
            Self::Q4_0_64 => Block::new(64, &[(2, 8)], &[0]),
            Self::Q4_1_64 => Block::new(64, &[(4, 8)], &[0, 2]),
            Self::Q5_0 => Block::new(32, &[(6, 4), (2, 1)], &[0]),
            Self::Q5_1 => Block::new(32, &[(8, 4), (4, 1)], &[0, 2]),
            Self::Q4K => Block::new(256, &[(16, 32), (4, 3)], &[0, 2]),
            Self::Q5K => Block::new(256, &[(48, 32), (16, 8), (4, 3)], &[0, 2]),
            Self::Q6K => Block::new(256, &[(0, 32), (128, 16), (192, 4)], &[208]),
        }
    }

    /// Bytes of a panel.
    pub const fn panel_bytes(self, in_features: usize) -> usize {
        let block = self.block();
        in_features / block.num_inputs * block.num_bytes() * PANEL_FEATURES
    }
}
