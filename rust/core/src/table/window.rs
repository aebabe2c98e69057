//! Window tables: the blocks of a sequence in layers that see a window of it.
//!
//! Owns the map only, as [`super::BlockTable`] does.  It grows at the end, and what no later query
//! sees leaves at the beginning.
//!
//! Costs: 4 bytes a block; taking blocks off the beginning moves those behind them.

use crate::ids::BlockId;

/// Physical blocks of the logical blocks from `first` on.
#[derive(Clone, Debug, Default)]
pub struct WindowTable {
    first: usize,
    blocks: Vec<BlockId>,
}

impl WindowTable {
    /// The first logical block that is mapped.
    pub fn first(&self) -> usize {
        self.first
    }

    /// The logical block behind the last one that is mapped.
    pub fn end(&self) -> usize {
        self.first + self.blocks.len()
    }

    /// The physical blocks, in order.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// The physical blocks, to be exchanged.
    pub(crate) fn blocks_mut(&mut self) -> &mut [BlockId] {
        &mut self.blocks
    }

    /// The physical block of logical block `index`, which is mapped.
    pub fn block(&self, index: usize) -> BlockId {
        self.blocks[index - self.first]
    }

    /// Maps the next logical block to `block`.
    pub(crate) fn push(&mut self, block: BlockId) {
        self.blocks.push(block);
    }

    /// Unmaps the logical blocks before `first`.
    pub(crate) fn drain_before(&mut self, first: usize) -> impl Iterator<Item = BlockId> {
        let num_passed = first.saturating_sub(self.first).min(self.blocks.len());
        self.first += num_passed;
        self.blocks.drain(..num_passed)
    }

    /// Unmaps everything.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = BlockId> {
        self.first = 0;
        self.blocks.drain(..)
    }
}
