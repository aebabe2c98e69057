//! Block tables: the logical blocks of a sequence and the physical blocks behind them.
//!
//! Owns the map only; who counts the references is [`crate::space`].  Invariant:
//! 1. Logical block `i` holds the keys and values of tokens `i * block_size ..` of its
//!    sequence.
//!
//! Costs: 4 bytes a block.

use crate::ids::BlockId;

/// Blocks that `num_tokens` tokens take.
pub fn num_blocks_for(num_tokens: usize, block_size: usize) -> usize {
    num_tokens.div_ceil(block_size)
}

/// Physical blocks by logical index.
#[derive(Clone, Debug, Default)]
pub struct BlockTable {
    blocks: Vec<BlockId>,
}

impl BlockTable {
    /// The physical blocks, in logical order.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Logical blocks mapped.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether nothing is mapped: the sequence has no memory.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Maps the next logical block.
    pub fn push(&mut self, block: BlockId) {
        self.blocks.push(block);
    }

    /// Maps logical block `index` anew and returns what it was mapped to.
    pub fn replace(&mut self, index: usize, block: BlockId) -> BlockId {
        std::mem::replace(&mut self.blocks[index], block)
    }

    /// Unmaps everything, in logical order.
    pub fn drain(&mut self) -> impl Iterator<Item = BlockId> {
        self.blocks.drain(..)
    }
}
